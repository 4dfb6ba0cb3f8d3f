"""DP-NGD: natural gradients from public curvature, with a scheduled floor on the eigenvalues.

    every `every` steps   F = A ⊗ G of every layer on public data, F = Q Λ Qᵀ
    every step            Λ̃ = max(Λ, λ_t), λ_t by Eq. 18
    z_i = F̃^(−1/2) g_i,   clip_C(z_i),   + noise,   step F̃^(−1/2) z̄

with `order="split"` and readout "natural". F reads no private data, so the privacy cost equals
DP-SGD's. λ_t is absolute: losses have the scale of one example, and nothing rescales the metric.
Parameters without a Kronecker product (norm layers, embeddings) have the diagonal of their Fisher
information under the same floor. All parameters are then in the same units.

The paper leaves these choices open. Labels of the probe are drawn from the model, which gives the
Fisher information itself. A layer with T positions has A = 1/n Σ a aᵀ and G = 1/(nT) Σ b bᵀ, so
that tr(A ⊗ G) is E‖g‖². The clamp acts on the products Λ, not on the factors. Every refresh
measures F anew, on single views of the public data.

Source: DP-NGD, Algorithms 1 and 2, Eq. 16 to 18.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpkfc._checks import check_in_range, check_positive
from dpkfc.curvature.base import PreconditionerState, ProbePreconditioner
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factor_cache import FactorCache
from dpkfc.curvature.factors import DiagonalFactor, Factor, IsotropicFactor
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator, LayerFactors, Rules
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import Capture, ProbeLoss, ProbeSpec
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.refresh import gather_layers, measure
from dpkfc.curvature.refresh_group import RefreshGroup, finish_on_owners
from dpkfc.curvature.report import FACTOR_LETTERS, report_row
from dpkfc.linalg.blocks import Block
from dpkfc.linalg.metric import (
    Eigenbasis,
    Elementwise,
    Entry,
    Kronecker,
    Metric,
    NamedTensors,
    Tensors,
)

# --------------------------------------------------------------------------------------------------
# Second moments of gradients, entry by entry, for diagonal metrics.
#
#     example    v = 1/N Σ_n g_n²                     diagonal of the Fisher information
#     batch      v = 1/M Σ_m (1/B Σ_(n in m) g_n)²    squares of mini-batch means, as in RMSProp
#
# Moments of a matrix-shaped layer have the layout of its metric: `[d_out, d_in]` with the bias in
# the last column, averaged over the groups of a convolution, `[d, V]` for an embedding and `[V, d]`
# for a tied table.

PER = ("example", "batch")
_ROLE = "weight"  # role of a matrix-shaped layer


@dataclass(frozen=True)
class Sums:
    """Sums of gradients of one layer, or of their squares; both add up over micro-batches.

    Attributes:
        kind: outer, lookup, tied or elementwise, as in `LayerFactors`.
        values: float64. Role to `[groups, d_out, d_in]`, `[V, d]` of a table, or the shape of the
            parameter; of moments in the layout above, only `weight` for matrix-shaped layers.
        count: gradients that were added or squared.
        dtype: of the layer's gradients.
    """

    kind: str
    values: Tensors
    count: int
    dtype: torch.dtype

    def __add__(self: _Added, other: _Added) -> _Added:
        """Return the sums of both."""
        values = {role: x + other.values[role] for role, x in self.values.items()}
        return replace(self, values=values, count=self.count + other.count)

    def squared(self, size: int) -> Moments:
        """Return the moments of one mini-batch: the square of its mean gradient.

        Args:
            size: examples of the mini-batch.

        Raises:
            ValueError: a gradient that is not finite.
        """
        squares = {role: (x / size).square() for role, x in self.values.items()}
        return _moments(self.kind, squares, 1, self.dtype)


_Added = TypeVar("_Added", bound=Sums)


@dataclass(frozen=True)
class Moments(Sums):
    """Sum of squares of one layer over `count` gradients."""

    @property
    def mean(self) -> NamedTensors:
        """v, float64."""
        return {role: x / self.count for role, x in self.values.items()}

    def entry(self, scale: Tensors) -> Eigenbasis | Elementwise:
        """Return the diagonal map with these factors, in the layout of `values`."""
        typed = {}
        for role, x in scale.items():
            factors = x.to(self.dtype)
            typed[role] = factors.contiguous()
        if self.kind == "elementwise":
            return Elementwise(typed)
        return Eigenbasis(typed[_ROLE])


def summed_gradients(block: Block) -> Sums:
    """Return the sum of one layer's gradients over the examples of a block."""
    with torch.no_grad():
        sums = block.explicit().sum_gradients()
    return Sums(block.kind, _by_role(sums), block.batch_size, _dtype(block))


