"""Diagnose what the library does with each layer of a model, and measure what a step costs.

Both are done on a probe, before any budget is spent.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from dpkfc.checkpoint import CheckpointError, place_file
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.kfac import KFAC, side_name
from dpkfc.curvature.probes import call, move_to_model, preserve_model
from dpkfc.curvature.refresh import logits_of, public_generator
from dpkfc.data.loading import Part, layout
from dpkfc.gradients.clipped_sum import Clip, batch_tracker, capture, clipped_sum, full_precision
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.fallback import gradient_of
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import AnyBlock, ConvBlock, Outer
from dpkfc.linalg.metric import Dense, Entry, Kronecker, LowRank, Side
from dpkfc.linalg.norms import METHODS, Choice, choice_for, per_example_norms
from dpkfc.tracking import Tracker, Unknown

_EXAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class SideFacts:
    """One factor of a layer.

    Attributes:
        side: A, G, or the role of a parameter that is whitened entry by entry.
        size: dimension.
        kind: dense, lowrank, diagonal or identity.
        condition_before: condition number on the probe.
        condition_after: condition number after damping.
        note: for example that the factor was too large.
    """

    side: str
    size: int
    kind: str
    condition_before: float
    condition_after: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One layer.

    Attributes:
        name: path in the model.
        module: class of the module.
        rule: of its per-example gradients; "followed" if a module reads its parameters itself.
        parameters: trainable numbers.
        method: how per-example norms are computed.
        why: reason for that method.
        sides: its factors.
        tied: other uses of the same parameters.
        frozen: parameters of the module that are not trained.
    """

    name: str
    module: str
    rule: str
    parameters: int
    method: str
    why: str
    sides: tuple[SideFacts, ...] = ()
    tied: int = 0
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a model.

    Attributes:
        layers: one a covered layer.
        frozen: modules without trained parameters, to their number of parameters.
        trainable: number of trained parameters.
        problem: why the model cannot be trained privately, "" if it can.
        unproved: the operation that hides the batch axis, and why; "" if the axis is proved for
            whole micro-batches.
    """

    layers: tuple[LayerFacts, ...]
    frozen: Mapping[str, int]
    trainable: int
    problem: str = ""
    unproved: str = ""


def diagnose(model: nn.Module, kfac: KFAC) -> Diagnosis:
    """Diagnose every layer of a model on a few probe examples, without changing the model.

    Args:
        model: any module.
        kfac: whose probe and factors to use.

    Raises:
        ValueError: the model cannot read the probe's inputs.
    """
    frozen = _count_frozen(model)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        layers = find_layers(model)
    except ValueError as error:
        return Diagnosis(layers=(), frozen=frozen, trainable=trainable, problem=str(error))
    built = _build(model, layers, kfac)
    inputs = probe_inputs(model, kfac, _EXAMPLES)
    with preserve_model(model):
        tracker = batch_tracker(model, inputs, _EXAMPLES)
        blocks, failure = capture_blocks(model, layers, inputs, _EXAMPLES, tracker)
    unproved = "" if failure is None else f"{failure.operation}: {failure.reason}"
    facts = tuple(_layer_facts(layer, blocks.get(layer.name), built) for layer in layers)
    return Diagnosis(layers=facts, frozen=frozen, trainable=trainable, unproved=unproved)


def _count_frozen(model: nn.Module) -> dict[str, int]:
    """Return the modules without trained parameters, with their number of parameters."""
    frozen = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters and not any(p.requires_grad for p in parameters):
            frozen[name or "(root)"] = sum(p.numel() for p in parameters)
    return frozen


def _build(model: nn.Module, layers: Sequence[Layer], kfac: KFAC) -> PreconditionerState:
    """Return the preconditioner of a model at its present parameters."""
    rules = {layer.name: layer.rule for layer in layers}
    return kfac.build(model, lambda m, loss: capture(m, layers, loss), 0, rules=rules)


def _layer_facts(layer: Layer, block: AnyBlock | None, built: PreconditionerState) -> LayerFacts:
    choice = Choice("none", "not reached by the probe")
    if block is not None:
        choice = choice_for(block, built.metric.get(layer.name))
    sides = []
    for row in built.report:
        if row["layer"] == layer.name:
            side = SideFacts(
                side={"input": "A", "output": "G"}.get(row["side"], row["side"]),
                size=row["dim"],
                kind=row["kind"],
                condition_before=row["condition_before"],
                condition_after=row["condition_after"],
                note=row["note"],
            )
            sides.append(side)
    return LayerFacts(
        name=layer.display_name,
        module=type(layer.module).__name__,
        rule=layer.rule if layer.is_hooked else "followed",
        parameters=sum(layer.tensor(role).numel() for role in layer.parameters),
        method=choice.method,
        why=choice.reason,
        sides=tuple(sides),
        tied=len(layer.modules) - 1,
        frozen=layer.frozen,
    )


_CAPTION = (
    "size: trainable parameters; norms: the method its widths choose, multiplications an example "
    "(else: the other's)"
)


def layer_table(diagnosis: Diagnosis, title: str) -> Table:
    """Return the diagnosis as a table, with a column of notes if there are notes."""
    has_notes = bool(diagnosis.frozen) or any(_notes(layer) for layer in diagnosis.layers)
    caption = _CAPTION
    if diagnosis.unproved:
        caption += (
            f"\n{diagnosis.unproved}. Examples are differentiated one at a time: "
            "a micro-batch of n takes n passes"
        )
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        show_lines=True,
        caption=caption,
        caption_justify="left",
    )
    table.add_column("layer", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("norms", min_width=12)
    table.add_column("factor", no_wrap=True)
    table.add_column("condition", no_wrap=True)
    if has_notes:
        table.add_column("notes", min_width=10)

    def add(*cells: str) -> None:
        table.add_row(*cells[: len(table.columns)])

    for layer in diagnosis.layers:
        sides = []
        conditions = []
        for side in layer.sides:
            sides.append(f"{side.side} {side.size:,} {side.kind}")
            before = _condition(side.condition_before)
            after = _condition(side.condition_after)
            conditions.append(f"{before} → {after}")
        add(
            f"{layer.name}\n[dim]{layer.module}: {layer.rule}[/dim]",
            f"{layer.parameters:,}",
            f"{layer.method}\n[dim]{layer.why}[/dim]",
            "\n".join(sides) or "–",
            "\n".join(conditions) or "–",
            "\n".join(_notes(layer)),
        )
    for name, count in diagnosis.frozen.items():
        add(name, f"{count:,}", "frozen", "–", "–", "not trained, costs nothing")
    return table


def _notes(layer: LayerFacts) -> list[str]:
    notes = []
    if layer.tied:
        notes.append(f"tied: {layer.tied + 1} uses, one norm of their sum")
    if layer.frozen:
        notes.append(f"frozen: {', '.join(layer.frozen)}")
    if layer.rule == "fallback":
        notes.append("no rule of its own: by torch.func, slower")
    return notes + [f"{side.side}: {side.note}" for side in layer.sides if side.note]


def _condition(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------
# A cost model: what a step takes on this machine, layer by layer, measured on public inputs.
#
# It is behind `dpkfc doctor --cost` and `structure="auto"`. It uses the probe alone, so its choices
# may decide how a private run computes: the norm method of a layer (`PrivacyConfig.norm_methods`),
# low-rank factors, and how often the metric is rebuilt. The first two change speed and rounding,
# never the guarantee. The last is a setting like any other. A file keeps the times of layers, so a
# machine measures a shape once.

# -- times of this machine -------------------------------------------------------------------------

_REPEATS = 3


def default_cache() -> Path:
    """Return the file of measured times.

    It is `$DPKFC_CACHE/costs.json`, or lies below the user's cache folder.
    """
    if folder := os.environ.get("DPKFC_CACHE"):
        return Path(folder) / "costs.json"
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "dpkfc" / "costs.json"


@dataclass(frozen=True)
class Timings:
    """Measured seconds by what was timed, stored in a file.

    A damaged or unwritable file is ignored, and everything is measured anew.

    Attributes:
        path: the file, None to store nothing.
        seconds: of this machine, its instructions, thread count and version of torch.
        stale: keys that are to be measured once more.
    """

    path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path | Timings | None, *, again: bool = False) -> Timings:
        """Return given times, or the times of this machine from a file.

        Args:
            path: the file, or times.
            again: measure each stored time anew at its first use.
        """
        if isinstance(path, Timings):
            return path
        known = _read(path).get(_machine(), {}).items()
        seconds = {key: x for key, x in known if isinstance(x, int | float) and x > 0}
        return cls(path, seconds, set(seconds) if again else set())

    def measure(self, key: str, work: Callable[[], Any]) -> float:
        """Return the seconds of `work`, and measure them unless they are known and not stale."""
        if key not in self.seconds or key in self.stale:
            self.seconds[key] = measure_seconds(work)
            self.stale.discard(key)
        return self.seconds[key]

    def save(self) -> None:
        """Write the times into the file, next to those of other machines."""
        if self.path is None:
            return
        machines = _read(self.path)
        machines[_machine()] = dict(sorted(self.seconds.items()))
        text = json.dumps(machines, indent=1)
        # A cache that cannot be written costs time, nothing else.
        with suppress(CheckpointError):
            place_file(self.path, lambda part: part.write_text(text))


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the times of all machines in a file, {} for a damaged file."""
    if path is None:
        return {}
    try:
        machines = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(machines, dict):
        return {}
    return {name: times for name, times in machines.items() if isinstance(times, dict)}


