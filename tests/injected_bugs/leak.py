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


@dataclass(frozen=True)
class Leak:
    """A small patch of the real step that leaks, and who must notice.

    Attributes:
        name: of the bug, in words.
        patch: of the real code.
        subject: name of the step it is planted in.
        by: detectors that must catch it, from cheap to dear.
        canaries: what names of canaries contain that are enough to show it; all of them in the long
            run.
        controlled: the subject passes every check without the patch. Not so where the real session
            refuses the model.
    """

    name: str
    patch: Patch
    subject: str = "DP-SGD"
    by: tuple[str, ...] = ("replay",)
    canaries: tuple[str, ...] = COMMON
    controlled: bool = True


def swap_function(m, owner, name, function):
    """Put `function(real, ...)` in the place of a function of the real code."""
    real = getattr(owner, name)
    m.setattr(owner, name, lambda *args, **options: function(real, *args, **options))


def note_batches(m):
    """A list whose one entry is (session, batch, loss_fn) of the step that runs."""
    seen = [None]

    def step(real, self, batch, loss_fn):
        seen[0] = (self, batch, loss_fn)
        return real(self, batch, loss_fn)

    swap_function(m, Session, "step", step)
    return seen


def note_sums(m):
    """A list whose one entry is the clipped sum and the norms of the step that runs, before the
    noise.
    """
    seen = [None]

    def clipped_sum(real, self, batch, loss_fn):
        seen[0] = real(self, batch, loss_fn)
        return seen[0]

    swap_function(m, Session, "_clipped_sum", clipped_sum)
    return seen
