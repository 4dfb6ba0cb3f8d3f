"""The random state of the CPU and of a model's device: read, compared, restored, or made unknown.

Dropout masks and augmented views belong to places in a batch. One more example moves the masks and
views of all later examples, and the sum then differs by more than the gradient of this example. The
guarantee still holds while nobody can tell one mask from another: these random numbers must be as
unknown as the noise. A seed (`set_seed(42)`) makes them known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from dpkfc.privacy.rng import draw_key


def all_states() -> tuple[Any, ...]:
    """Return the states of the global generators of torch, its devices, numpy and Python."""
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), device_states, np.random.get_state(), random.getstate()


def restore_all_states(states: tuple[Any, ...]) -> None:
    """Restore the global generators from `all_states`."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
    np.random.set_state(states[2])
    random.setstate(states[3])


def has_drawn(states: tuple[Any, ...], *, of_torch: bool = True) -> bool:
    """Return whether numbers were drawn since `all_states` was called.

    Args:
        states: at that time.
        of_torch: count draws of torch too, not of numpy and Python alone.
    """
    begin = 0 if of_torch else 1
    return _comparable(states)[begin:] != _comparable(all_states())[begin:]


def _comparable(states: tuple[Any, ...]) -> tuple[Any, ...]:
    of_cpu, of_devices, (kind, keys, *rest), of_python = states
    of_torch = [x.numpy().tobytes() for x in (of_cpu, *of_devices)]
    return of_torch, kind, np.asarray(keys).tobytes(), rest, of_python


def restarter() -> Callable[[], None]:
    """Return a function that restores the present state of the global generators."""
    return partial(restore_all_states, all_states())


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global generators, on all devices too, after the body."""
    states = all_states()
    try:
        yield
    finally:
        restore_all_states(states)


def renew() -> None:
    """Seed the global generators from the operating system."""
    _seed_torch(fresh_seed())
    np.random.seed(np.frombuffer(draw_key(), dtype=np.uint32))
    random.seed(int.from_bytes(draw_key(), "big"))


def _seed_torch(seed: int) -> None:
    """Seed torch, and its devices where there are any.

    Seeding devices that do not exist takes longer than a small step.
    """
    if _devices():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _devices() -> bool:
    """Return whether torch has another device than the CPU, or is too old to tell.

    No device appears while a process runs.
    """
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is None or bool(accelerator.is_available())


def fresh_seed() -> int:
    """Return a seed of 63 bits from the operating system."""
    return int.from_bytes(draw_key()[:8], "big") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators with a number below 2⁶⁴, equally on every process."""
    _seed_torch(seed)
    np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
    random.seed(seed)


@contextmanager
def randomize_generators(repeatable: bool = False) -> Iterator[None]:
    """Seed the global generators from the operating system, and restore them after the body.

    Args:
        repeatable: leave the generators as they are. TEST MODE, NOT PRIVATE.
    """
    if repeatable:
        yield
        return
    with preserve_generators():
        renew()
        yield
