"""The model of scale.py: a stack of maps over positions, nothing but what the mechanism pays
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size: width d, depth L, batch B, positions T, rank k of the low-rank sides."""

    width: int = 512
    depth: int = 4
    batch: int = 16
    positions: int = 64
    rank: int = 64


def case_of(point: Point) -> Any:
    """The stack as a case of the speed benchmark."""
    import torch
    from torch import nn

    from models import Case

    def build() -> nn.Module:
        torch.manual_seed(0)
        maps: list[nn.Module] = []
        for _ in range(point.depth):
            maps += [nn.Linear(point.width, point.width), nn.GELU()]
        return nn.Sequential(*maps, nn.Linear(point.width, 10))

    return Case(
        name="stack",
        title="a stack of maps",
        batch_size=point.batch,
        shape=(point.positions, point.width),
        build=build,
        probe_size=64,
        logits=lambda model, x: model(x).mean(1),
    )


def kfac_of(point: Point, case: Any) -> Any:
    """Both sides, low-rank where they are wide enough."""
    from contenders import EVERY
    from dpkfc.curvature import KFAC

    return KFAC(
        probe=case.probe(),
        probe_size=case.probe_size,
        every=EVERY,
        max_rank=point.rank,
        sides="both",
    )


def contender_of(name: str, point: Point, setting: Any) -> Any:
    """`plain`, `dp_sgd` or `dp_kfc` of one size."""
    import contenders

    if name == "dp_kfc":
        return contenders.session_with(setting, name, kfac_of(point, setting.case))
    return {"plain": contenders.plain, "dp_sgd": contenders.dp_sgd}[name](setting)