def squared_gradients(block: Block) -> Moments:
    """Return the squares of every example's gradient, added over one micro-batch.

    Args:
        block: one layer's contribution, in the per-example scale.

    Raises:
        ValueError: a gradient that is not finite.
    """
    with torch.no_grad():
        squares = block.explicit().sum_squares()
    return _moments(block.kind, _by_role(squares), block.batch_size, _dtype(block))


def _moments(kind: str, squares: Tensors, count: int, dtype: torch.dtype) -> Moments:
    """Return moments in their layout from squares in the layout of the gradients."""
    if kind == "outer":
        mean = squares[_ROLE].mean(0)
        squares = {_ROLE: mean}
    elif kind == "lookup":
        squares = {_ROLE: squares[_ROLE].T}
    for x in squares.values():
        if not torch.isfinite(x).all():
            raise ValueError("NaN or infinity in the layer's gradients on the probe")
    return Moments(kind, squares, count, dtype)


def _by_role(gradients: Tensor | NamedTensors) -> NamedTensors:
    if isinstance(gradients, dict):
        return gradients
    return {_ROLE: gradients}


def _dtype(block: Block) -> torch.dtype:
    return torch.promote_types(block.like.dtype, torch.float32)


# --------------------------------------------------------------------------------------------------
# The Fisher information of every layer by eigenvalues of its product, to which a floor applies.
#
# A matrix-shaped layer has F = A ⊗ G = (Q_A ⊗ Q_G)(λ_A ⊗ λ_G)(Q_A ⊗ Q_G)ᵀ with both bases complete,
# so that every product λ_G,o λ_A,i has a direction. Other parameters (norm layers, embeddings, tied
# tables, raw parameters) have the diagonal of their Fisher information. Both have the scale of one
# example: tr(F) is E‖g‖² if inputs and output gradients were independent.


@dataclass(frozen=True)
class LayerFisher:
    """The Fisher information of one layer.

    Attributes:
        entry: the bases, with scales of one; a floor and a root give the scales.
        spectrum: `A` and `G`, eigenvalues in the order of the bases, or role to the entries of a
            diagonal; float64.
        note: what became of a side that was too wide.
    """

    entry: Eigenbasis | Elementwise
    spectrum: Tensors
    note: str = ""


