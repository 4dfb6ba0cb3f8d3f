"""Secure aggregation: exact sums of integers under masks modulo 2⁶⁴, with recovery of dropouts.

The protocol of a round (Bonawitz et al. 2017, for a server that follows it), with threshold t =
`min_survivors`:

    keys     Every client makes a new mask key pair and a new self seed. It splits the private mask
             key and the seed into shares for the clients of the cohort, t of which give the
             secret. It seals each client's two shares under a key that the pair agrees on, and
             sends the sealed shares and the public mask key to the server.
    sum      A client opens the shares that the others sealed for it. It adds the mask of its self
             seed to its integers. It also adds a pair mask for every other client of the cohort;
             the other client subtracts the same mask.
    shares   The server fixes the survivors: the clients whose sums have come. Each survivor reveals
             its share of every survivor's self seed, and its share of every missing client's mask
             key. It never reveals both for one client: it answers for one set of t survivors or
             more in a round, and only for a set that contains it.

From t answers the server computes the survivors' self seeds and the missing clients' mask keys. It
subtracts the masks and has the sum of the survivors to the last bit. A message that comes late
stays under the self mask of its sender.

A server that requests no keys opens a round without recovery, which has one exchange of messages.
There each pair derives its mask from the channel keys of the hellos, for this plan, round and set
of clients. There is no self mask and no sharing. If one client of the cohort is lost, the masks of
the others stay and the round has no sum. Masks do not repeat, because a client answers each round
number once by its ledger: keep the channel key with the ledger. An adversary that learns a channel
key later opens the messages of its client.

Guarantee. The server follows the protocol and knows all that up to t − 1 clients know. Then the
messages of the other clients reveal no more than their sum, if X25519 (decisional Diffie-Hellman),
HKDF-SHA256, AES-256 and AES-GCM are secure.

Limits. Public keys travel through the server, and nothing here proves whose they are. A server that
replaces keys opens single messages. So does a server that names different survivor sets to
different clients, where 2 t <= n + colluding clients. Only its own client's noise protects an
opened message: `FederatedPlan.views` has that ε.

Rounding. Sum and noise are multiples of one grid before they are masked
(`privacy.grid.grid_of`). Hence the sum of masked integers is the sum of the noisy numbers to
the last bit. Every client rounds its own noise. For noise shares of 2⁹ grid steps and more, compare
the sum of t rounded shares with a Gaussian plus t uniform numbers of one grid step. The
probabilities of the first are the density of the second at the points of the grid, up to a total
variation of e^(−10⁶) (Poisson summation). The second is a post-processing of the Gaussian
mechanism. Taking ε from it, and not from its values at the points, is the one step that is argued
(a Riemann sum) and not proved here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Shamir's secret sharing: any `threshold` shares give the secret, and fewer shares reveal nothing.
#
# A secret has 32 bytes. It is the value at 0 of a polynomial over the integers modulo the prime
# 2²⁵⁶ + 297. The other coefficients are uniform, and the polynomial has degree `threshold` − 1. The
# share of holder x ≥ 1 is the value at x. Python's integers take a time that depends on their
# values: keep the timing of `split` from an adversary on the same machine. Source: Shamir 1979, How
# to share a secret.

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, bytes]:
    """Split a secret into one share for each holder.

    Args:
        secret: 32 bytes.
        holders: different numbers >= 1.
        threshold: shares that give the secret.

    Returns:
        Holder to a share of 33 bytes.

    Raises:
        ValueError: a secret of another length, a holder below 1 or twice, a threshold below 1 or
            above the holders.
    """
    points = list(holders)
    different = {x for x in points if 1 <= x < PRIME}
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if len(different) != len(points):
        raise ValueError(f"holders must be different integers >= 1, got {points[:8]}")
    if not 1 <= threshold <= len(points):
        raise ValueError(
            f"threshold must lie between 1 and the {len(points)} holders, got {threshold}"
        )
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    constant = int.from_bytes(secret, "big")
    coefficients.append(constant)
    shares = {}
    for x in points:
        value = _value(coefficients, x)
        shares[x] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def join(shares: Mapping[int, Sequence[bytes]], threshold: int) -> list[bytes]:
    """Compute several secrets from the shares of the same holders.

    Args:
        shares: holder to its shares, one a secret, in the same order for every holder.
        threshold: shares that give a secret; the holders with the smallest numbers are used.

    Returns:
        The secrets, 32 bytes each.

    Raises:
        ValueError: fewer holders than the threshold, or shares that belong to no secret.
    """
    if len(shares) < threshold:
        raise ValueError(
            f"{len(shares)} clients gave shares and a secret needs {threshold}; no secret can be "
            "computed"
        )
    points = sorted(shares)[:threshold]
    weights = _weights(points)
    rows = [shares[x] for x in points]
    values = []
    for row in zip(*rows, strict=True):
        value = 0
        for weight, share in zip(weights, row, strict=True):
            value += weight * int.from_bytes(share, "big")
        value %= PRIME
        if value >= 2 ** (8 * SECRET_BYTES):
            raise ValueError("the shares belong to no secret: a client gave a wrong one")
        values.append(value.to_bytes(SECRET_BYTES, "big"))
    return values


def _value(coefficients: Sequence[int], x: int) -> int:
    """Evaluate a polynomial, its highest coefficient first, by Horner's rule."""
    value = 0
    for coefficient in coefficients:
        value = (value * x + coefficient) % PRIME
    return value


