"""What a step costs on this machine, layer by layer, measured on public inputs: the cost model behind `dpkfc doctor --cost`.

Nothing is looked at but the probe, so what is chosen here may decide how a private run computes: the norm method of a layer
(`PrivacyConfig.norm_methods`), low-rank sides, and how often the metric is rebuilt. The first two change speed and rounding,
never the guarantee; the last is a setting like any other. Times of layers are kept in a file, so that a machine measures a
shape once.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.curvature.damping import side_name
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.probe_loss import logits_of
from dpkfc.curvature.probe_pass import public_generator, undisturbed
from dpkfc.curvature.probes import call, placed
from dpkfc.data.loading import Part, layout
from dpkfc.gradients.clipped_sum import capture, clipped_sum
from dpkfc.gradients.clipping import Clip, full_precision
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import AnyBlock, ConvBlock, Outer
from dpkfc.linalg.metric import Dense, Entry, Kronecker, LowRank, Side
from dpkfc.linalg.norms import METHODS, choice_for, per_example_norms

_REPEATS = 3
WORTH = 0.9  # another method must take less than this share of the time, or the rule stays
_SHARE = 0.05  # of the time that refreshes may take
_SMALLER = 8  # times fewer examples in a probe that is averaged over refreshes, but not fewer than 16
_GRADIENT_BYTES = 1 << 28  # of one layer's gradients formed at once, beyond which materialising is not tried


@dataclass(frozen=True, kw_only=True)
class SideCost:
    """Seconds to map a batch's rows by one side: as it is, and by a full matrix of its width."""

    side: str
    kind: str
    width: int
    seconds: float
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One matrix layer with several positions.

    Attributes:
        name: of the layer.
        positions, d_in, d_out: its shape on the probe.
        by_rule: the method the rule by widths takes.
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
        """The fastest method, or that of the rule where none is clearly faster."""
        fastest = min(self.seconds, key=lambda method: self.seconds[method])
        faster = self.seconds[fastest] < WORTH * self.seconds[self.by_rule]
        return fastest if faster else self.by_rule


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A step of `rows` examples, in seconds.

    Attributes:
        rows: examples.
        threads: that torch uses.
        plain: forward and backward pass without privacy.
        dp_sgd: the clipped sum without a metric.
        preconditioned: the clipped sum in the metric.
        chosen: the same with the norm methods that are recommended.
        refresh: building the metric.
        averaged: probe examples, share of the past and seconds of a refresh that averages a smaller probe over refreshes, so that
            about as many examples stand behind each factor.
        layers: where the method is a choice.
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
        """The shortest interval of refreshes, in steps, that keeps them within a twentieth of the time."""
        return self.interval(self.refresh)

    def interval(self, refresh: float) -> int:
        """The same for a refresh of so many seconds."""
        return max(1, int(np.ceil(refresh / (_SHARE / (1 - _SHARE) * max(self.chosen, 1e-9)))))

    @property
    def norm_methods(self) -> dict[str, str]:
        """Layers for which another method than that of the rule is clearly faster, for `PrivacyConfig(norm_methods=...)`."""
        return {layer.name: layer.chosen for layer in self.layers if layer.chosen != layer.by_rule}