def _machine() -> str:
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{platform.node()} {processor} {threads}, torch {torch.__version__}"


def measure_seconds(work: Callable[[], Any]) -> float:
    """Return the median wall time of a few runs on finished devices, after a warm-up."""
    seconds = []
    for _ in range(1 + _REPEATS):
        _synchronize()
        started = time.perf_counter()
        work()
        _synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


# -- a step and its layers -------------------------------------------------------------------------

# A method replaces that of the rule if it takes less than this fraction of the time.
WORTH = 0.9
# Refreshes may take this fraction of the time.
_REFRESH_FRACTION = 0.05
# A probe that is averaged over refreshes has so many times fewer examples, but at least _FEWEST.
_SMALLER, _FEWEST = 8, 16
# Materialising is not tried if the gradients of one layer take more bytes.
_GRADIENT_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class SideCost:
    """Seconds to map a batch's rows by one factor: as it is, and by a full matrix of its width."""

    side: str
    kind: str
    width: int
    seconds: float
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one matrix layer with several positions.

    Attributes:
        name: of the layer.
        positions, d_in, d_out: its shape on the probe.
        by_rule: the method that the rule by widths takes.
        seconds: of the norms of one batch, by method.
        sides: of its map.
    """

    name: str
    positions: int
    d_in: int
    d_out: int
    by_rule: str
    seconds: Mapping[str, float]
    sides: tuple[SideCost, ...] = ()

    @property
    def chosen(self) -> str:
        """The fastest method, or that of the rule if none is clearly faster."""
        fastest = min(self.seconds, key=lambda method: self.seconds[method])
        is_clear = self.seconds[fastest] < WORTH * self.seconds[self.by_rule]
        return fastest if is_clear else self.by_rule


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost of a step of `rows` examples, in seconds.

    Attributes:
        rows: examples.
        threads: that torch uses.
        plain: forward and backward pass without privacy.
        dp_sgd: the clipped sum without a metric.
        preconditioned: the clipped sum in the metric.
        chosen: the same with the recommended norm methods.
        refresh: building the metric.
        averaged: probe examples, weight of the past, and seconds of a refresh that averages a
            smaller probe over refreshes. About as many examples then stand behind each factor.
        layers: with a choice of methods.
    """

    rows: int
    threads: int
    plain: float
    dp_sgd: float
    preconditioned: float
    chosen: float
    refresh: float
    averaged: tuple[int, float, float]
    layers: tuple[LayerCost, ...]

    @property
    def every(self) -> int:
        """Shortest refresh interval, in steps, that keeps refreshes within 5 % of the time."""
        return self.interval(self.refresh)

    def interval(self, refresh: float) -> int:
        """Return the shortest interval for a refresh of so many seconds."""
        allowed = _REFRESH_FRACTION / (1 - _REFRESH_FRACTION) * max(self.chosen, 1e-9)
        return max(1, int(np.ceil(refresh / allowed)))

    @property
    def norm_methods(self) -> dict[str, str]:
        """Layers with a clearly faster method, for `PrivacyConfig(norm_methods=...)`."""
        return _faster_methods(self.layers)


