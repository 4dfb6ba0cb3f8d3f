"""Give the head of a ledger away, so that somebody else can show that the ledger was changed."""

from __future__ import annotations

from pathlib import Path

from dpkfc.checkpoint import place_file
from dpkfc.report.card_files import LEDGER
from dpkfc.report.verify import verify_history
from dpkfc.report.written_card import CardError

# Tags of DER.
_CONSTRUCTED, _CERTIFICATES = 0x20, 0xA0


def witness_line(path: Path) -> str:
    """Return the line that names a ledger, its number of releases and its head.

    Args:
        path: a ledger, or the folder of a run.

    Raises:
        LedgerError, CardError, CheckpointError: as `verify_history`.
    """
    ledger = verify_history(path / LEDGER if path.is_dir() else path)
    count, head = len(ledger.releases), ledger.heads[-1]
    return f"dpkfc ledger {ledger.id} releases {count} head {head}"


def keep_stamp(path: Path, stamp: Path, root: Path | None = None) -> str:
    """Copy a time stamp (RFC 3161) of a head of a ledger next to it, as `ledger-RELEASES.tsr`.

    Args:
        path: a ledger, or the folder of a run.
        stamp: the response of a time-stamping authority.
        root: a certificate under which it must be signed; None leaves the signature unchecked.

    Returns:
        What the stamp shows, and where it was put.

    Raises:
        CardError: it is not a stamp of this ledger, or its signature does not hold.
        ImportError: dpkfc-verify, which reads time stamps, is not installed.
    """
    try:
        from dpkfc_verify.ledger import Mismatch, Unchecked
        from dpkfc_verify.stamps import read_stamp
    except ImportError as error:
        raise ImportError(
            "time stamps need dpkfc-verify: pip install ./verifier[stamps]"
        ) from error
    file = path / LEDGER if path.is_dir() else path
    ledger = verify_history(file)
    if not stamp.is_file():
        raise CardError(f"{stamp} does not exist; give the answer of a time-stamping authority")
    content = _sort_certificates(stamp.read_bytes())
    try:
        count, time = read_stamp(content, ledger.heads, root)
    except (Mismatch, Unchecked) as error:
        raise CardError(f"{stamp}: {error}") from error
    kept = file.with_name(f"ledger-{count}.tsr")
    place_file(kept, lambda part: part.write_bytes(content))
    return f"{kept}: {count} releases at {time}"


def _sort_certificates(data: bytes, tag: int = 0) -> bytes:
    """Sort the certificates in elements of DER: OpenSSL does not, and nobody signs their order."""
    parts, place = [], 0
    while place + 1 < len(data):
        begin, length = place + 2, data[place + 1]
        if length & 0x80:
            begin += length & 0x7F
            length = int.from_bytes(data[place + 2 : begin], "big")
        content = data[begin : begin + length]
        if data[place] & _CONSTRUCTED:
            content = _sort_certificates(content, data[place])
        parts.append(data[place:begin] + content)
        place = begin + length
    return b"".join(sorted(parts) if tag == _CERTIFICATES else parts)
