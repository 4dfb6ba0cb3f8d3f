"""Modes of torch that are on from one line of a script to another, outside of any `with`.

A mode can leave its stack only while it is on top. A mode that has ended stays there, switched off, until nothing lies on it.
So do the modes of a batch whose loop a script has left.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = ["ScriptModes"]

_OVER: weakref.WeakSet[Any] = weakref.WeakSet()  # modes that are switched off for good


class ScriptModes:
    """Modes with an attribute `is_on`, entered when this is made.

    Args:
        owner: the object they serve. They end when it is freed, so they must not refer to it.
        modes: in the order in which they are entered.
    """

    def __init__(self, owner: object, modes: Sequence[Any]) -> None:
        _take_off()
        self._modes = list(modes)
        for mode in self._modes:
            mode.__enter__()
        weakref.finalize(owner, _finish, self._modes)

    def switch_off(self, all_but: type | tuple[type, ...] = ()) -> None:
        """Switch off the modes, but for those of some types."""
        for mode in self._modes:
            mode.is_on = mode.is_on and isinstance(mode, all_but)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Switch all of them off inside the body."""
        before = [mode.is_on for mode in self._modes]
        self.switch_off()
        try:
            yield
        finally:
            for mode, was_on in zip(self._modes, before, strict=True):
                mode.is_on = was_on

    def end(self) -> None:
        """Switch all of them off for good, and take off those that can be."""
        _finish(self._modes)
        _take_off()


def _finish(modes: Sequence[Any]) -> None:
    for mode in modes:
        mode.is_on = False
        _OVER.add(mode)


def _take_off() -> None:
    """Take the modes that are over from the top of both stacks."""
    for top in (_get_current_function_mode, _get_current_dispatch_mode):
        while (mode := top()) is not None and mode in _OVER:
            mode.__exit__(None, None, None)