def _faster_methods(layers: Sequence[LayerCost]) -> dict[str, str]:
    return {layer.name: layer.chosen for layer in layers if layer.chosen != layer.by_rule}


def measure_costs(
    model: nn.Module, kfac: KFAC, *, rows: int = 32, cache: Path | Timings | None = None
) -> Costs:
    """Measure a model on probe inputs, without changing the model.

    Args:
        model: any module that can be trained privately.
        kfac: whose probe, factors and low-rank factors are measured.
        rows: examples of the batch that is timed.
        cache: file of the times of layers, or these times; None measures all and stores nothing.

    Raises:
        ValueError: a layer that cannot be trained privately, inputs that the model cannot read, or
            no rows.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    layers = find_layers(model)
    timings = Timings.load(cache)
    inputs = probe_inputs(model, kfac, rows)
    few = min(kfac.probe_size, max(_FEWEST, kfac.probe_size // _SMALLER))

    usual = replace(kfac, probe_size=kfac.fewest_probe_examples, later_probe_size=None)
    smaller = replace(usual, probe_size=few)
    with preserve_model(model):
        metric = _build(model, layers, usual).metric
        refresh = measure_seconds(lambda: _build(model, layers, usual))
        small_refresh = measure_seconds(lambda: _build(model, layers, smaller))
        layer_costs = []
        blocks, _ = capture_blocks(model, layers, inputs, rows)
        for name, block in blocks.items():
            cost = _layer_cost(name, block, metric.get(name), timings)
            if cost is not None:
                layer_costs.append(cost)
        timings.save()
        batch = (inputs, layout(np.arange(rows))[0])
        dp_sgd = _step_seconds(model, layers, batch, {}, {})
        preconditioned = chosen = _step_seconds(model, layers, batch, metric, {})
        if methods := _faster_methods(layer_costs):
            chosen = _step_seconds(model, layers, batch, metric, methods)
        plain = measure_seconds(lambda: _differentiate(model, inputs))
    return Costs(
        rows=rows,
        threads=torch.get_num_threads(),
        plain=plain,
        dp_sgd=dp_sgd,
        preconditioned=preconditioned,
        chosen=chosen,
        refresh=refresh,
        averaged=(few, round(1 - few / kfac.probe_size, 3), small_refresh),
        layers=tuple(layer_costs),
    )


def probe_inputs(model: nn.Module, kfac: KFAC, rows: int) -> Any:
    """Return inputs of the probe on the model's device."""
    inputs, _ = kfac.probe.sample(rows, public_generator(kfac.seed, 0))
    return move_to_model(inputs, model)


