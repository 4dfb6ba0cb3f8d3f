"""Secure aggregation inside one process, for tests and studies: exact sums of integers under masks modulo 2⁶⁴.

A message is under masks of two kinds. Every pair of clients shares a seed for a round; the one with the smaller number adds the
mask it gives, the other takes it off, so that these cancel in the sum over all. And every client adds a mask of its own, from a
secret that is new in every round. Once the survivors are fixed, each of them, and nobody else, hands over ONE sum: its own mask
and its masks with the missing clients. A message that comes late stays under the mask of its sender, who is no survivor.
(Bonawitz et al. 2017 without secret sharing: a client lost between its message and its answer ends the round.)

A client answers for the cohort that its message was masked with and for ONE survivor set a round, of t clients at least, itself
among them. Its own mask is in its message and in that one answer, so that of both nothing shows but their difference, the message
under its masks with its set. Masks of pairs cancel over whole sets alone: whatever sets a server names to whom, it comes to sums
of t messages and more.

Sum and noise are multiples of one grid before they are masked (`privacy.grid`), hence the sum of masked integers is the sum of
the noisy numbers to the last bit. Every client rounds its own noise. For shares of 2⁹ grid steps and more the sum of t rounded
shares has, up to a total variation of e^(−10⁶) (Poisson summation), the probabilities that a Gaussian plus t uniform
numbers of one grid step has as a density at the points of the grid. Without the grid that is a post-processing of the
Gaussian mechanism; that ε is taken from it, and not from its values at the points, is the one step that is argued (a
Riemann sum) and not proved here.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

__all__ = ["OwnMask", "Pairs", "decoded", "encoded", "masked", "owed", "total"]

FEWEST_STEPS = 512.0  # of the grid, in one standard deviation of a share
Integers = dict[str, Tensor]


@dataclass(frozen=True)
class Pairs:
    """Seeds that pairs of clients share; stands for a key agreement that the server takes no part in.

    Attributes:
        secret: of the run, known to clients only.
    """

    secret: bytes

    def seed(self, one: int, other: int, release: int) -> int:
        """128 bits for an unordered pair in a round."""
        low, high = sorted((one, other))
        return int.from_bytes(hashlib.sha256(self.secret + f"{low} {high} {release}".encode()).digest()[:16], "big")

    def mask(self, one: int, other: int, release: int, sizes: Mapping[str, tuple[int, ...]]) -> Integers:
        """What `one` adds for `other`: uniform integers of 64 bits, or their negatives."""
        sign = 1 if one < other else -1
        return {name: sign * x for name, x in _uniform(self.seed(one, other, release), sizes).items()}


def _uniform(seed: int, sizes: Mapping[str, tuple[int, ...]]) -> Integers:
    """Integers of 64 bits from a seed of 128."""
    stream = np.random.Philox(key=seed)
    words = {name: stream.random_raw(math.prod(shape)) for name, shape in sizes.items()}
    return {name: torch.from_numpy(x.view(np.int64).reshape(sizes[name])) for name, x in words.items()}


@dataclass(frozen=True, kw_only=True)
class OwnMask:
    """PRIVATE: what a client keeps of the round that it answered last, to take its masks off the sum once and for one set.

    Attributes:
        round: its number.
        secret: of the client's own mask, 32 hexadecimal digits.
        cohort: whom the message was masked with.
        survivors: the set that it was asked for; empty before.
    """

    round: int
    secret: str
    cohort: tuple[int, ...]
    survivors: tuple[int, ...] = ()

    @classmethod
    def fresh(cls, number: int, cohort: Iterable[int]) -> OwnMask:
        """With a new secret of the operating system, in test mode too: nothing of it is left in a sum."""
        return cls(round=number, secret=secrets.token_hex(16), cohort=tuple(sorted(cohort)))

    def mask(self, sizes: Mapping[str, tuple[int, ...]]) -> Integers:
        """Uniform integers of 64 bits."""
        return _uniform(int(self.secret, 16), sizes)


def encoded(tensors: Mapping[str, Tensor], grid: float) -> Integers:
    """Multiples of a grid as integers.

    Raises:
        ValueError: a number that is none.
    """
    found = {}
    for name, x in tensors.items():
        steps = x.double() / grid
        if not bool((steps == steps.round()).all()):
            raise ValueError(f"'{name}' is not on the grid; use noise='rounded'")
        found[name] = steps.to(torch.int64)
    return found


def decoded(integers: Mapping[str, Tensor], grid: float, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The numbers that integers stand for, in float64 on the devices of other tensors."""
    return {name: (x.double() * grid).to(like[name].device) for name, x in integers.items()}


def masked(integers: Mapping[str, Tensor], client: int, own: OwnMask, pairs: Pairs) -> Integers:
    """A client's integers under its own mask and its masks with everyone else in the cohort."""
    shapes = {name: tuple(x.shape) for name, x in integers.items()}
    others = (pairs.mask(client, other, own.round, shapes) for other in own.cohort if other != client)
    return total(chain([integers, own.mask(shapes)], others))


def owed(shapes: Mapping[str, tuple[int, ...]], client: int, own: OwnMask, pairs: Pairs) -> Integers:
    """What a survivor hands over: the sum of its own mask and its masks with the missing clients."""
    missing = (pairs.mask(client, other, own.round, shapes) for other in own.cohort if other not in own.survivors)
    return total(chain([own.mask(shapes)], missing))


def total(messages: Iterable[Mapping[str, Tensor]]) -> Integers:
    """The sum modulo 2⁶⁴, name by name; in the order given, which changes nothing."""
    found: Integers = {}
    for tensors in messages:
        for name, x in tensors.items():
            found[name] = found[name].add_(x) if name in found else x.clone()
    return found