def _weights(points: Sequence[int]) -> list[int]:
    """Return Lagrange's weights for the value at 0."""
    weights = []
    for x in points:
        others = [other for other in points if other != x]
        numerator = math.prod(others)
        denominator = math.prod(other - x for other in others)
        inverse = pow(denominator, -1, PRIME)
        weights.append(numerator * inverse % PRIME)
    return weights


# --------------------------------------------------------------------------------------------------
# Keys of pairs of clients, agreed on through the server: X25519, HKDF-SHA256, AES-256.
#
# A private key, a public key and a derived key have 32 bytes each. Every derived key is bound to a
# purpose, so that two purposes never share a key. Sources: RFC 7748 (X25519), RFC 5869 (HKDF), NIST
# SP 800-38A and 38D (AES-CTR, AES-GCM).

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


# --------------------------------------------------------------------------------------------------

# Fewest steps of the grid in one standard deviation of a client's noise.
FEWEST_STEPS = 512.0
# Bytes of the two shares that one client seals for another.
SEALED_BYTES = 2 * SHARE_BYTES + SEAL_BYTES
Integers = dict[str, Tensor]
NamedTensors = Mapping[str, Tensor]
Sizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class RoundKeys:
    """PRIVATE: a client's secrets of one round. It forgets them once its message is masked.

    Attributes:
        contract: hash of plan and model.
        round: its number.
        mask_key: private X25519 key, 64 hexadecimal digits.
        self_seed: of the self mask, 64 hexadecimal digits.
    """

    contract: str
    round: int
    mask_key: str = field(default_factory=lambda: new_key().hex())
    self_seed: str = field(default_factory=lambda: new_key().hex())

    @property
    def scope(self) -> str:
        """Return the name of the round that keys are derived for."""
        return round_scope(self.contract, self.round)

    @property
    def public(self) -> bytes:
        """Return the public mask key, 32 bytes."""
        return PrivateKey(bytes.fromhex(self.mask_key)).public


@dataclass(frozen=True, kw_only=True)
class ReceivedShares:
    """PRIVATE: the shares that the cohort sealed for a client in the round of its last sum.

    Attributes:
        round: its number.
        cohort: the clients that this client's message is masked with, and itself; sorted.
        key_shares: of each client of the cohort, a share of its mask key, 66 hexadecimal digits.
        seed_shares: of each client of the cohort, a share of its self seed, likewise.
        survivors: the set that this client has answered for; empty before its answer.
    """

    round: int
    cohort: tuple[int, ...]
    key_shares: tuple[str, ...]
    seed_shares: tuple[str, ...]
    survivors: tuple[int, ...] = ()


def round_scope(contract: str, number: int) -> str:
    """Name a round of a plan: keys of two rounds, or of two plans, are independent."""
    return f"round {number} of {contract}"


# -- a client's steps ------------------------------------------------------------------------------


def seal_shares(
    keys: RoundKeys, client: int, channel: PrivateKey, channels: ByClient, threshold: int
) -> dict[int, bytes]:
    """Split a client's round secrets and seal the shares of each client of the cohort.

    Args:
        keys: of the client.
        client: its number.
        channel: its private channel key.
        channels: client of the cohort to its public channel key.
        threshold: shares that give a secret.

    Returns:
        Client to `SEALED_BYTES` bytes.

    Raises:
        ValueError: an invalid public key, or fewer clients than the threshold.
    """
    holders = [other + 1 for other in channels]
    key_shares = split(bytes.fromhex(keys.mask_key), holders, threshold)
    seed_shares = split(bytes.fromhex(keys.self_seed), holders, threshold)
    sealed = {}
    mask_key = keys.public
    for other, public in channels.items():
        context = _context(keys.scope, client, other, mask_key)
        shares = key_shares[other + 1] + seed_shares[other + 1]
        key = channel.agree(public, context)
        sealed[other] = seal(key, shares, context)
    return sealed