def smooth_loss(output: Any) -> Tensor:
    """Return a smooth number an example, whose gradient has the shapes of any other."""
    return logits_of(output).flatten(1).float().logsumexp(1)


def _differentiate(model: nn.Module, inputs: Any) -> None:
    with torch.enable_grad():
        gradient_of(model, smooth_loss(call(model, inputs)).sum())


def _step_seconds(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: tuple[Any, Part],
    metric: Mapping[str, Entry],
    methods: Mapping[str, str],
) -> float:
    def step() -> None:
        clipped_sum(
            model,
            layers,
            metric,
            Clip(1.0, methods=methods),
            loss_fn=lambda m, inputs: smooth_loss(call(m, inputs)),
            micro_batches=[batch],
            one_record=lambda index: batch[0][index : index + 1],
        )

    return measure_seconds(step)


def capture_blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    rows: int,
    tracker: Tracker | None = None,
) -> tuple[dict[str, AnyBlock], Unknown | None]:
    """Return the per-example gradients of each layer as blocks, for inputs `[rows, ...]`.

    Args:
        model: any module.
        layers: of the model.
        inputs: of the probe.
        rows: their number.
        tracker: follows the batch axis; None leaves the axis unproved.

    Returns:
        The blocks, and what hides the batch axis, None if the axis is proved.
    """
    tape = Tape(model, layers, rows, tracker=tracker, lenient=True)
    following = nullcontext() if tracker is None else tracker.following()
    with torch.enable_grad(), tape, following:
        losses = smooth_loss(call(model, inputs))
    failure = tape.failure(losses)
    calls = tape.backward(losses)
    blocks = {}
    for layer in layers:
        if layer.name in calls:
            blocks[layer.name] = blocks_of(layer, calls[layer.name], rows)
    return blocks, failure