def measure_fisher(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    max_factor_size: int,
    team: RefreshGroup | None,
) -> tuple[dict[str, LayerFisher], str]:
    """Run the probe once; of several processes, each runs its examples and decomposes its layers.

    Args:
        model: should be inside `preserve_model`.
        capture: maps (model, loss) to layer name and block.
        spec: what to run.
        max_factor_size: wider sides keep the diagonal of their factor.
        team: the processes that share the refresh, None for this one alone.

    Returns:
        The layers by name, and a note on the probe's labels.

    Raises:
        ValueError: a layer's contribution on the probe is not finite, or of a kind without
            curvature.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    options = FactorOptions(max_factor_size=max_factor_size)
    statistics = measure(model, capture, spec, options, team, start=_start_layer)
    for name, kind in statistics.unknown.items():
        raise ValueError(f"layer '{name}': no curvature is known for a {kind}; freeze it")
    note = statistics.note
    sums = gather_layers(statistics.layers, model, team)
    # Otherwise the last micro-batch stays in memory.
    del statistics

    def finish() -> dict[str, LayerFisher]:
        return {name: make_fisher(layer.result()) for name, layer in sums.items()}

    return finish_on_owners(finish, model, team), note


class MomentAccumulator:
    """Squares of the gradients of one layer from blocks that arrive in pieces."""

    def __init__(self, total: Moments | None = None) -> None:
        self._total = total

    def add(self, block: Block) -> None:
        """Add one probe micro-batch; raises as `squared_gradients`."""
        self.merge(MomentAccumulator(squared_gradients(block)))

    def merge(self, other: MomentAccumulator) -> None:
        """Add the sums of another accumulator of the layer."""
        new = other.result()
        self._total = new if self._total is None else self._total + new

    def detached_copy(self, shared: FactorCache | None = None) -> MomentAccumulator:
        """Return a copy; there is nothing to share between layers."""
        return MomentAccumulator(self._total)

    def cost(self, parts: int) -> float:
        """Return the cost of finishing the layer, which is negligible."""
        return 1.0

    def result(self) -> Moments:
        """Return the moments."""
        assert self._total is not None
        return self._total


def _start_layer(block: Block, *options: Any) -> LayerAccumulator | MomentAccumulator:
    """Return empty sums for a layer: of factors if its curvature is a Kronecker product."""
    if block.kind == "outer":
        return LayerAccumulator(block, *options)
    return MomentAccumulator()


def make_fisher(layer: LayerFactors | Moments) -> LayerFisher:
    """Return the Fisher information of a layer from its factors, or from its moments."""
    if isinstance(layer, Moments):
        return _diagonal_fisher(layer)
    input_basis, input_values = _complete_basis(layer.sides["input"], layer)
    output_basis, output_values = _complete_basis(layer.sides["output"], layer)
    size = (len(output_values), len(input_values))
    ones = torch.ones(size, dtype=layer.dtype, device=layer.device)
    entry = Eigenbasis(ones, input_basis, output_basis)
    notes = [f"{side}: {text}" for side, text in layer.notes.items()]
    note = "; ".join(notes)
    spectrum = {"A": input_values, "G": output_values}
    return LayerFisher(entry, spectrum, note)


def _diagonal_fisher(moments: Moments) -> LayerFisher:
    ones = {}
    spectrum = {}
    for role, x in moments.mean.items():
        ones[role] = torch.ones_like(x)
        flat = x.flatten()
        spectrum[role] = flat.cpu()
    entry = moments.entry(ones)
    return LayerFisher(entry, spectrum)


def _complete_basis(factor: Factor, layer: LayerFactors) -> tuple[Tensor | None, Tensor]:
    """Return an orthonormal basis `[d, d]` and its eigenvalues `[d]`; None for the coordinates."""
    match factor:
        case DiagonalFactor():
            return None, factor.values.cpu()
        case IsotropicFactor():
            values = factor.values
            return None, values.repeat(factor.dim)
        case Eigen():
            basis = factor.vectors
            values = torch.zeros(factor.dim, dtype=torch.float64)
            known = basis.shape[1]
            values[:known] = factor.values
            if known < factor.dim:
                basis, _ = torch.linalg.qr(basis.double(), mode="complete")
                basis = basis.contiguous()
            return basis.to(layer.device, layer.dtype), values


def eigenvalues(entry: Entry, spectrum: Tensors) -> NamedTensors:
    """Return a layer's Fisher eigenvalues in the layout of its scales, float64."""
    scales = entry.scales
    if "A" in spectrum:
        device = scales[_ROLE].device
        a = spectrum["A"].to(device)
        g = spectrum["G"].to(device)
        return {_ROLE: torch.outer(g, a)}
    values = {}
    for role, x in scales.items():
        own = spectrum[role].to(x.device)
        values[role] = own.view(x.shape)
    return values


def clamp_eigenvalues(
    entry: Eigenbasis | Elementwise, spectrum: Tensors, floor: float, exponent: float
) -> Eigenbasis | Elementwise:
    """Return the map max(F, floor · I)^(−exponent), with each eigenvalue of the product clamped.

    Args:
        entry: with the bases; its scales are replaced.
        spectrum: as `LayerFisher.spectrum`.
        floor: λ, positive.
        exponent: 1/2 whitens, 1 gives the natural gradient.
    """
    scales = {}
    for role, values in eigenvalues(entry, spectrum).items():
        clamped = values.clamp(min=floor)
        roots = clamped.pow(-exponent)
        scales[role] = roots.to(entry.scales[role])
    return entry.replace_scales(scales)