def open_shares(
    keys: RoundKeys,
    client: int,
    channel: PrivateKey,
    channels: ByClient,
    *,
    public: ByClient,
    sealed: ByClient,
) -> ReceivedShares:
    """Open the shares that the clients of the cohort sealed for this one.

    Args:
        keys: of this client's round.
        client: its number.
        channel: its private channel key.
        channels: client to its public channel key, for the cohort at least.
        public: client of the cohort to its public mask key.
        sealed: client of the cohort to what it sealed for this one.

    Raises:
        ValueError: sealed shares that were changed, or sealed for another client, round or mask
            key.
    """
    cohort = tuple(sorted(public))
    key_shares = []
    seed_shares = []
    for other in cohort:
        context = _context(keys.scope, other, client, public[other])
        key = channel.agree(channels[other], context)
        text = unseal(key, sealed[other], context)
        key_shares.append(text[:SHARE_BYTES].hex())
        seed_shares.append(text[SHARE_BYTES:].hex())
    return ReceivedShares(
        round=keys.round,
        cohort=cohort,
        key_shares=tuple(key_shares),
        seed_shares=tuple(seed_shares),
    )


def pair_keys(keys: RoundKeys, client: int, public: ByClient) -> dict[int, bytes]:
    """Agree with every other client of the cohort on the key of their pair mask.

    Args:
        keys: of the client.
        client: its number.
        public: client of the cohort to its public mask key.

    Raises:
        ValueError: an invalid public key.
    """
    private = PrivateKey(bytes.fromhex(keys.mask_key))
    return _pair_keys(keys.scope, client, private, public)


def channel_pair_keys(
    client: int, channel: PrivateKey, channels: ByClient, scope: str
) -> dict[int, bytes]:
    """Derive the keys of the pair masks of a round without recovery from channel keys.

    Args:
        client: its number.
        channel: its private channel key.
        channels: client of the cohort to its public channel key.
        scope: of the round, from `round_scope`. A client masks one message with these keys.

    Returns:
        Other client to a key of 32 bytes. Two rounds, plans or cohorts have independent keys.

    Raises:
        ValueError: an invalid public key.
    """
    cohort = ", ".join(str(member) for member in sorted(channels))
    scope = f"{scope}, without recovery, cohort {cohort}"
    return _pair_keys(scope, client, channel, channels)


def mask(
    integers: Integers, client: int, pairs: ByClient, keys: RoundKeys | None = None
) -> Integers:
    """Add a client's pair masks with the other clients of the cohort, and its self mask.

    Pair masks cancel in the sum over the whole cohort.

    Args:
        integers: of the client, int64.
        client: its number.
        pairs: other client to the key of the pair mask.
        keys: of the client; None adds no self mask, in a round without recovery.
    """
    sizes = _sizes(integers)
    masked = {name: x.clone() for name, x in integers.items()}
    for other, key in pairs.items():
        pair_mask = _pair_mask(key, client, other, sizes)
        _add(masked, pair_mask)
    if keys is not None:
        seed = bytes.fromhex(keys.self_seed)
        self_mask = _self_mask(keys.scope, seed, sizes)
        _add(masked, self_mask)
    return masked


def reveal(received: ReceivedShares, survivors: Iterable[int]) -> dict[int, bytes]:
    """Return one share of each client: of a survivor's self seed, or of a mask key.

    Args:
        received: the shares of this client's round.
        survivors: the set that the server fixed.

    Returns:
        Client to a share of 33 bytes. The two shares of one client are never revealed together.
    """
    survivors = set(survivors)
    revealed = {}
    for other, key_share, seed_share in zip(
        received.cohort, received.key_shares, received.seed_shares, strict=True
    ):
        share = seed_share if other in survivors else key_share
        revealed[other] = bytes.fromhex(share)
    return revealed


# -- the server's step -----------------------------------------------------------------------------