def _layer_cost(
    name: str,
    block: AnyBlock,
    entry: Any,
    timings: Timings,
) -> LayerCost | None:
    """Measure a layer. Return None if there is nothing to choose.

    That is one position, an embedding, or a gradient that is materialised anyway.
    """
    matrix = block.matrix
    metric = Kronecker() if entry is None else entry.sides
    if matrix is None or metric is None:
        return None
    rule = choice_for(matrix, metric).method
    if rule == "rank-one":
        return None
    positions, d_in, d_out = matrix.dimensions
    seconds = norm_seconds(matrix, metric, timings)
    outer = matrix.outer()
    sides = (
        _side_cost("A", metric.input, outer.explicit().a, timings),
        _side_cost("G", metric.output, outer.b, timings),
    )
    return LayerCost(
        name=name,
        positions=positions,
        d_in=d_in,
        d_out=d_out,
        by_rule=rule,
        seconds=seconds,
        sides=tuple(side for side in sides if side is not None),
    )


def norm_seconds(block: Outer | ConvBlock, metric: Kronecker, timings: Timings) -> dict[str, float]:
    """Measure the norms of one layer, by every method that fits into memory.

    A layer with one position has a method of its own.
    """
    positions, d_in, d_out = block.dimensions
    kinds = f"{metric.input.label},{metric.output.label}"
    key = f"{type(block).__name__} {block.batch_size}x{positions} {d_in}>{d_out} {kinds}"
    key += _type_and_device(block.b) + _convolution(block)
    methods = _feasible_methods(block, choice_for(block, metric).method)

    def norms(method: str) -> None:
        with full_precision():
            per_example_norms(block, metric, method if method in METHODS else None)

    seconds = {}
    for method in methods:
        seconds[method] = timings.measure(f"{method} {key}", partial(norms, method))
    return seconds


def _feasible_methods(block: Outer | ConvBlock, rule: str) -> list[str]:
    """Return the methods that fit into memory, and always that of the rule."""
    if rule not in METHODS:
        return [rule]
    if block.like.element_size() * block.num_entries * block.batch_size <= _GRADIENT_BYTES:
        return list(METHODS)
    return [method for method in METHODS if method == rule or method != "materialised"]


def _convolution(block: Outer | ConvBlock) -> str:
    """Return what the widths do not say about a convolution, as part of a key."""
    text = f" groups {block.groups}" if block.groups > 1 else ""
    convolution = block.settings
    if convolution is not None:
        text += f" {convolution.kernel}/{convolution.stride}/{convolution.dilation}"
    return text


def _type_and_device(x: Tensor) -> str:
    """Return type and device as part of a key; nothing for float32 on a CPU."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return ""
    return f" {str(x.dtype).removeprefix('torch.')} {x.device.type}"


def _side_cost(side: str, entry: Side, x: Tensor, timings: Timings) -> SideCost | None:
    if entry.is_diagonal:
        return None
    width = x.shape[-1]
    rows = x.shape[:-1].numel()
    full = torch.eye(width, dtype=x.dtype, device=x.device)
    key = f"map {rows}x{width}"
    suffix = _type_and_device(x)
    return SideCost(
        side=side,
        kind=entry.label,
        width=width,
        seconds=timings.measure(f"{key} {entry.label}{suffix}", lambda: entry.apply(x)),
        dense_seconds=timings.measure(f"{key} dense{suffix}", lambda: x @ full),
    )


# -- structure="auto" ------------------------------------------------------------------------------
#
# A factor is a full matrix unless the norms of its layer are clearly faster with its first
# eigenpairs alone. All is measured on the probe, so the choice may decide what a private run
# computes. It is part of the plan.

_PROBE = 16  # examples that show the factors


@dataclass(frozen=True, kw_only=True)
class SideChoice:
    """One factor that could keep few eigenpairs.

    Attributes:
        name: such as `conv1.A`.
        width: d.
        rank: eigenpairs it keeps, 0 for all.
        dense_seconds, low_rank_seconds: of the norms of its layer and a batch, by the fastest
            method for each.
    """

    name: str
    width: int
    rank: int
    dense_seconds: float
    low_rank_seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStructure:
    """The choice for this machine, as values of `KFAC` and `PrivacyConfig`.

    Attributes:
        sides: factors with a choice.
        norm_methods: layers with a clearly faster norm method, for `PrivacyConfig`.
        every: the interval of `kfac`, or a longer one that keeps refreshes within 5 % of the time.
    """

    sides: tuple[SideChoice, ...]
    norm_methods: Mapping[str, str]
    every: int

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks for `KFAC(ranks=...)`."""
        return {side.name: side.rank for side in self.sides}