def condition(values: Tensors, floor: float = 0.0) -> float:
    """Return largest ÷ smallest eigenvalue with a floor; infinite if the smallest is zero."""
    smallest = math.inf
    largest = floor
    for x in values.values():
        smallest = min(smallest, float(x.min()))
        largest = max(largest, float(x.max()))
    smallest = max(floor, smallest)
    if not smallest > 0:
        return math.inf
    return largest / smallest


# --------------------------------------------------------------------------------------------------

_READOUTS = {"split": ("natural", "whitened"), "after": ("whitened",), "before": ("inverse",)}
_LEAST = 1e-30  # smaller eigenvalues count as zero


@dataclass(frozen=True)
class PostNoiseWhitening(Kronecker):
    """The identity for the clip; `readout="inverse"` applies `back` after the noise."""

    back: Entry = field(kw_only=True)

    def inverse(self) -> Any:
        """Return `back`."""
        return self.back


@dataclass(frozen=True, kw_only=True)
class NGD(ProbePreconditioner):
    """How DP-NGD measures and clamps curvature. Use it with `PrivacyConfig(readout="natural")`.

    Attributes:
        probe: where inputs come from; the paper takes 500 public images, `PublicData(...)`.
        lambda_safe: λ_safe, the floor at the first and the last step; see `matched`.
        lambda_base: λ_base, the floor between them; None takes min(1e-4, 0.1 λ_safe). λ_safe gives
            a constant floor.
        steps: T, the length of the schedule; at most the steps of the plan.
        warm: fraction of T in which the floor sinks from λ_safe to λ_base.
        power: p, how late it rises again.
        every: steps between refreshes of F.
        labels: `model` draws them from the model's predictive distribution, `uniform` at random,
            `given` takes the probe's.
        likelihood, loss: as in `KFAC`.
        order: `split` clips F̃^(−1/2) g. Readout "natural" is DP-NGD; "whitened" does not map the
            step again. The paper's ablations: `after` clips F̃⁻¹ g, with readout "whitened";
            `before` clips g itself and maps by F̃⁻¹ after the noise, with readout "inverse".
        probe_size: examples a refresh; None takes all that the probe holds (256 of an endless one).
        chunk: probe examples a forward pass.
        max_factor_size: wider sides keep the diagonal of their factor.
        seed: of the probe's own random stream.
    """

    probe: Probe
    lambda_safe: float
    steps: int
    lambda_base: float | None = None
    warm: float = 0.1
    power: float = 10.0
    every: int = 8
    labels: str = "model"
    likelihood: str = "categorical"
    loss: ProbeLoss | None = None
    order: str = "split"
    probe_size: int | None = None
    chunk: int = 64
    max_factor_size: int = 4096
    seed: int = 0

    counts = ("steps", "every", "chunk", "max_factor_size")
    takes_team = True

    def __post_init__(self) -> None:
        self._check(order=tuple(_READOUTS))
        check_positive("lambda_safe", self.lambda_safe)
        if not 0 < self.base <= self.lambda_safe:
            raise ValueError(
                f"lambda_base must lie in (0, lambda_safe = {self.lambda_safe}], got "
                f"{self.lambda_base}"
            )
        check_in_range("warm", self.warm, "[0, 1)")
        check_positive("power", self.power)

    @classmethod
    def matched(
        cls, *, eta: float, clip: float, eta_sgd: float, clip_sgd: float, **settings: Any
    ) -> NGD:
        """Return settings whose largest step in parameter space equals a tuned DP-SGD's.

            λ_safe = (η C / (η_sgd C_sgd))²

        Args:
            eta: learning rate η of the run.
            clip: its `max_grad_norm`.
            eta_sgd: learning rate of DP-SGD on the same task and model.
            clip_sgd: its `max_grad_norm`.
            settings: of `NGD`.

        Source: DP-NGD, Eq. 16. It compares upper bounds: a heuristic, not a guarantee.

        Raises:
            ValueError: a number that is not positive and finite.
        """
        numbers = {"eta": eta, "clip": clip, "eta_sgd": eta_sgd, "clip_sgd": clip_sgd}
        for name, value in numbers.items():
            check_positive(name, value)
        step = eta * clip
        ratio = step / (eta_sgd * clip_sgd)
        return cls(lambda_safe=ratio**2, **settings)

    @property
    def base(self) -> float:
        """λ_base in force."""
        if self.lambda_base is None:
            return min(1e-4, 0.1 * self.lambda_safe)
        return self.lambda_base

    @property
    def exponent(self) -> float:
        """Power of F̃⁻¹ in one application of the map."""
        if self.order == "split":
            return 0.5
        return 1.0

    def floor(self, step: int) -> float:
        """Return λ_t before a step (from 0); λ_safe from step T on (Eq. 18)."""
        height = self.lambda_safe - self.base
        warm = self.warm * self.steps
        if step < warm:
            return self.lambda_safe - height * step / warm
        progress = (step - warm) / (self.steps - warm)
        progress = min(1.0, progress)
        return self.base + height * progress**self.power

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        name = "ngd"
        if self.order != "split":
            name = f"ngd-{self.order}"
        return self._describe(name, lambda_base=self.base)

    def check_plan(self, steps: int, readout: str) -> None:
        """Refuse a plan that does not fit this schedule.

        Raises:
            ValueError: the schedule is longer than the run, or `order` needs another read-out.
        """
        readouts = _READOUTS[self.order]
        wanted = " or ".join(map(repr, readouts))
        if self.steps > steps:
            raise ValueError(
                f"NGD(steps={self.steps}) is longer than the {steps} steps of the plan, so the "
                f"floor would not come back to lambda_safe; use steps={steps}"
            )
        if readout not in readouts:
            raise ValueError(
                f"NGD(order={self.order!r}) needs PrivacyConfig(readout={wanted}), got {readout!r}"
            )

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Rules | None = None,
        team: RefreshGroup | None = None,
    ) -> PreconditionerState:
        """Measure F on the probe at the model's present parameters; arguments as in `KFAC.build`.

        Returns:
            The bases, the eigenvalues and the metric of this step; `metric_at` gives the metric of
            every step until the next refresh.

        Raises:
            ValueError: what the model gives on the probe is not finite, or the probe does not reach
                a layer.
        """
        with preserve_model(model), torch.no_grad():
            spec = self.probe_spec(step)
            layers, note = measure_fisher(model, capture, spec, self.max_factor_size, team)
        unreached = [name for name in rules or {} if name not in layers]
        if unreached:
            raise ValueError(
                f"the probe does not reach these layers: {', '.join(unreached)}. DP-NGD's scale is "
                "absolute, so they would be in other units; freeze them or use another probe"
            )
        floor = self.floor(step)
        metric = {}
        report = []
        spectra = {}
        for name, layer in layers.items():
            metric[name] = clamp_eigenvalues(layer.entry, layer.spectrum, floor, self.exponent)
            report += _report(name, layer, floor)
            spectra[name] = layer.spectrum
        return PreconditionerState(
            metric=metric,
            step=step,
            report=tuple(report),
            spectra=spectra,
            note=note,
        )

    def metric_at(self, state: PreconditionerState, step: int) -> Metric:
        """Return the metric of a step: the eigenvalues of the state under this step's floor."""
        floor = self.floor(step)
        metric = {}
        bases: Mapping[str, Any] = state.metric
        for name, entry in bases.items():
            clamped = clamp_eigenvalues(entry, state.spectra[name], floor, self.exponent)
            metric[name] = clamped.compact()
            if self.order == "before":
                metric[name] = PostNoiseWhitening(back=metric[name])
        return metric


def _report(name: str, layer: LayerFisher, floor: float) -> list[dict[str, Any]]:
    """Return one row a side, with the condition number of the layer before and after the clamp."""
    values = eigenvalues(layer.entry, layer.spectrum)
    low = 0
    count = 0
    for x in values.values():
        is_low = x <= floor
        low += int(is_low.sum())
        count += x.numel()
    note = f"{low / count:.0%} of the eigenvalues at the floor {floor:.3g}"
    if layer.note:
        note = f"{layer.note}; {note}"
    conditions = (condition(values), condition(values, floor))
    sides = {letter: side for side, letter in FACTOR_LETTERS.items()}
    rows = []
    for key, spectrum in layer.spectrum.items():
        row = report_row(
            name,
            side=sides.get(key, key),
            kind="eigenbasis" if key in sides else "diagonal",
            dim=spectrum.numel(),
            rank=int((spectrum > _LEAST).sum()),
            trace=float(spectrum.sum()),
            conditions=conditions,
            note=note,
        )
        rows.append(row)
    return rows
