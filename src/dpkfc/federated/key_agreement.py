"""Keys of pairs of clients, agreed on through the server: X25519, HKDF-SHA256, AES-256.

A private key, a public key and a derived key have 32 bytes each. Every derived key is bound to a
purpose, so that two purposes never share a key. Sources: RFC 7748 (X25519), RFC 5869 (HKDF), NIST
SP 800-38A and 38D (AES-CTR, AES-GCM).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

KEY_BYTES = 32
# Keys, shares or sealed texts by client.
ByClient = Mapping[int, bytes]
_NONCE_BYTES, _TAG_BYTES = 12, 16
# Bytes that sealing adds to a text.
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES


def new_key() -> bytes:
    """Return a new private key of the operating system's random numbers, 32 bytes."""
    return secrets.token_bytes(KEY_BYTES)


def derive(secret: bytes, purpose: str) -> bytes:
    """Derive a key for one purpose from a secret, 32 bytes; purposes have independent keys."""
    info = purpose.encode()
    function = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info)
    return function.derive(secret)


class PrivateKey:
    """PRIVATE: an X25519 key. It caches the secret agreed on with each public key.

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
        """Derive the key of a pair for a purpose, 32 bytes; both ends derive the same.

        Raises:
            ValueError: an invalid public key (another length, low order).
        """
        if public not in self._agreed:
            other = X25519PublicKey.from_public_bytes(public)
            self._agreed[public] = self._key.exchange(other)
        return derive(self._agreed[public], purpose)


def seal(key: bytes, text: bytes, context: str) -> bytes:
    """Encrypt and authenticate a text with AES-256-GCM under a new nonce; adds 28 bytes.

    Args:
        key: 32 bytes.
        text: to hide.
        context: what the text belongs to; authenticated, not hidden.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = AESGCM(key).encrypt(nonce, text, context.encode())
    return nonce + sealed


def unseal(key: bytes, sealed: bytes, context: str) -> bytes:
    """Return the text that was sealed.

    Raises:
        ValueError: another key or context than it was sealed with, or bytes that were changed.
    """
    nonce = sealed[:_NONCE_BYTES]
    hidden = sealed[_NONCE_BYTES:]
    try:
        return AESGCM(key).decrypt(nonce, hidden, context.encode())
    except InvalidTag:
        sealed_text = context.partition(":")[0]
        raise ValueError(
            f"the sealed {sealed_text} cannot be opened: they were changed or belong to another "
            "round; request keys again"
        ) from None


def uniform_integers(key: bytes, count: int) -> NDArray[np.int64]:
    """Expand a key that is used once to uniform int64 `[count]`, by AES-256 in counter mode."""
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16)))
    stream = cipher.encryptor().update(bytes(8 * count))
    integers = np.frombuffer(stream, dtype="<i8")
    return integers.astype(np.int64)
