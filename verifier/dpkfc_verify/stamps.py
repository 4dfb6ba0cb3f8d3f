"""Read the time stamp of a head (RFC 3161), and check who signed it where a library is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from dpkfc_verify.ledger import Mismatch, Unchecked

# The first time in a response is when the stamp was made; times of its certificates follow.
_TIME = re.compile(rb"\x18[^0-9]{1,3}([0-9]{14})")


def read_stamp(content: bytes, heads: Sequence[str], root: Path | None) -> tuple[int, str]:
    """Return which of the heads a response of an authority holds, and its time and signer.

    Args:
        content: the response.
        heads: of a ledger.
        root: a certificate under which it must be signed. None leaves the signature unchecked, and
            where in the response head and time stand.

    Raises:
        Mismatch: it holds none of them, or no time, or is not signed under the root.
        Unchecked: rfc3161-client is not installed or cannot read it, or the root certificate
            is missing.
    """
    found = [i for i, head in enumerate(heads) if bytes.fromhex(head) in content]
    time = _TIME.search(content)
    if not found or time is None:
        raise Mismatch("it is the time stamp of another head than any of this ledger")
    signed = "its signature was not checked"
    if root is not None:
        _check_signature(content, heads[found[0]], root)
        signed = f"signed under {root.name}"
    return found[0], f"{datetime.strptime(time[1].decode(), '%Y%m%d%H%M%S')} UTC, {signed}"


def _check_signature(content: bytes, head: str, root: Path) -> None:
    try:
        import rfc3161_client
        from cryptography import x509

        roots = x509.load_pem_x509_certificates(root.read_bytes())
        response = rfc3161_client.decode_timestamp_response(content)
    except (ImportError, OSError, ValueError) as error:
        text = "pip install rfc3161-client, give a root in PEM, and a stamp by dpkfc ledger witness"
        raise Unchecked(f"its signature is not checked ({error}): {text}") from error
    try:
        rfc3161_client.VerifierBuilder(roots=roots).build().verify(response, bytes.fromhex(head))
    except (ValueError, rfc3161_client.VerificationError) as error:
        raise Mismatch(f"it is not signed under {root.name} ({error})") from error
