"""The random state of the CPU and of a model's device: noted, compared, put back, and replaced by one that nobody knows.

Dropout masks and augmented views belong to places in a batch. One example more moves those of all that come after it, and then
the sum differs by more than that example's gradient. It is as if every example had numbers of its own as long as nobody can tell
one mask from another: the numbers must be as unknown as the noise. A seed (`set_seed(42)`) makes them known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpkfc.entropy import draw_key

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer


def device_of(layers: Sequence[Layer]) -> torch.device:
    """Where the parameters of a model lie."""
    return layers[0].tensor(next(iter(layers[0].parameters))).device


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators now."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def put_back_on(device: torch.device, states: Sequence[Tensor]) -> None:
    """The generators of torch as `random_states` has found them."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def same_states(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether nothing was drawn in between."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def restarter(device: torch.device) -> Callable[[], None]:
    """A function that puts the generators of torch, numpy and Python back to where they are now."""
    states = _everything(device)

    def restart() -> None:
        put_back_on(device, states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])

    return restart


def drawn_since_now(device: torch.device) -> Callable[[], bool]:
    """A function that says whether torch, numpy or Python have drawn global random numbers since now."""
    before = _everything(device)

    def drawn() -> bool:
        now = _everything(device)
        alike = same_states(before[0], now[0]) and before[2] == now[2]
        return not (alike and all(np.array_equal(a, b) for a, b in zip(before[1], now[1], strict=True)))

    return drawn


@contextmanager
def kept_numbers() -> Iterator[None]:
    """Whatever is drawn inside, the global generators, those of all devices too, go on where they were."""
    states = all_states()
    try:
        yield
    finally:
        put_back(states)


def _everything(device: torch.device) -> tuple[list[Tensor], Any, Any]:
    return random_states(device), np.random.get_state(), random.getstate()


def all_states() -> tuple[Any, ...]:
    """The states of the global generators of torch, its devices, numpy and Python."""
    own = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), own, np.random.get_state(), random.getstate()


def put_back(states: tuple[Any, ...]) -> None:
    """The global generators as they were."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
    np.random.set_state(states[2])
    random.setstate(states[3])


def renew() -> None:
    """Let the global generators go on from numbers of the operating system."""
    _seed(fresh_seed())
    np.random.seed(np.frombuffer(draw_key(), dtype=np.uint32))
    random.seed(int.from_bytes(draw_key(), "big"))


def _seed(seed: int) -> None:
    """Of torch, and of its devices where there are any: seeding those that do not exist takes longer than a small step."""
    if _devices():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _devices() -> bool:
    """Whether torch has another device than the CPU; none appears while a process runs. A torch that cannot tell may have one."""
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is None or bool(accelerator.is_available())


def fresh_seed() -> int:
    """Return a seed of 63 bits from the operating system."""
    return int.from_bytes(draw_key()[:8], "big") >> 1


def begin_at(seed: int) -> None:
    """Let the global generators go on from a seed below 2⁶⁴, the same on every process that has it."""
    torch.manual_seed(seed)
    np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
    random.seed(seed)


@contextmanager
def unknown_numbers(repeatable: bool = False) -> Iterator[None]:
    """Inside, the global generators begin at numbers of the operating system; afterwards each goes on where it was.

    Args:
        repeatable: leave them as they are. TEST MODE, NOT PRIVATE.
    """
    if repeatable:
        yield
        return
    with kept_numbers():
        renew()
        yield
