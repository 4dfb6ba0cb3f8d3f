"""What a planted leak is, and what the patches of the real step share."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dpkfc.session import Session

Patch = Callable[[pytest.MonkeyPatch], None]
COMMON = (
    "as it is",
    "loss × 1e4",
    "loss × -1e4",
    "loss × 1e-4",
    "loss NaN",
    "input × 1e3",
    "another example",
)


@dataclass(frozen=True, kw_only=True)
class Leak:
    """A small patch of the real step that leaks, and who must notice.

    Attributes:
        name: of the bug, in words.
        subject: name of the step it is planted in.
        patch: of the real code.
        by: detectors that must catch it, from cheap to dear.
        canaries: what names of canaries contain that are enough to show it; all of them in the long
            run.
        controlled: the subject passes every check without the patch. Not so where the real session
            refuses the model.
    """

    name: str
    subject: str
    patch: Patch
    by: tuple[str, ...]
    canaries: tuple[str, ...] = COMMON
    controlled: bool = True


def swapped(m, owner, name, make):
    """Put `make(real)` in the place of a function of the real code."""
    m.setattr(owner, name, make(getattr(owner, name)))


def noting_batches(m):
    """A list whose one entry is (session, batch, loss_fn) of the step that runs."""
    seen = [None]

    def make(real):
        def step(self, batch, loss_fn):
            seen[0] = (self, batch, loss_fn)
            return real(self, batch, loss_fn)

        return step

    swapped(m, Session, "step", make)
    return seen


def noting_sums(m):
    """A list whose one entry is the clipped sum and the norms of the step that runs, before the
    noise.
    """
    seen = [None]

    def make(real):
        def clipped_sum(self, batch, loss_fn):
            seen[0] = real(self, batch, loss_fn)
            return seen[0]

        return clipped_sum

    swapped(m, Session, "_clipped_sum", make)
    return seen
