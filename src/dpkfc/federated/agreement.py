"""Keys of pairs of clients, agreed on through the server: X25519, HKDF-SHA256, AES-256.

A private key, a public key and a derived key have 32 bytes each. Every derived key is bound to a purpose, so that two
purposes never share a key. Sources: RFC 7748 (X25519), RFC 5869 (HKDF), NIST SP 800-38A and 38D (AES-CTR, AES-GCM).
"""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

__all__ = ["KEY_BYTES", "SEAL_BYTES", "PrivateKey", "derive", "new_key", "seal", "uniform_integers", "unseal"]

KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES  # that sealing adds to a text


def new_key() -> bytes:
    """Return a new private key of the operating system's random numbers, 32 bytes."""
    return secrets.token_bytes(KEY_BYTES)


def derive(secret: bytes, purpose: str) -> bytes:
    """Derive a key for one purpose from a secret, 32 bytes; keys of two purposes are independent."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=purpose.encode()).derive(secret)


class PrivateKey:
    """PRIVATE: an X25519 key. It remembers what it agreed on with each public key, so that a pair agrees once.

    Args:
        private: 32 bytes.

    Attributes:
        public: the public key, 32 bytes.

    Raises:
        ValueError: a key of another length.
    """

    def __init__(self, private: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private)
        self._agreed: dict[bytes, bytes] = {}
        self.public = self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, purpose: str) -> bytes:
        """Derive the key that both ends of a pair get for a purpose, 32 bytes.

        Raises:
            ValueError: a public key that is not one (another length, low order).
        """
        if public not in self._agreed:
            self._agreed[public] = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        return derive(self._agreed[public], purpose)


def seal(key: bytes, text: bytes, context: str) -> bytes:
    """Encrypt and authenticate a text with AES-256-GCM under a new nonce; 28 bytes longer than the text.

    Args:
        key: 32 bytes.
        text: to hide.
        context: what the text belongs to; authenticated, not hidden.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, context.encode())


def unseal(key: bytes, sealed: bytes, context: str) -> bytes:
    """Return the text that was sealed.

    Raises:
        ValueError: another key or context than it was sealed with, or bytes that were changed.
    """
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context.encode())
    except InvalidTag:
        sealed_text = context.partition(":")[0]
        raise ValueError(
            f"the sealed {sealed_text} cannot be opened: they were changed, or are of another round; request keys again"
        ) from None


def uniform_integers(key: bytes, count: int) -> NDArray[np.int64]:
    """Expand a key that is used once to uniform integers of 64 bits `[count]`, by AES-256 in counter mode."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<i8")
    return words.astype(np.int64)
