"""One refresh: a pass over the probe, its factors, and the one number that scales the metric."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from dpkfc.curvature.factors import FactorAccumulator, FactorCache
from dpkfc.curvature.layer_factors import (
    FactorOptions,
    LayerAccumulator,
    LayerFactors,
    RowSubsampler,
    probe_norms,
)
from dpkfc.curvature.probe_pass import (
    Capture,
    ProbeMicrobatch,
    ProbeSpec,
    probe_digest,
    public_generator,
    run_probe,
)
from dpkfc.curvature.probes import Inputs, device_of
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import Metric

# --------------------------------------------------------------------------------------------------
# A refresh over several processes.
#
# Every process runs its part of the probe and adds up what its examples contribute. The parts of a
# layer go to the process that owns it. The owner joins them in the order of the probe, decomposes
# the sum and sends the result to all. The result is that of one process, except for the order in
# which sums over many examples are added up.

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class RefreshGroup(Protocol):
    """The processes that share a refresh. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run work on all processes; an error on one is raised on all."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in their order."""
        ...

    def gather(self, value: T, to: int) -> list[T] | None:
        """Return the values of all on one process, None on the others."""
        ...


def rows_of_process(team: RefreshGroup | None, size: int, first: int = 0) -> slice:
    """Return the consecutive examples from `first` to `size` that this process runs.

    All processes run about the same number.
    """
    if team is None:
        return slice(first, size)
    count = size - first
    start = count * team.rank // team.world_size
    stop = count * (team.rank + 1) // team.world_size
    return slice(first + start, first + stop)


def finish_on_owners(
    team: RefreshGroup,
    parts: Mapping[str, P],
    cost: Callable[[P], float],
    finish: Callable[[Mapping[str, list[P]]], Mapping[str, R]],
    device: torch.device,
) -> dict[str, R]:
    """Send the parts of each layer to its owner, finish it there, and send the result to all.

    Args:
        team: the processes.
        parts: layer name to the sums of this process; layers that its examples do not reach may be
            missing.
        cost: cost of finishing a layer, in any unit.
        finish: maps layer name to its parts in the order of the processes; returns the results.
        device: of the model on this process.

    Returns:
        Layer name to result, the same on every process.
    """
    own = send_to_owners(team, parts, cost)
    results = team.run_on_all(lambda: finish(copy_to_device(own, device)))
    return broadcast_results(team, results, device)


def send_to_owners(
    team: RefreshGroup, parts: Mapping[str, P], cost: Callable[[P], float]
) -> dict[str, list[P]]:
    """Send the parts of each layer to its owner; arguments as in `finish_on_owners`.

    Returns:
        The layers that this process owns to their parts, in the order of the processes, on the CPU.
    """
    costs = {name: cost(part) for name, part in parts.items()}
    owners = assign_owners(team.all_gather(costs))
    own: dict[str, list[P]] = defaultdict(list)
    for owner in range(team.world_size):
        sent = {name: part for name, part in parts.items() if owners[name] == owner}
        received = team.gather(copy_to_device(sent, torch.device("cpu")), owner)
        for of_process in received or ():
            for name, part in of_process.items():
                own[name].append(part)
    return {name: own[name] for name in owners if name in own}


def broadcast_results(
    team: RefreshGroup, results: Mapping[str, R], device: torch.device
) -> dict[str, R]:
    """Return the results of all processes; in one order, since owners hold consecutive layers."""
    parts = team.all_gather(copy_to_device(dict(results), torch.device("cpu")))
    return {name: copy_to_device(x, device) for part in parts for name, x in part.items()}


