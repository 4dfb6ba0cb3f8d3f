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
of clients, without self masks and shares. If one client of the cohort is lost, the masks of the
others stay and the round has no sum. Masks do not repeat, because a client answers each round
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkfc.federated.key_agreement import (
    SEAL_BYTES,
    ByClient,
    PrivateKey,
    derive,
    new_key,
    seal,
    uniform_integers,
    unseal,
)
from dpkfc.federated.shamir import SHARE_BYTES, join, split
from dpkfc.tensors import NamedTensors

# Fewest steps of the grid in one standard deviation of a client's noise.
FEWEST_STEPS = 512.0
# Bytes of the two shares that one client seals for another.
SEALED_BYTES = 2 * SHARE_BYTES + SEAL_BYTES
Integers = dict[str, Tensor]
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
