"""How the records of a logical batch are laid out in micro-batches: which rows are loaded and how much each counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpkfc.data.loader import split

__all__ = ["Part", "layout"]


@dataclass(frozen=True)
class Part:
    """One micro-batch. The first `units · group` rows are units, `group` rows each; what follows is padding.

    Attributes:
        records: rows to load `[n]`.
        weights: factor of each row's loss `[n]`, zero where a row fills a short unit or pads the micro-batch; None where
            all are 1.
        units: privacy units.
        group: rows a unit.
    """

    records: NDArray[np.int64]
    weights: NDArray[np.float64] | None
    units: int
    group: int = 1


def layout(
    drawn: ArrayLike,
    bound: int | None = None,
    multiple: int | None = None,
    reduction: str = "mean",
    views: int = 1,
) -> list[Part]:
    """Cut what was drawn into micro-batches of bounded size; a unit is never split.

    Args:
        drawn: record numbers, `[n]` where a unit is a record, or `[n, k]` with -1 where a unit has fewer than k.
        bound: most rows of a micro-batch, None for one micro-batch; a single unit with more rows exceeds it.
        multiple: rows are padded to a multiple of it, so that few shapes occur.
        reduction: a unit's loss is the "mean" or the "sum" over its records.
        views: how often every record is loaded; its loss is the mean over them.

    Returns:
        Parts that hold every unit once; none for an empty batch.
    """
    table = np.asarray(drawn, dtype=np.int64)
    if views > 1:
        table = np.repeat(table[:, None] if table.ndim == 1 else table, views, axis=1)
    if table.ndim == 1:
        cuts = split(table, bound) if multiple is None else _runs(table, bound)
        return [_part(cut[:, None], multiple, reduction, 1) for cut in cuts]
    counts = (table >= 0).sum(1)
    order = np.argsort(-counts, kind="stable")  # units of like size together: less filling
    parts, start = [], 0
    while start < len(order):
        width = int(counts[order[start]])
        rows = order[start:] if bound is None else order[start : start + max(1, bound // width)]
        parts.append(_part(table[rows, :width], multiple, reduction, views))
        start += len(rows)
    return parts


def _runs(records: NDArray[np.int64], bound: int | None) -> list[NDArray[np.int64]]:
    """Full micro-batches and a rest."""
    step = bound or max(1, records.size)
    return [records[i : i + step] for i in range(0, records.size, step)]


def _part(table: NDArray[np.int64], multiple: int | None, reduction: str, views: int) -> Part:
    """The part of units `[u, k]`; short units repeat a record of their own, padding repeats the first record."""
    real = table >= 0
    counts = real.sum(1, keepdims=True) if reduction == "mean" else views
    records, weights = np.where(real, table, table[:, :1]).ravel(), (real / counts).ravel()
    padding = -records.size % multiple if multiple else 0
    records = np.concatenate([records, np.repeat(records[:1], padding)])
    weights = np.concatenate([weights, np.zeros(padding)])
    return Part(records, None if bool((weights == 1).all()) else weights, *table.shape)
