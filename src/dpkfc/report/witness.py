"""Give the head of a ledger away, so that somebody else can show that the ledger was changed."""

from __future__ import annotations

from pathlib import Path

from dpkfc.checkpoint import place_file
from dpkfc.report.card import LEDGER
from dpkfc.report.verify import CardError, verify_history


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
        from dpkfc_verify.stamps import check_signature, read_stamp
    except ImportError as error:
        raise ImportError(
            "time stamps need dpkfc-verify: pip install ./verifier[stamps]"
        ) from error
    file = path / LEDGER if path.is_dir() else path
    ledger = verify_history(file)
    if not stamp.is_file():
        raise CardError(f"{stamp} does not exist; give the answer of a time-stamping authority")
    try:
        head, time = read_stamp(stamp)
        if head not in ledger.heads:
            raise CardError(f"{stamp} is a time stamp of another head than any of {file}")
        if root is not None:
            check_signature(stamp, head, root)
    except (Mismatch, Unchecked) as error:
        raise CardError(str(error)) from error
    count = ledger.heads.index(head)
    kept = file.with_name(f"ledger-{count}.tsr")
    content = stamp.read_bytes()
    place_file(kept, lambda part: part.write_bytes(content))
    signed = "its signature was not checked" if root is None else f"signed under {root.name}"
    return f"{kept}: {count} releases at {time}, {signed}"
