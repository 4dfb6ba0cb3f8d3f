"""Which sides of a metric keep few eigenpairs, by what that saves on this machine: `structure = "auto"`.

A full matrix is the rule here, and a side keeps its first eigenpairs alone where the norms of its layer are clearly faster
with them. All is measured on the probe, so what is chosen may decide what a private run computes. It is part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dpkfc.blocks import Outer
from dpkfc.curvature.inputs import placed
from dpkfc.curvature.preconditioner import KFAC
from dpkfc.curvature.probing import public_generator, undisturbed
from dpkfc.curvature.ranks import side_name
from dpkfc.gradients.contributions import capture
from dpkfc.gradients.conv import ConvBlock
from dpkfc.gradients.discovery import find_layers
from dpkfc.metric import Dense, Kronecker, LowRank, Side
from dpkfc.report.costs import WORTH, Timings, blocks_of_batch, costs_of, norm_seconds

__all__ = ["MeasuredStructure", "SideChoice", "measured_structure", "side_choices"]

_PROBE = 16  # examples that show which sides there are


@dataclass(frozen=True, kw_only=True)
class SideChoice:
    """One side that could keep few eigenpairs.

    Attributes:
        name: such as `conv1.A`.
        width: d.
        rank: eigenpairs it keeps, 0 for all.
        dense_seconds, low_rank_seconds: of the norms of its layer, a batch, by the fastest method for each.
    """

    name: str
    width: int
    rank: int
    dense_seconds: float
    low_rank_seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStructure:
    """What this machine would take, as values of `KFAC` and `PrivacyConfig`.

    Attributes:
        sides: that had a choice.
        norm_methods: layers whose norms are clearly faster by another method than the rule's, for `PrivacyConfig`.
        every: the interval of `kfac` or, where refreshes would take more than a twentieth of the time with it, a longer one.
    """

    sides: tuple[SideChoice, ...]
    norm_methods: Mapping[str, str]
    every: int

    @property
    def ranks(self) -> dict[str, int]:
        """For `KFAC(ranks=...)`."""
        return {side.name: side.rank for side in self.sides}


def measured_structure(
    model: nn.Module, kfac: KFAC, *, expected_batch_size: int, rows: int = 64, cache: Path | None = None
) -> MeasuredStructure:
    """Measure, on the probe, what each side and a step cost, and choose.

    Args:
        model: any module that can be trained privately; left as it is.
        kfac: whose sides may keep `max_rank` eigenpairs; None there leaves nothing to choose.
        expected_batch_size: of the run; its steps are taken to last as long as their share of the measured one.
        rows: most examples of the batch that is timed.
        cache: file of the times of layers, None to measure all anew.

    Raises:
        ValueError: a layer that cannot be trained privately, or inputs that the model cannot read.
    """
    rows = min(rows, expected_batch_size)
    sides = side_choices(model, kfac, rows=rows, cache=cache)
    used = replace(kfac, ranks={side.name: side.rank for side in sides})
    costs = costs_of(model, used, rows=rows, cache=cache)
    step = costs.chosen * expected_batch_size / rows
    return MeasuredStructure(
        sides=sides,
        norm_methods=costs.norm_methods,
        every=max(kfac.every, replace(costs, chosen=step).every),
    )


def side_choices(
    model: nn.Module, kfac: KFAC, *, rows: int, cache: Path | Timings | None = None
) -> tuple[SideChoice, ...]:
    """The sides at least twice as wide as `max_rank`, each with what its layer costs either way; arguments as above."""
    rank = kfac.max_rank
    if rank is None:
        return ()
    layers, timings = find_layers(model), Timings.load(cache)
    rules = {layer.name: layer.rule for layer in layers}
    few = replace(kfac, probe_size=min(kfac.probe_size, _PROBE), later_probe_size=None, ranks={})
    inputs = placed(kfac.probe.sample(rows, public_generator(kfac.seed, 0))[0], model)
    found: list[SideChoice] = []
    with undisturbed(model):
        built = few.build(model, lambda m, loss: capture(m, layers, loss), 0, rules=rules)
        widths = {
            (row["layer"], row["side"]): row["dim"] for row in built.report
            if row["kind"] in ("dense", "lowrank") and 2 * rank <= row["dim"] <= kfac.max_factor_size
        }  # fmt: skip
        for name, block in blocks_of_batch(model, layers, inputs, rows).items():
            own = [(side, widths[name, side]) for side in ("input", "output") if (name, side) in widths]
            if isinstance(block, Outer | ConvBlock):
                found += _chosen(name, block, own, rank, timings)
    timings.save()
    return tuple(found)


def _chosen(
    name: str, block: Outer | ConvBlock, sides: Sequence[tuple[str, int]], rank: int, timings: Timings
) -> list[SideChoice]:
    """One side after the other, those before as they were chosen and those after it full matrices."""
    metric = Kronecker(**{side: _dense(width, block.b) for side, width in sides})
    found = []
    for side, width in sides:
        low = replace(metric, **{side: _low_rank(width, rank, block.b)})
        dense_seconds, low_seconds = (min(norm_seconds(block, of, timings).values()) for of in (metric, low))
        worth = low_seconds < WORTH * dense_seconds
        metric = low if worth else metric
        found.append(
            SideChoice(
                name=side_name(name, side), width=width, rank=rank if worth else 0,
                dense_seconds=dense_seconds, low_rank_seconds=low_seconds,
            )
        )  # fmt: skip
    return found


def _dense(width: int, like: Tensor) -> Side:
    return Dense(torch.eye(width, dtype=like.dtype, device=like.device), 1.0)


def _low_rank(width: int, rank: int, like: Tensor) -> Side:
    return LowRank(torch.eye(width, rank, dtype=like.dtype, device=like.device), like.new_full((rank,), 0.5), 1.0)
