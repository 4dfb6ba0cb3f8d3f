"""Run one refresh: a pass over a probe, and its factors.

The model is left exactly as it was. `preconditioning.PreconditionerManager.refresh` decides that a
refresh is due and calls `kfac.KFAC.build`, which calls the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from dpkfc.curvature.factor_cache import FactorCache
from dpkfc.curvature.factor_history import History, keep_history
from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator, LayerFactors
from dpkfc.curvature.metric_scale import scale_from, scale_microbatch
from dpkfc.curvature.model_inputs import device_of_model
from dpkfc.curvature.probe_pass import (
    Capture,
    ProbeMicrobatch,
    ProbeSpec,
    digest_of_probes,
    public_generator,
    run_probe,
)
from dpkfc.curvature.refresh_group import (
    RefreshGroup,
    check_same_probe,
    finish_on_owners,
    gather_from_all,
    rows_of_process,
    send_to_owners,
)
from dpkfc.curvature.row_sampling import RowSubsampler
from dpkfc.linalg.blocks import Block
from dpkfc.tensors import copy_to_device


@dataclass(frozen=True, kw_only=True)
class ProbeStatistics:
    """Sums over one pass through the probe.

    Attributes:
        layers: layer name to its factors, not decomposed yet, or to what `measure` has started.
        unknown: layer name to the kind of a block without factors; the layer keeps the identity.
        last: the last micro-batch, if it holds all examples that the scale is measured on. None
            otherwise, and if several processes each ran a part of the probe.
        note: what became of labels that do not fit the model's output.
    """

    layers: Mapping[str, Any]
    unknown: Mapping[str, str]
    last: ProbeMicrobatch | None
    note: str = ""


def measure(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    options: FactorOptions,
    team: RefreshGroup | None = None,
    *,
    start: Callable[..., Any] = LayerAccumulator,
) -> ProbeStatistics:
    """Run the probe and add up factors; of several processes, each runs its own examples.

    With `sides="input"` only the last examples, on which the scale is measured too, are
    differentiated. They give the size of output gradients and the factors of layers without an
    input factor (norms, recurrent layers, ties).

    Args:
        model: should be inside `preserve_model`.
        capture: maps (model, loss) to layer name and block.
        spec: what to run.
        options: how factors are formed.
        team: the processes that share the refresh, None for this one alone.
        start: makes the empty sums of a layer; takes the arguments of `LayerAccumulator`.

    Raises:
        ValueError: a layer's contribution on the probe is not finite or does not fit.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    if team is None:
        return _measure_own(model, capture, spec, options, None, start)
    check_same_probe(gather_from_all(team, partial(digest_of_probes, [spec])))
    own = team.run_on_all(lambda: _measure_own(model, capture, spec, options, team, start))
    unknown: dict[str, str] = {}
    note = ""
    for own_unknown, own_note in team.all_gather((dict(own.unknown), own.note)):
        unknown |= own_unknown
        note = note or own_note
    return ProbeStatistics(layers=own.layers, unknown=unknown, last=None, note=note)


def _measure_own(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    options: FactorOptions,
    team: RefreshGroup | None,
    start: Callable[..., Any],
) -> ProbeStatistics:
    """Return the statistics of this process's examples."""
    generator = public_generator(spec.seed, spec.step, "positions")
    subsampler = RowSubsampler(generator, spec.size, options.rows_per_dim, options.row_share)
    cache = FactorCache()
    layers = {}
    unknown: dict[str, str] = {}
    last = None
    note = ""

    def add(part: ProbeMicrobatch, name: str, block: Block) -> None:
        if block.kind is None:
            unknown[name] = type(block).__name__
            return
        if block.batch_size != part.size:
            raise ValueError(f"capture returned {block.batch_size} examples instead of {part.size}")
        if name not in layers:
            rule = options.rules.get(name)
            layers[name] = start(block, options, rule, subsampler, cache)
        if part.differentiated:
            layers[name].add(block)
        else:
            layers[name].add_inputs(block)

    rows = rows_of_process(team, spec.size)
    microbatches = run_probe(
        model,
        capture,
        spec,
        rows,
        gradients_from=scale_from(spec) if options.sides == "input" else 0,
    )
    for part in microbatches:
        subsampler.start(part.rows, part.mask)
        part.visit(partial(add, part))
        cache.forget()
        note = part.note
        last = scale_microbatch(part, spec)
        # Otherwise this micro-batch stays in memory next to the next one.
        del part
    return ProbeStatistics(layers=layers, unknown=unknown, last=last, note=note)


def gather_layers(
    layers: Mapping[str, Any], model: nn.Module, team: RefreshGroup | None
) -> Mapping[str, Any]:
    """Return the sums of all processes for the layers that this one owns, on the model's device."""
    if team is None:
        return layers
    own = {name: layer.detached_copy() for name, layer in layers.items()}
    device = device_of_model(model)
    parts = send_to_owners(team, own, lambda layer: layer.cost(team.world_size))
    return team.run_on_all(lambda: sum_parts(copy_to_device(parts, device)))


def decompose_layers(
    layers: Mapping[str, LayerAccumulator],
    model: nn.Module,
    max_pairs: int | None = None,
    team: RefreshGroup | None = None,
    *,
    past: History,
    share: float,
    is_kept: bool = False,
) -> tuple[dict[str, LayerFactors], History]:
    """Return the factors of every layer, and what the next refresh needs of them.

    Of several processes, each decomposes its own layers and sends them to all.

    Args:
        layers: sums of the probe; of several processes, the layers that this one owns.
        model: on whose device the factors are wanted.
        max_pairs: eigenpairs to compute of a wide side, None for all. The trace of the others is
            kept.
        team: the processes that share the refresh.
        past: sums of earlier refreshes, of all layers.
        share: weight of the past.
        is_kept: whether the next refresh needs anything.
    """

    def decompose_own() -> dict[str, tuple[LayerFactors, dict[str, FactorAccumulator]]]:
        results = {}
        for name, layer in layers.items():
            total = layer.merge_history(past.get(name, {}), share)
            own_factors = total.result(max_pairs)
            kept = keep_history(total, own_factors) if is_kept else {}
            results[name] = (own_factors, kept)
        return results

    factors = {}
    history = {}
    for name, (own_factors, kept) in finish_on_owners(decompose_own, model, team).items():
        factors[name] = own_factors
        if kept:
            history[name] = kept
    return factors, history


def sum_parts(parts: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return layer name to the sum of its parts."""
    cache = FactorCache()
    sums = {}
    for name, (first, *others) in parts.items():
        sums[name] = first.detached_copy(cache)
        for other in others:
            sums[name].merge(other)
    return sums
