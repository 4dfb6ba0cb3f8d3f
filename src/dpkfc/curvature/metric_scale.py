"""The one number that scales a metric, so that the median gradient norm on the probe stays."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dpkfc.curvature.probe_pass import Capture, ProbeMicrobatch, ProbeSpec, run_probe
from dpkfc.curvature.refresh_group import RefreshGroup, gather_from_all, rows_of_process
from dpkfc.linalg.blocks import Block, Blocks
from dpkfc.linalg.metric import Entry, Metric
from dpkfc.linalg.norm_methods import form_cheaply
from dpkfc.linalg.norms import per_example_norms

SCALE_SIZE = 64  # last probe examples, for the two medians


def probe_norms(blocks: Blocks, *metrics: Metric, last: int | None = None) -> list[Tensor]:
    """Return ‖P g_n‖ over all layers for each metric, `[N]` in float64 on the CPU.

    Layers without an entry in a metric count as they are. Every block is looked up once, so a
    mapping that forms blocks on demand holds one at a time.

    Args:
        blocks: of one micro-batch.
        metrics: one or more.
        last: only this many of the last examples; None for all.
    """
    totals = [torch.zeros(1, dtype=torch.float64)] * len(metrics)
    for name in blocks:
        block = blocks[name]
        # Other layers keep the identity in every metric, and their norms are unknown.
        if block.kind is None:
            continue
        if last is not None and last < block.batch_size:
            first = block.batch_size - last
            block = block.select(slice(first, block.batch_size))
        for i, metric in enumerate(metrics):
            squares = layer_norms(block, metric.get(name)).square()
            totals[i] = totals[i] + squares.cpu()
    return [total.sqrt() for total in totals]


def layer_norms(block: Block, entry: Entry | None) -> Tensor:
    """Return ‖P g_n‖ of one layer in an entry of a metric, rounded up, `[N]` in float64."""
    norms = []
    for part in block.iterate_explicit():
        formed = form_cheaply(part)
        norms.append(per_example_norms(formed, entry).norms)
    return torch.cat(norms)


def probe_scale(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    metric: Metric,
    *,
    last: ProbeMicrobatch | None,
    team: RefreshGroup | None = None,
) -> float:
    """Return median ‖g‖ ÷ median ‖P g‖ over the last probe examples; 1 if a median is zero.

    The last micro-batch gives these examples if it holds enough of them. Otherwise they run through
    the model again, in parts if several processes share the refresh. To avoid that pass, inputs and
    output gradients of all of them would have to stay in memory until the factors are known.
    """
    first = scale_from(spec)
    if last is not None and last.rows.start <= first:
        plain, mapped = _norms([last], first, metric)
    else:
        rows = rows_of_process(team, spec.size, first)
        microbatches = run_probe(model, capture, spec, rows)
        parts = gather_from_all(team, lambda: _norms(microbatches, rows.start, metric))
        plain, mapped = torch.cat(parts, 1)
    if not plain.numel():
        return 1.0
    ratio = _median(plain) / max(_median(mapped), 1e-300)
    return ratio if 0 < ratio < math.inf else 1.0


def scale_microbatch(part: ProbeMicrobatch, spec: ProbeSpec) -> ProbeMicrobatch | None:
    """Return the micro-batch if it holds all examples that the scale is measured on, else None.

    Other micro-batches are not worth their memory.
    """
    if part.rows.start > scale_from(spec) or part.rows.stop != spec.size:
        return None
    return part


def scale_from(spec: ProbeSpec) -> int:
    """Return the first example that the scale is measured on."""
    return max(0, spec.size - SCALE_SIZE)


def _norms(parts: Iterable[ProbeMicrobatch], first: int, metric: Metric) -> Tensor:
    """Return norms of the examples from `first` on, without the metric and with it, `[2, n]`."""
    norms = [torch.zeros(2, 0, dtype=torch.float64)]
    for part in parts:
        # Without blocks every parameter is used outside of layers and keeps the identity.
        if part.blocks:
            start = max(first, part.rows.start)
            last = part.rows.stop - start
            plain, mapped = probe_norms(part.blocks, {}, metric, last=last)
            norms.append(torch.stack([plain, mapped]))
        del part
    return torch.cat(norms, 1)


def _median(norms: Tensor) -> float:
    return float(torch.quantile(norms, 0.5))