def unmask(
    sums: Mapping[int, Integers],
    public: ByClient,
    shares: Mapping[int, ByClient],
    threshold: int,
    scope: str,
) -> Integers:
    """Sum the survivors' messages and subtract their masks.

    Args:
        sums: survivor to its masked integers.
        public: client of the cohort to its public mask key.
        shares: survivor that answered to the share that it reveals of each client of the cohort.
        threshold: shares that give a secret.
        scope: of the round, from `round_scope`.

    Returns:
        The sum of the survivors' integers modulo 2⁶⁴, exactly.

    Raises:
        ValueError: fewer answers than the threshold, or shares that give no secret or another mask
            key.
    """
    cohort = sorted(public)
    rows = {}
    for client, revealed in shares.items():
        rows[client + 1] = [revealed[other] for other in cohort]
    opened = dict(zip(cohort, join(rows, threshold), strict=True))
    summed = total(sums.values())
    sizes = _sizes(summed)
    for client in cohort:
        if client in sums:
            self_mask = _self_mask(scope, opened[client], sizes)
            _add(summed, self_mask, sign=-1)
            continue
        private = PrivateKey(opened[client])
        if private.public != public[client]:
            raise ValueError(
                f"the shares give a different mask key than client {client} sent: a client gave a "
                "wrong share"
            )
        for survivor in sums:
            # The missing client's mask is the negative of the survivor's: adding it removes the
            # survivor's.
            key = _pair_key(scope, client, private, survivor, public[survivor])
            pair_mask = _pair_mask(key, client, survivor, sizes)
            _add(summed, pair_mask)
    return summed


# -- integers --------------------------------------------------------------------------------------


def encode(tensors: NamedTensors, grid: float) -> Integers:
    """Return multiples of a grid as integers.

    Raises:
        ValueError: a number that is not a multiple.
    """
    integers = {}
    for name, x in tensors.items():
        steps = x.double() / grid
        if not torch.equal(steps, steps.round()):
            raise ValueError(f"'{name}' is not on the grid; use noise='rounded'")
        integers[name] = steps.to(torch.int64)
    return integers


def decode(integers: NamedTensors, grid: float, like: NamedTensors) -> dict[str, Tensor]:
    """Return the numbers of integers, in float64 on the devices of the tensors in `like`."""
    numbers = {}
    for name, x in integers.items():
        multiples = x.double() * grid
        numbers[name] = multiples.to(like[name].device)
    return numbers


def total(messages: Iterable[NamedTensors]) -> Integers:
    """Sum messages modulo 2⁶⁴, name by name."""
    first, *others = messages
    summed = {name: x.clone() for name, x in first.items()}
    for tensors in others:
        _add(summed, tensors)
    return summed


def _sizes(integers: Integers) -> Sizes:
    return {name: tuple(x.shape) for name, x in integers.items()}


def _add(integers: Integers, masks: NamedTensors, sign: int = 1) -> None:
    for name, x in integers.items():
        x.add_(masks[name], alpha=sign)


# -- masks -----------------------------------------------------------------------------------------


def _context(scope: str, sender: int, receiver: int, public: bytes) -> str:
    return f"shares of client {sender}: for client {receiver} in {scope}, mask key {public.hex()}"


def _self_mask(scope: str, seed: bytes, sizes: Sizes) -> Integers:
    key = derive(seed, f"self mask: {scope}")
    return _expand(key, sizes)


def _pair_key(scope: str, client: int, private: PrivateKey, other: int, public: bytes) -> bytes:
    low, high = sorted((client, other))
    purpose = f"pair mask: clients {low} and {high} in {scope}"
    return private.agree(public, purpose)


def _pair_keys(scope: str, client: int, private: PrivateKey, public: ByClient) -> dict[int, bytes]:
    """Return the key of the pair mask with every other client."""
    keys = {}
    for other, public_key in public.items():
        if other != client:
            keys[other] = _pair_key(scope, client, private, other, public_key)
    return keys


def _pair_mask(key: bytes, client: int, other: int, sizes: Sizes) -> Integers:
    """Return the integers that a client adds for another one.

    The other client adds their negatives.
    """
    masks = _expand(key, sizes)
    if client > other:
        return {name: -x for name, x in masks.items()}
    return masks


def _expand(key: bytes, sizes: Sizes) -> Integers:
    """Cut one stream of uniform integers to tensors, by their names."""
    names = sorted(sizes)
    lengths = [math.prod(sizes[name]) for name in names]
    integers = uniform_integers(key, sum(lengths))
    pieces = torch.from_numpy(integers).split(lengths)
    masks = {}
    for name, piece in zip(names, pieces, strict=True):
        masks[name] = piece.view(sizes[name])
    return masks