def default_cache() -> Path:
    """The file of measured times: `$DPKFC_CACHE/costs.json`, or below the user's cache folder."""
    own = os.environ.get("DPKFC_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpkfc"
    return folder / "costs.json"


@dataclass(frozen=True)
class Timings:
    """Measured seconds by what was timed, kept in a file; a damaged or unwritable file is measured anew and left alone.

    Attributes:
        path: the file, None to keep nothing.
        held: of this machine, its instructions, thread count and version of torch.
        doubted: those of them that are to be measured once more, and written over the old ones.
    """

    path: Path | None = None
    held: dict[str, float] = field(default_factory=dict)
    doubted: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path | Timings | None, *, again: bool = False) -> Timings:
        """The times of this machine: those given, or from a file; `again`: to be measured anew wherever they are asked for."""
        if isinstance(path, Timings):
            return path
        held = {k: v for k, v in _read(path).get(_machine(), {}).items() if isinstance(v, int | float) and v > 0}
        return cls(path, held, set(held) if again else set())

    def of(self, key: str, work: Callable[[], Any]) -> float:
        """Seconds of `work`, measured unless they are known and not doubted."""
        if key not in self.held or key in self.doubted:
            self.held[key] = seconds_of(work)
            self.doubted.discard(key)
        return self.held[key]

    def save(self) -> None:
        """Write what is known beside what other machines have measured."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps({**_read(self.path), _machine(): dict(sorted(self.held.items()))}, indent=1))
            part.replace(self.path)
        except OSError:
            return  # a cache that cannot be written costs time, nothing else


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def _machine() -> str:
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{platform.node()} {processor} {threads}, torch {torch.__version__}"


def seconds_of(work: Callable[[], Any]) -> float:
    """Median wall time of a few runs after a first one that does not count; an accelerator has finished its part."""
    taken = []
    for _ in range(1 + _REPEATS):
        _finished()
        started = time.perf_counter()
        work()
        _finished()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _finished() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


def costs_of(model: nn.Module, kfac: KFAC, *, rows: int = 32, cache: Path | Timings | None = None) -> Costs:
    """Measure a model on probe inputs; it is left as it is.

    Args:
        model: any module that can be trained privately.
        kfac: whose probe, factors and low-rank sides are measured.
        rows: examples of the batch that is timed.
        cache: file of the times of layers, or these times; None to measure all anew and keep nothing.

    Raises:
        ValueError: a layer that cannot be trained privately, inputs that the model cannot read, or no rows.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    layers, timings = find_layers(model), Timings.load(cache)
    rules = {layer.name: layer.rule for layer in layers}
    inputs = placed(kfac.probe.sample(rows, public_generator(kfac.seed, 0))[0], model)

    few = min(kfac.probe_size, max(16, kfac.probe_size // _SMALLER))

    def build(examples: int = kfac.later_probe_size or kfac.probe_size) -> Any:
        of = replace(kfac, probe_size=examples, later_probe_size=None)
        return of.build(model, lambda m, loss: capture(m, layers, loss), 0, rules=rules)

    with undisturbed(model):
        metric, refresh = build().metric, seconds_of(build)
        small = seconds_of(lambda: build(few))
        blocks = blocks_of_batch(model, layers, inputs, rows)
        found = [_layer_cost(name, block, metric.get(name), timings) for name, block in blocks.items()]
        timings.save()
        chosen = {layer.name: layer.chosen for layer in found if layer and layer.chosen != layer.by_rule}
        batch = (inputs, layout(np.arange(rows))[0])
        steps = [
            _step_seconds(model, layers, batch, entries, methods)
            for entries, methods in (({}, {}), (metric, {}), *([(metric, chosen)] if chosen else []))
        ]
        plain = seconds_of(lambda: _plain(model, inputs))
    return Costs(
        rows=rows, threads=torch.get_num_threads(), plain=plain, dp_sgd=steps[0], preconditioned=steps[1], chosen=steps[-1],
        refresh=refresh, averaged=(few, round(1 - few / kfac.probe_size, 3), small),
        layers=tuple(layer for layer in found if layer is not None),
    )  # fmt: skip


def _loss(output: Any) -> Tensor:
    """A smooth number an example, whose gradient has the shapes of any other."""
    return logits_of(output).flatten(1).float().logsumexp(1)


def _plain(model: nn.Module, inputs: Any) -> None:
    with torch.enable_grad():
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(_loss(call(model, inputs)).sum(), parameters, allow_unused=True)


def _step_seconds(
    model: nn.Module, layers: Sequence[Layer], batch: tuple[Any, Part], metric: Mapping[str, Entry], methods: Mapping[str, str]
) -> float:
    def step() -> None:
        clipped_sum(
            model, layers, metric, Clip(1.0, methods=methods), loss_fn=lambda m, inputs: _loss(call(m, inputs)),
            micro_batches=[batch], one_record=lambda index: batch[0][index : index + 1],
        )  # fmt: skip

    return seconds_of(step)


def blocks_of_batch(model: nn.Module, layers: Sequence[Layer], inputs: Any, rows: int) -> dict[str, AnyBlock]:
    """What the layers have read and how their outputs were differentiated, for inputs `[rows, ...]`."""
    tape = Tape(model, layers, lenient=True)
    with torch.enable_grad(), tape:
        losses = _loss(call(model, inputs))
    calls = tape.backward(losses)
    return {layer.name: blocks_of(layer, calls[layer.name], rows) for layer in layers if layer.name in calls}


def _layer_cost(name: str, block: AnyBlock, entry: Any, timings: Timings) -> LayerCost | None:
    """None where there is nothing to choose: one position, an embedding, a gradient that is formed anyway."""
    metric = entry if isinstance(entry, Kronecker) else Kronecker()
    if not isinstance(block, Outer | ConvBlock) or (entry is not None and not isinstance(entry, Kronecker)):
        return None
    rule = choice_for(block, metric).method
    if rule == "rank-one":
        return None
    positions, d_in, d_out = block.dimensions
    seconds = norm_seconds(block, metric, timings)
    outer = block.outer()
    sides = [_side_cost(*of, timings) for of in (("A", metric.input, outer.explicit().a), ("G", metric.output, outer.b))]
    return LayerCost(
        name=name, positions=positions, d_in=d_in, d_out=d_out, by_rule=rule, seconds=seconds,
        sides=tuple(side for side in sides if side is not None),
    )  # fmt: skip


def norm_seconds(block: Outer | ConvBlock, metric: Kronecker, timings: Timings) -> dict[str, float]:
    """Seconds of the norms of one layer, by every method that fits into memory; by its own where it has one position."""
    (positions, d_in, d_out), rule = block.dimensions, choice_for(block, metric).method
    shape = f"{type(block).__name__} {block.batch_size}x{positions} {d_in}>{d_out} {_kind(metric.input)},{_kind(metric.output)}"
    shape += _where(block.b) + _patches(block)
    too_large = block.b.element_size() * d_in * d_out * block.batch_size * block.groups > _GRADIENT_BYTES
    tried = [rule] if rule not in METHODS else [m for m in METHODS if m == rule or m != "materialised" or not too_large]

    def norms(method: str) -> None:
        with full_precision():
            per_example_norms(block, metric, method if method in METHODS else None)

    return {method: timings.of(f"{method} {shape}", partial(norms, method)) for method in tried}


def _kind(side: Side) -> str:
    return f"lowrank{side.vectors.shape[1]}" if isinstance(side, LowRank) else type(side).__name__.lower()


def _patches(block: Outer | ConvBlock) -> str:
    """What of a convolution its widths do not say."""
    told = f" groups {block.groups}" if block.groups > 1 else ""
    return f"{told} {block.kernel}/{block.stride}/{block.dilation}" if isinstance(block, ConvBlock) else told


def _where(x: Tensor) -> str:
    """What else decides the time; nothing for float32 on a CPU."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu"
    return "" if plain else f" {str(x.dtype).removeprefix('torch.')} {x.device.type}"


def _side_cost(side: str, entry: Side, x: Tensor, timings: Timings) -> SideCost | None:
    if not isinstance(entry, LowRank | Dense):
        return None
    width, rows = x.shape[-1], x.shape[:-1].numel()
    full = torch.eye(width, dtype=x.dtype, device=x.device)
    return SideCost(
        side=side, kind=_kind(entry), width=width,
        seconds=timings.of(f"map {rows}x{width} {_kind(entry)}{_where(x)}", lambda: entry.apply(x)),
        dense_seconds=timings.of(f"map {rows}x{width} dense{_where(x)}", lambda: x @ full),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Which sides of a metric keep few eigenpairs, by what that saves on this machine: `structure =
# "auto"`.
#
# A full matrix is the rule here, and a side keeps its first eigenpairs alone where the norms of its
# layer are clearly faster with them. All is measured on the probe, so what is chosen may decide
# what a private run computes. It is part of the plan.

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
