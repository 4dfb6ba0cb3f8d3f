"""Secure aggregation inside one process, for tests and studies: exact sums of integers under masks modulo 2⁶⁴.

Every pair of clients shares a seed for a round; the one with the smaller number adds the mask it gives, the other takes it off,
so that masks cancel in the sum over all. Where clients are missing, the survivors hand over what their masks with the missing
ones add up to. The survivor set is fixed before that, and a client answers for ONE set a round: two answers would open a
message. (Bonawitz et al. 2017 without secret sharing: a client lost between its message and its answer ends the round.)

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Pairs", "decoded", "encoded", "masked", "missing_masks", "total"]

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
        stream = np.random.Philox(key=self.seed(one, other, release))
        sign = 1 if one < other else -1
        mask = {}
        for name, shape in sizes.items():
            words = stream.random_raw(math.prod(shape))
            mask[name] = sign * torch.from_numpy(words.view(np.int64).reshape(shape))
        return mask


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


def masked(integers: Mapping[str, Tensor], client: int, cohort: Iterable[int], release: int, pairs: Pairs) -> Integers:
    """A client's integers under its masks with everyone else in the cohort."""
    shapes = {name: tuple(x.shape) for name, x in integers.items()}
    found = {name: x.clone() for name, x in integers.items()}
    for other in cohort:
        if other != client:
            for name, mask in pairs.mask(client, other, release, shapes).items():
                found[name] += mask
    return found


def missing_masks(
    shapes: Mapping[str, tuple[int, ...]], client: int, missing: Iterable[int], release: int, pairs: Pairs
) -> Integers:
    """What a survivor's masks with the missing clients add up to."""
    found = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for other in missing:
        for name, mask in pairs.mask(client, other, release, shapes).items():
            found[name] += mask
    return found


def total(messages: Iterable[Mapping[str, Tensor]]) -> Integers:
    """The sum modulo 2⁶⁴, name by name; in the order given, which changes nothing."""
    found: Integers = {}
    for tensors in messages:
        for name, x in tensors.items():
            found[name] = found[name] + x if name in found else x.clone()
    return found
