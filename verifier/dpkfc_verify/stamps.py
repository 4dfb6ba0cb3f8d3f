"""Read the time stamp of a head (RFC 3161), and check who signed it where a library is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dpkfc_verify.ledger import Mismatch, Unchecked

# Tags of DER, and the names of SHA-256 and of what a time stamp signs.
_OCTETS, _NAME, _TIME, _CONSTRUCTED, _FIRST = 0x04, 0x06, 0x18, 0x20, 0xA0
_SHA256 = bytes.fromhex("608648016503040201")
_SIGNED = bytes.fromhex("2a864886f70d0109100104")


def _children(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield tag, content and all bytes of the elements of DER."""
    place = 0
    while place < len(data):
        begin, tag, length, place = place, data[place], data[place + 1], place + 2
        if length & 0x80:
            size, place = length & 0x7F, place + (length & 0x7F)
            length = int.from_bytes(data[place - size : place], "big")
        place += length
        if place > len(data):
            raise ValueError
        yield tag, data[place - length : place], data[begin:place]


def _elements(data: bytes, depth: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of all elements of DER, also inside others."""
    for tag, content, _ in _children(data):
        yield tag, content
        if tag & _CONSTRUCTED and depth < 40:
            yield from _elements(content, depth + 1)


def read_stamp(path: Path) -> tuple[str, str]:
    """Return the SHA-256 and the time of a response of an authority; signatures are not checked.

    Raises:
        Mismatch: it is not a time stamp of a SHA-256.
    """
    try:
        elements = list(_elements(path.read_bytes()))
        begin = elements.index((_NAME, _SIGNED))
        inner = list(_elements(next(x for tag, x in elements[begin:] if tag == _OCTETS)))
        begin = inner.index((_NAME, _SHA256))
        head = next(x for tag, x in inner[begin:] if tag == _OCTETS).hex()
        digits = next(x for tag, x in inner if tag == _TIME).decode("ascii")
        year, *rest = re.findall(r"^\d{4}|\d\d", digits)
        return head, f"{year}-{rest[0]}-{rest[1]} {rest[2]}:{rest[3]}:{rest[4]} UTC"
    except (IndexError, ValueError, StopIteration) as error:
        raise Mismatch(f"{path.name} is not a time stamp of a SHA-256 (RFC 3161)") from error


def check_signature(path: Path, head: str, root: Path) -> None:
    """Check that a stamp is signed, up to a root certificate that you trust.

    Raises:
        Mismatch: signature or certificates do not hold.
        Unchecked: rfc3161-client is not installed, or there is no root certificate.
    """
    try:
        import rfc3161_client
        from cryptography import x509

        certificates = x509.load_pem_x509_certificates(root.read_bytes())
    except (ImportError, OSError, ValueError) as error:
        text = "pip install rfc3161-client, and give a certificate in PEM"
        raise Unchecked(f"its signature is not checked ({error}): {text}") from error
    builder = rfc3161_client.VerifierBuilder()
    for certificate in certificates:
        builder = builder.add_root_certificate(certificate)
    content = path.read_bytes()
    # OpenSSL does not sort the certificates, as DER asks; nobody signs their order.
    for tag, inner in _elements(content):
        if tag == _FIRST and inner:
            content = content.replace(inner, b"".join(sorted(x for _, _, x in _children(inner))))
    try:
        response = rfc3161_client.decode_timestamp_response(content)
        builder.build().verify(response, bytes.fromhex(head))
    except (ValueError, rfc3161_client.VerificationError) as error:
        raise Mismatch(f"{path.name} is not signed under {root.name} ({error})") from error