def measure_structure(
    model: nn.Module,
    kfac: KFAC,
    *,
    expected_batch_size: int,
    rows: int = 64,
    cache: Path | None = None,
) -> MeasuredStructure:
    """Measure the cost of each factor and of a step on the probe, and choose.

    Args:
        model: any module that can be trained privately; it is not changed.
        kfac: whose factors may keep `max_rank` eigenpairs; None leaves nothing to choose.
        expected_batch_size: of the run. Its steps are taken to last in proportion to it.
        rows: most examples of the batch that is timed.
        cache: file of the times of layers, None to measure all anew.

    Raises:
        ValueError: a layer that cannot be trained privately, or inputs that the model cannot read.
    """
    rows = min(rows, expected_batch_size)
    sides = choose_sides(model, kfac, rows=rows, cache=cache)
    chosen = replace(kfac, ranks={side.name: side.rank for side in sides})
    costs = measure_costs(model, chosen, rows=rows, cache=cache)
    step = costs.chosen * expected_batch_size / rows
    return MeasuredStructure(
        sides=sides,
        norm_methods=costs.norm_methods,
        every=max(kfac.every, replace(costs, chosen=step).every),
    )


def choose_sides(
    model: nn.Module, kfac: KFAC, *, rows: int, cache: Path | Timings | None = None
) -> tuple[SideChoice, ...]:
    """Choose between all and few eigenpairs for factors at least twice as wide as `max_rank`.

    Arguments are those of `measure_structure`.
    """
    rank = kfac.max_rank
    if rank is None:
        return ()
    layers = find_layers(model)
    timings = Timings.load(cache)
    probe_size = min(kfac.probe_size, _PROBE)
    settings = replace(kfac, probe_size=probe_size, later_probe_size=None, ranks={})
    inputs = probe_inputs(model, kfac, rows)
    choices: list[SideChoice] = []
    with preserve_model(model):
        built = _build(model, layers, settings)
        widths: dict[str, dict[str, int]] = defaultdict(dict)
        for row in built.report:
            is_wide = 2 * rank <= row["dim"] <= kfac.max_factor_size
            if is_wide and row["kind"] in ("dense", "lowrank"):
                widths[row["layer"]][row["side"]] = row["dim"]
        blocks, _ = capture_blocks(model, layers, inputs, rows)
        for name, block in blocks.items():
            if block.matrix is not None:
                choices += _choose_layer_sides(name, block.matrix, widths[name], rank, timings)
    timings.save()
    return tuple(choices)


def _choose_layer_sides(
    name: str, block: Outer | ConvBlock, widths: Mapping[str, int], rank: int, timings: Timings
) -> list[SideChoice]:
    """Choose one factor after the other; the factors that are not chosen yet are full matrices."""
    like = block.b
    dense = {side: _dense(width, like) for side, width in widths.items()}
    metric = Kronecker(**dense)
    choices = []
    for side, width in widths.items():
        low_rank = replace(metric, **{side: _low_rank(width, rank, like)})
        dense_seconds = min(norm_seconds(block, metric, timings).values())
        low_rank_seconds = min(norm_seconds(block, low_rank, timings).values())
        is_faster = low_rank_seconds < WORTH * dense_seconds
        if is_faster:
            metric = low_rank
        choice = SideChoice(
            name=side_name(name, side),
            width=width,
            rank=rank if is_faster else 0,
            dense_seconds=dense_seconds,
            low_rank_seconds=low_rank_seconds,
        )
        choices.append(choice)
    return choices


def _dense(width: int, like: Tensor) -> Side:
    return Dense(torch.eye(width, dtype=like.dtype, device=like.device), 1.0)


def _low_rank(width: int, rank: int, like: Tensor) -> Side:
    vectors = torch.eye(width, rank, dtype=like.dtype, device=like.device)
    return LowRank(vectors, like.new_full((rank,), 0.5), 1.0)
