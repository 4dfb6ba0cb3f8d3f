"""How many examples of a probe a refresh runs at once: no more than a step of the run holds.

Where that is fewer than the examples on which the scale of a metric is measured, it is half as many: a refresh holds the factors
of all layers beside what it runs, and no pass is saved by more, as those examples run through the model a second time either way
(or none do, where a method has no such scale). With all of them at once they run once, which halving would undo.

The number comes from public settings alone; where these are "auto", also from what passes over the PROBE take of the memory. What
steps have found for their own micro-batches is not asked: private batches have decided it, and the last bits of a metric, which
depend on how sums are cut, are not protected by any noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from dpkfc.blocks import formed
from dpkfc.curvature.probing import Capture, blocks_on_probe, undisturbed
from dpkfc.curvature.refresh import SCALE_SIZE
from dpkfc.curvature.settings import probe_examples
from dpkfc.gradients.distributed import Ranks
from dpkfc.gradients.memory import MicroBatchSize

__all__ = ["ProbeRows", "at_once"]

T = TypeVar("T")


def at_once(config: Any, most: int) -> int:
    """Examples at once of a preconditioner with a `chunk`, where a step holds `most`; at least 1."""
    rows: int = min(config.chunk, most)
    if not hasattr(config, "probe"):
        return rows
    smallest = getattr(config, "later_probe_size", None) or probe_examples(config.probe, getattr(config, "probe_size", None))
    return rows if rows >= min(config.chunk, SCALE_SIZE, smallest) else -(-rows // 2)


class ProbeRows:
    """The examples at once of all refreshes of one run.

    Args:
        most: what a step holds; None leaves preconditioners as they are.
        automatic: whether fewer are tried where memory runs out; otherwise that is an error.
    """

    def __init__(self, most: int | None = None, automatic: bool = False) -> None:
        self._most, self._size = most, MicroBatchSize(automatic=automatic, what="probe example")

    def measure(
        self, config: Any, model: nn.Module, capture: Capture, step: int, *, ranks: Ranks, device: torch.device
    ) -> None:
        """Before the first refresh of an automatic run on a CPU: bound the number by the bytes of a few probe examples.

        Args:
            config: the preconditioner.
            model: looked at on its probe, and left as it is.
            capture: as for `build`.
            step: names the probe's random stream.
            ranks: all of which take the least that any of them finds; one for a refresh that one process makes.
            device: of the model.
        """
        rows = self._rows(config)
        if rows is None or not self._size.automatic or self._size.bound is not None or not hasattr(config, "run_at"):
            return

        def look(n: int) -> None:
            run = replace(config.run_at(step), size=n, chunk=n)
            with undisturbed(model), torch.no_grad():
                for piece in blocks_on_probe(model, capture, run):
                    for name in piece.blocks:
                        formed(piece.blocks[name])

        self._size.measure(look, rows, device)
        self._size.bound = min(ranks.everyone(min(rows, self._size.bound or rows)))

    def fit(self, config: Any, build: Callable[[Any], T]) -> T:
        """The result of `build` for the preconditioner with as many examples at once as may be.

        Args:
            config: the preconditioner.
            build: builds with a preconditioner that differs from it in `chunk` alone, and keeps nothing when it fails. Where
                several processes build together, it raises on all or on none.

        Raises:
            RuntimeError: it is out of memory at a number that was given, or with one example.
        """
        rows = self._rows(config)
        if rows is None:
            return build(config)
        if not self._size.automatic:
            self._size.bound = rows
        return self._size.fit(partial(_with_rows, config, build, rows), rows)

    def _rows(self, config: Any) -> int | None:
        """Examples at once, None where that is not to be changed: of a loss that draws numbers of its own it is a setting."""
        chunk: int | None = getattr(config, "chunk", None) if is_dataclass(config) else None
        own = getattr(config, "loss", None) is not None
        return None if self._most is None or chunk is None or own else at_once(config, self._most)


def _with_rows(config: Any, build: Callable[[Any], T], rows: int, bound: int | None) -> T:
    return build(replace(config, chunk=min(rows, bound or rows)))