def assign_owners(costs: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the process that finishes each layer.

    A process owns consecutive layers, which often share a factor, at about equal cost.

    Args:
        costs: of the layers that each process knows.
    """
    known: dict[str, float] = defaultdict(float)
    for own_costs in costs:
        for name, cost in own_costs.items():
            known[name] = max(cost, known[name])
    total = sum(known.values())
    processes = len(costs)
    done = 0.0
    owners: dict[str, int] = {}
    for name, cost in known.items():
        middle = done + cost / 2
        owner = int(processes * middle / total) if total > 0 else 0
        owners[name] = min(processes - 1, owner)
        done += cost
    return owners


def copy_to_device(value: T, device: torch.device) -> T:
    """Return a copy of a value with every tensor in it on a device.

    An object that several parts of the value hold stays one object.
    """
    known: dict[int, Any] = {}

    def copy_once(x: Any) -> Any:
        if id(x) not in known:
            known[id(x)] = _copy_value(x, device, copy_once)
        return known[id(x)]

    return cast(T, copy_once(value))


def _copy_value(x: Any, device: torch.device, copy_part: Callable[[Any], Any]) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to(device)
    if isinstance(x, torch.device):
        return device
    is_own_class = is_dataclass(x) or type(x).__module__.startswith("dpkfc.")
    is_value = hasattr(x, "__dict__") and not isinstance(x, type)
    if is_own_class and is_value:
        twin = copy.copy(x)
        for name, part in vars(x).items():
            object.__setattr__(twin, name, copy_part(part))
        return twin
    if isinstance(x, Mapping):
        return {key: copy_part(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(copy_part(part) for part in x)
    return x


def check_same_probe(digests: Sequence[str]) -> None:
    """Refuse, on every process, a probe whose hashes differ between the processes.

    Raises:
        RuntimeError: naming the first process whose hash differs from that of rank 0.
    """
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RuntimeError(
                f"the probe returns other inputs on rank {rank} than on rank 0; "
                "sample(n, generator) must depend on its generator alone"
            )


# --------------------------------------------------------------------------------------------------
# Sums of factors that refreshes keep for the next one.
#
# With share β of the past, rows x of refresh t and n_t examples in it, the factor of a side is
#
#     S_t / N_t,     S_t = β S_{t−1} + Σ x xᵀ,     N_t = β N_{t−1} + n_t,
#
# a mean of the refreshes' factors with weights β^(age), which needs no correction at the start.
# About 1/(1 − β) probes stand behind every factor, so probes can be small. Everything kept is a
# function of probes and released parameters.
#
# Source: the running average of Martens and Grosse (2015), section 5, with the weights of Adam's
# corrected means.

History = Mapping[str, Mapping[str, FactorAccumulator]]
"""Layer to side to sums."""
_KEY = "running"


def keep_history(
    layers: Mapping[str, LayerAccumulator], factors: Mapping[str, LayerFactors]
) -> History:
    """Return the sums of a refresh, and the eigenvectors from which the next one starts."""
    kept: dict[str, dict[str, FactorAccumulator]] = {}
    for name, layer in layers.items():
        kept[name] = {}
        for side, sums in layer.sides.items():
            copied = sums.detached_copy()
            copied.warm_start_from(factors[name].sides[side])
            kept[name][side] = copied
    return kept


def measure_drift(
    layers: Mapping[str, LayerAccumulator], past: History, team: RefreshGroup | None = None
) -> float:
    """Measure how far the factors of a probe lie from those that are kept.

    Args:
        layers: sums of this probe; of several processes, the layers that this one owns.
        past: sums that are kept of all layers.
        team: the processes, None for this one alone.

    Returns:
        The mean over all sides of ‖A/tr A − B/tr B‖ ÷ ‖A/tr A‖ (Frobenius), A kept and B new;
        infinite for a new layer. Two probes of n examples at the same parameters differ by their
        sampling noise: about √(1/n) times a number that grows with the effective rank.
    """

    def measure_own() -> list[float]:
        distances = []
        for name, layer in layers.items():
            for side, sums in layer.sides.items():
                is_known = name in past
                distances.append(past[name][side].distance(sums) if is_known else math.inf)
        return distances

    if team is None:
        distances = measure_own()
    else:
        parts = team.all_gather(team.run_on_all(measure_own))
        distances = list(chain.from_iterable(parts))
    return sum(distances) / len(distances) if distances else 0.0


def history_state(histories: Sequence[History]) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Return tensors and JSON-able values for the state of a preconditioner, one entry a probe."""
    tensors: dict[str, Tensor] = {}
    values: list[list[Any]] = []
    for probe, layers in enumerate(histories):
        for name, sides in layers.items():
            for side, sums in sides.items():
                own_tensors, own_values = sums.state()
                for key, tensor in own_tensors.items():
                    tensors[f"{_KEY}.{len(values)}.{key}"] = tensor
                values.append([probe, name, side, sorted(own_tensors), own_values])
    return tensors, values


def history_from_state(
    tensors: Mapping[str, Tensor], values: Sequence[Sequence[Any]]
) -> tuple[History, ...]:
    """Return the histories whose state `history_state` returned.

    Raises:
        ValueError: a tensor is missing.
    """
    histories: dict[int, dict[str, dict[str, FactorAccumulator]]] = {}
    for i, (probe, name, side, keys, own_values) in enumerate(values):
        try:
            own_tensors = {key: tensors[f"{_KEY}.{i}.{key}"] for key in keys}
        except KeyError as error:
            raise ValueError(
                f"not the state of a preconditioner, or a damaged one: {error!r}"
            ) from error
        sides = histories.setdefault(probe, {}).setdefault(name, {})
        sides[side] = FactorAccumulator.restore(own_tensors, own_values)
    return tuple(histories.values())


# --------------------------------------------------------------------------------------------------

SCALE_SIZE = 64  # last probe examples, for the two medians


@dataclass(frozen=True, kw_only=True)
class ProbeStatistics:
    """Sums over one pass through the probe.

    Attributes:
        layers: layer name to its factors, not decomposed yet.
        unknown: layer name to the kind of a block without factors; the layer keeps the identity.
        last: the last micro-batch, if it holds all examples that the scale is measured on. None
            otherwise, and if several processes each ran a part of the probe.
        note: what became of labels that do not fit the model's output.
    """

    layers: Mapping[str, LayerAccumulator]
    unknown: Mapping[str, str]
    last: ProbeMicrobatch | None
    note: str = ""


def measure(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    options: FactorOptions,
    team: RefreshGroup | None = None,
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

    Raises:
        ValueError: a layer's contribution on the probe is not finite or does not fit.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    if team is None:
        return _measure_own(model, capture, spec, options)[0]
    own, digest = team.run_on_all(lambda: _measure_own(model, capture, spec, options, team))
    answers = team.all_gather((digest, dict(own.unknown), own.note))
    check_same_probe([own_digest for own_digest, _, _ in answers])
    unknown: dict[str, str] = {}
    note = ""
    for _, kinds, own_note in answers:
        unknown |= kinds
        note = note or own_note
    return ProbeStatistics(layers=own.layers, unknown=unknown, last=None, note=note)


def _measure_own(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    options: FactorOptions,
    team: RefreshGroup | None = None,
) -> tuple[ProbeStatistics, str]:
    """Return the statistics of this process's examples, and for a team the probe's hash."""
    generator = public_generator(spec.seed, spec.step, "positions")
    subsampler = RowSubsampler(generator, spec.size, options.rows_per_dim)
    cache = FactorCache()
    layers: dict[str, LayerAccumulator] = {}
    unknown: dict[str, str] = {}
    last = None
    note = digest = ""

    def take_digest(inputs: Inputs, labels: Tensor | None) -> None:
        nonlocal digest
        digest = probe_digest(inputs, labels)

    def add(part: ProbeMicrobatch, name: str, block: Block) -> None:
        if block.kind is None:
            unknown[name] = type(block).__name__
            return
        if block.batch_size != part.size:
            raise ValueError(f"capture returned {block.batch_size} examples instead of {part.size}")
        if name not in layers:
            kind = options.kinds.get(name)
            layers[name] = LayerAccumulator(block, options, kind, subsampler, cache)
        if part.differentiated:
            layers[name].add(block)
        else:
            layers[name].add_inputs(block)

    rows = rows_of_process(team, spec.size)
    microbatches = run_probe(
        model,
        capture,
        spec,
        rows.start,
        stop=rows.stop,
        gradients_from=_scale_from(spec) if options.sides == "input" else 0,
        on_sample=None if team is None else take_digest,
    )
    for part in microbatches:
        subsampler.start(part.rows, part.mask)
        part.visit(partial(add, part))
        cache.forget()
        note = part.note
        last = scale_microbatch(part, spec)
        # Otherwise this micro-batch stays in memory next to the next one.
        del part
    return ProbeStatistics(layers=layers, unknown=unknown, last=last, note=note), digest


def gather_layers(
    layers: Mapping[str, LayerAccumulator], model: nn.Module, team: RefreshGroup | None = None
) -> Mapping[str, LayerAccumulator]:
    """Return the sums of all processes for the layers that this one owns, on the model's device."""
    if team is None:
        return layers
    own = {name: layer.detached_copy() for name, layer in layers.items()}
    parts = send_to_owners(team, own, lambda layer: layer.cost(team.world_size))
    return team.run_on_all(lambda: sum_parts(copy_to_device(parts, device_of(model))))


def decompose_layers(
    layers: Mapping[str, LayerAccumulator],
    rank: Callable[[str, str], int | None],
    model: nn.Module,
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
        rank: maps layer and side to the eigenpairs wanted of a wide side, None for all. The trace
            of the others is kept.
        model: on whose device the factors are wanted.
        team: the processes that share the refresh.
        past: sums of earlier refreshes, of all layers.
        share: weight of the past.
        is_kept: whether the next refresh needs anything.
    """

    def decompose_own() -> dict[str, tuple[LayerFactors, Any]]:
        totals: dict[str, LayerAccumulator] = {}
        factors: dict[str, LayerFactors] = {}
        for name, layer in layers.items():
            total = layer.merge_history(past[name], share) if name in past else layer
            totals[name] = total
            factors[name] = total.result(partial(rank, name))
        history = keep_history(totals, factors) if is_kept else {}
        return {name: (factors[name], history.get(name)) for name in factors}

    if team is None:
        results = decompose_own()
    else:
        results = broadcast_results(team, team.run_on_all(decompose_own), device_of(model))
    history = {name: sums for name, (_, sums) in results.items() if sums is not None}
    return {name: factors for name, (factors, _) in results.items()}, history


def sum_parts(parts: Mapping[str, list[LayerAccumulator]]) -> dict[str, LayerAccumulator]:
    """Return layer name to the sum of its parts."""
    cache = FactorCache()
    sums: dict[str, LayerAccumulator] = {}
    for name, (first, *others) in parts.items():
        sums[name] = first.detached_copy(cache)
        for other in others:
            sums[name].merge(other)
    return sums


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
    first = _scale_from(spec)
    if last is not None and last.rows.start <= first:
        plain, mapped = _norms([last], first, metric)
    elif team is None:
        plain, mapped = _norms(run_probe(model, capture, spec, first), first, metric)
    else:
        rows = rows_of_process(team, spec.size, first)
        microbatches = run_probe(model, capture, spec, rows.start, stop=rows.stop)
        own = team.run_on_all(lambda: _norms(microbatches, rows.start, metric))
        parts = team.all_gather([norms.cpu() for norms in own])
        plain, mapped = (torch.cat(norms) for norms in zip(*parts, strict=True))
    if not plain.numel():
        return 1.0
    ratio = _median(plain) / max(_median(mapped), 1e-300)
    return ratio if ratio > 0 and math.isfinite(ratio) else 1.0


def scale_microbatch(part: ProbeMicrobatch, spec: ProbeSpec) -> ProbeMicrobatch | None:
    """Return the micro-batch if it holds all examples that the scale is measured on, else None.

    Other micro-batches are not worth their memory.
    """
    rows = part.rows
    return part if rows.start <= _scale_from(spec) and rows.stop == spec.size else None


def _scale_from(spec: ProbeSpec) -> int:
    """Return the first example that the scale is measured on."""
    return max(0, spec.size - SCALE_SIZE)


def _norms(parts: Iterable[ProbeMicrobatch], first: int, metric: Metric) -> list[Tensor]:
    """Return norms of the examples from `first` on, without the metric and with it."""
    plain: list[Tensor] = [torch.zeros(0)]
    mapped: list[Tensor] = [torch.zeros(0)]
    for part in parts:
        # Without blocks every parameter is used outside of layers and keeps the identity.
        if not part.blocks:
            continue
        count = part.rows.stop - max(first, part.rows.start)
        last = None if count == part.size else count
        norms = probe_norms(part.blocks, {}, metric, last=last)
        plain.append(norms[0])
        mapped.append(norms[1])
        del part
    return [torch.cat([x.to(norms[-1]) for x in norms]) for norms in (plain, mapped)]


def _median(norms: Tensor) -> float:
    return float(torch.quantile(norms, 0.5))
