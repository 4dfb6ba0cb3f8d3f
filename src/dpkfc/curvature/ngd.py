"""DP-NGD: natural gradients from public curvature, with a scheduled floor on the eigenvalues.

    every `every` steps   F = A ⊗ G of every layer on public data, F = Q Λ Qᵀ
    every step            Λ̃ = max(Λ, λ_t), λ_t by Eq. 18
    z_i = F̃^(−1/2) g_i,   clip_C(z_i),   + noise,   step F̃^(−1/2) z̄

with `order="split"` and readout "natural". F reads no private data, so the cost is that of DP-SGD.
λ_t is absolute: losses have the scale of one example, and nothing rescales the metric. Parameters
without a Kronecker product (norm layers, embeddings) have the diagonal of their Fisher information
under the same floor. All parameters are then in the same units.

The paper leaves these choices open. Labels of the probe are drawn from the model, which gives the
Fisher information itself. A layer with T positions has A = 1/n Σ a aᵀ and G = 1/(nT) Σ b bᵀ, so
that tr(A ⊗ G) is E‖g‖². The clamp acts on the products Λ, not on the factors. Every refresh
measures F anew, on single views of the public data.

Source: DP-NGD, Algorithms 1 and 2, Eq. 16 to 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import (
    PreconditionerState,
    ProbePreconditioner,
    check_choices,
    check_positive,
    check_probe,
)
from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor, IsotropicFactor
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator, RowSubsampler, is_known
from dpkfc.curvature.probe_loss import LABELS, LIKELIHOODS
from dpkfc.curvature.probe_pass import (
    Capture,
    ProbeSpec,
    RefreshGroup,
    check_same_probe,
    finish_on_owners,
    preserve_model,
    probe_digest,
    public_generator,
    rows_of_process,
    run_probe,
)
from dpkfc.curvature.probes import Inputs, Probe, device_of
from dpkfc.curvature.refresh import sum_parts
from dpkfc.linalg.blocks import Block, Lookup, Outer, PerExample, Tied, write_out_patches
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry, Identity, Kronecker, Metric

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
_CHUNK_ELEMENTS = 1 << 22
_ROLE = "weight"  # role of a matrix-shaped layer
_KINDS: dict[type, str] = {
    PerExample: "elementwise",
    Lookup: "lookup",
    Tied: "tied",
    Outer: "outer",
}


@dataclass(frozen=True)
class Moments:
    """Sum of squares of one layer over `count` gradients; both add up over micro-batches.

    Attributes:
        kind: outer, lookup, tied or elementwise, as in `LayerFactors`.
        squares: float64, role to the layout above (only `weight` for matrix-shaped layers).
        count: gradients that were squared.
        dtype: of the layer's gradients.
        groups: of a convolution.
    """

    kind: str
    squares: Mapping[str, Tensor]
    count: int
    dtype: torch.dtype
    groups: int = 1

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both."""
        squares = {role: x + other.squares[role] for role, x in self.squares.items()}
        return replace(self, squares=squares, count=self.count + other.count)

    @property
    def mean(self) -> dict[str, Tensor]:
        """v, float64."""
        return {role: x / self.count for role, x in self.squares.items()}

    def entry(self, scale: Mapping[str, Tensor]) -> Entry:
        """Return the diagonal map with these factors, in the layout of `squares`."""
        typed = {role: x.to(self.dtype).contiguous() for role, x in scale.items()}
        if self.kind == "elementwise":
            return Elementwise(typed)
        return Eigenbasis(typed[_ROLE])

    @property
    def shapes(self) -> dict[str, Any]:
        """Kind and sizes of the sides, for `PreconditionerState.check`."""
        if self.kind == "elementwise":
            return {"kind": self.kind, **{role: list(x.shape) for role, x in self.squares.items()}}
        d_out, d_in = self.squares[_ROLE].shape
        return {"kind": self.kind, "input": [d_in], "output": [d_out]}


@dataclass(frozen=True)
class Sums:
    """Sum of gradients of one layer over `count` examples; both add up over a mini-batch.

    Attributes:
        kind: as in `Moments`.
        sums: float64, role to `[groups, d_out, d_in]`, `[V, d]` of a table, or the shape of the
            parameter.
        count: examples.
        dtype: of the layer's gradients.
    """

    kind: str
    sums: Mapping[str, Tensor]
    count: int
    dtype: torch.dtype

    def __add__(self, other: Sums) -> Sums:
        """Return the sums of both."""
        sums = {role: x + other.sums[role] for role, x in self.sums.items()}
        return replace(self, sums=sums, count=self.count + other.count)

    def squared(self, size: int | None = None) -> Moments:
        """Return the moments of one mini-batch: the square of its mean gradient.

        Args:
            size: examples of the mini-batch, by default those that were added.

        Raises:
            ValueError: a gradient that is not finite.
        """
        squares = {role: (x / (size or self.count)).square() for role, x in self.sums.items()}
        groups = squares[_ROLE].shape[0] if self.kind == "outer" else 1
        if self.kind == "outer":
            squares = {_ROLE: squares[_ROLE].mean(0)}
        elif self.kind == "lookup":
            squares = {_ROLE: squares[_ROLE].T}
        _check_finite(squares)
        return Moments(self.kind, squares, 1, self.dtype, groups)


def summed_gradients(block: Block) -> Sums:
    """Return the sum of one layer's gradients over the examples of a block.

    Raises:
        TypeError: a block of another kind.
    """
    with torch.no_grad():
        match block:
            case PerExample():
                sums = {role: g.detach().double().sum(0) for role, g in block.grads.items()}
            case Outer():
                sums = {_ROLE: _outer_sum(block.explicit())}
            case Lookup():
                shape = (block.num_rows, block.b.shape[-1])
                zeros = block.b.new_zeros(shape, dtype=torch.float64)
                sums = {_ROLE: _add_rows(block, zeros)}
            case Tied():
                sums = {_ROLE: _add_rows(block.lookup, _outer_sum(block.outer)[0])}
            case _:
                raise _unknown_block(block)
    return Sums(_KINDS[type(block)], sums, block.batch_size, _dtype(block))


def squared_gradients(block: Block, per: str) -> Moments:
    """Return the moments of one micro-batch.

    Args:
        block: one layer's contribution, in the per-example scale.
        per: `example` squares every example's gradient, `batch` the mean over the micro-batch.

    Raises:
        ValueError: a gradient that is not finite.
        TypeError: a block of another kind.
    """
    if per == "batch":
        return summed_gradients(block).squared()
    with torch.no_grad():
        squares, groups = _squares(block)
    _check_finite(squares)
    return Moments(_KINDS[type(block)], squares, block.batch_size, _dtype(block), groups)


def _check_finite(squares: Mapping[str, Tensor]) -> None:
    if any(not bool(torch.isfinite(x).all()) for x in squares.values()):
        raise ValueError("NaN or infinity in the layer's gradients on the probe")


def _dtype(block: Block) -> torch.dtype:
    dtype = next(x for x in _tensors(block)).dtype
    return dtype if dtype == torch.float64 else torch.float32


def _tensors(block: Block) -> Iterator[Tensor]:
    match block:
        case PerExample():
            yield from block.grads.values()
        case Tied():
            yield block.outer.b
        case _:
            yield block.b


def _unknown_block(block: Any) -> TypeError:
    return TypeError(f"no second moments are known for a {type(block).__name__}")


def _squares(block: Block) -> tuple[dict[str, Tensor], int]:
    """Return role to Σ g² over examples, and the number of groups."""
    match block:
        case PerExample():
            squares = {role: g.detach().double().square().sum(0) for role, g in block.grads.items()}
            return squares, 1
        case Outer():
            return {_ROLE: _outer_squares(block.explicit()).mean(0)}, block.groups
        case Lookup():
            return {_ROLE: _lookup_squares(block).T}, 1
        case Tied():
            return {_ROLE: _tied_squares(block)}, 1
    raise _unknown_block(block)


def _split_groups(x: Tensor, groups: int) -> Tensor:
    """Return x `[n * groups, ...]` as float64 `[groups, n, ...]`."""
    return x.double().unflatten(0, (-1, groups)).transpose(0, 1)


def _outer_sum(block: Outer) -> Tensor:
    """Return Σ g over examples, `[groups, d_out, d_in]`."""
    a = _split_groups(block.a, block.groups).flatten(1, 2)
    b = _split_groups(block.b, block.groups).flatten(1, 2)
    return b.mT @ a


def _add_rows(block: Lookup, total: Tensor) -> Tensor:
    """Add the gradients of the rows that are read to `total` `[V, d]`, and return it."""
    return total.index_add_(0, block.ids.flatten(), block.b.double().flatten(0, 1))


def _outer_squares(block: Outer) -> Tensor:
    """Return Σ_n g_n², `[groups, d_out, d_in]`."""
    a = _split_groups(block.a, block.groups)
    b = _split_groups(block.b, block.groups)
    if block.a.shape[1] == 1:
        return b[:, :, 0].square().mT @ a[:, :, 0].square()
    total = b.new_zeros(block.groups, b.shape[-1], a.shape[-1])
    for rows in _chunks(block.batch_size, total.numel()):
        total += (b[:, rows].mT @ a[:, rows]).square().sum(1)
    return total


def _lookup_squares(block: Lookup) -> Tensor:
    """Return Σ_n g_n², `[V, d]`; rows that an example reads twice add up before the square."""
    v = block.num_rows
    rows = block.b.double().flatten(0, 1)
    total = block.b.new_zeros(v, block.b.shape[-1], dtype=torch.float64)
    offsets = torch.arange(block.batch_size, device=block.ids.device).unsqueeze(1) * v
    keys, inverse = torch.unique((block.ids + offsets).flatten(), return_inverse=True)
    sums = rows.new_zeros(len(keys), rows.shape[1]).index_add_(0, inverse, rows)
    return total.index_add_(0, keys % v, sums.square())


def _tied_squares(block: Tied) -> Tensor:
    """Return Σ_n g_n² of the sum of both uses, `[V, d]`."""
    lookup, outer = block.lookup, block.outer
    total = outer.b.new_zeros(lookup.num_rows, outer.a.shape[-1], dtype=torch.float64)
    for rows in _chunks(block.batch_size, total.numel()):
        some_lookup = replace(lookup, ids=lookup.ids[rows], b=lookup.b[rows].double())
        some_outer = replace(outer, a=outer.a[rows].double(), b=outer.b[rows].double())
        total += Tied(some_lookup, some_outer).per_example().square().sum(0)
    return total


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, math.ceil(_CHUNK_ELEMENTS / max(1, elements_each)))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


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
        shapes: kind and sizes of the sides, for `PreconditionerState.check`.
        note: what became of a side that was too wide.
    """

    entry: Eigenbasis | Elementwise
    spectrum: Mapping[str, Tensor]
    shapes: Mapping[str, Any]
    note: str = ""


def measure_fisher(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    max_factor_size: int,
    team: RefreshGroup | None = None,
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
    if team is None:
        parts, note, _ = _measure_own(model, capture, spec, max_factor_size)
        return _finish({name: [part] for name, part in parts.items()}), note
    parts, note, digest = team.run_on_all(
        lambda: _measure_own(model, capture, spec, max_factor_size, team)
    )
    answers = team.all_gather((digest, note))
    check_same_probe([digest for digest, _ in answers])
    layers = finish_on_owners(team, parts, _cost, _finish, device_of(model))
    return layers, next((note for _, note in answers if note), "")


_Part = LayerAccumulator | Moments


def _cost(part: _Part) -> float:
    """Return the cost of two complete bases; that of a diagonal is negligible."""
    return part.full_cost if isinstance(part, LayerAccumulator) else 1.0


def _measure_own(
    model: nn.Module,
    capture: Capture,
    spec: ProbeSpec,
    max_factor_size: int,
    team: RefreshGroup | None = None,
) -> tuple[dict[str, _Part], str, str]:
    """Return the sums of this process's examples, a note on labels, and the hash for a team."""
    options = FactorOptions(max_factor_size=max_factor_size)
    generator = public_generator(spec.seed, spec.step, "positions")
    subsampler = RowSubsampler(generator, spec.size, None)
    factors: dict[str, LayerAccumulator] = {}
    moments: dict[str, Moments] = {}
    note = digest = ""

    def take_digest(inputs: Inputs, labels: Tensor | None) -> None:
        nonlocal digest
        if team is not None:
            digest = probe_digest(inputs, labels)

    rows = rows_of_process(team, spec.size)
    for microbatch in run_probe(
        model, capture, spec, rows.start, stop=rows.stop, on_sample=take_digest
    ):
        subsampler.start(microbatch.rows, microbatch.mask)
        note = microbatch.note
        for name in microbatch.blocks:
            block = write_out_patches(microbatch.blocks[name])
            if not is_known(block):
                raise ValueError(
                    f"layer '{name}': no curvature is known for a {type(block).__name__}; freeze it"
                )
            try:
                if isinstance(block, Outer):
                    if name not in factors:
                        factors[name] = LayerAccumulator(block, options, None, subsampler)
                    factors[name].add(block)
                else:
                    new = squared_gradients(block, "example")
                    moments[name] = moments[name] + new if name in moments else new
            except ValueError as error:
                raise ValueError(f"layer '{name}': {error}") from error
            del block
        # Otherwise this micro-batch stays in memory next to the next one.
        del microbatch
    parts: dict[str, _Part] = {name: layer.detached_copy() for name, layer in factors.items()}
    return parts | moments, note, digest


def _finish(parts: Mapping[str, list[_Part]]) -> dict[str, LayerFisher]:
    """Return layers from the sums of every process, in the order of the processes."""
    factors: dict[str, list[LayerAccumulator]] = {}
    moments: dict[str, list[Moments]] = {}
    for name, layer_parts in parts.items():
        for part in layer_parts:
            if isinstance(part, LayerAccumulator):
                factors.setdefault(name, []).append(part)
            else:
                moments.setdefault(name, []).append(part)
    layers = {name: _product_fisher(layer) for name, layer in sum_parts(factors).items()}
    for name, layer_moments in moments.items():
        layers[name] = _diagonal_fisher(reduce(Moments.__add__, layer_moments))
    return layers


def _product_fisher(accumulator: LayerAccumulator) -> LayerFisher:
    layer = accumulator.result()
    input_basis, input_values = _complete_basis(layer.sides["input"], layer.dtype)
    output_basis, output_values = _complete_basis(layer.sides["output"], layer.dtype)
    ones = torch.ones(len(output_values), len(input_values), dtype=layer.dtype, device=layer.device)
    entry = Eigenbasis(
        ones,
        None if input_basis is None else input_basis.to(layer.device),
        None if output_basis is None else output_basis.to(layer.device),
    )
    shapes = {"kind": "outer", **{side: list(shape) for side, shape in layer.shapes.items()}}
    note = "; ".join(f"{side}: {text}" for side, text in layer.notes.items())
    return LayerFisher(entry, {"A": input_values, "G": output_values}, shapes, note)


def _diagonal_fisher(moments: Moments) -> LayerFisher:
    mean = moments.mean
    entry = moments.entry({role: torch.ones_like(x) for role, x in mean.items()})
    assert isinstance(entry, Eigenbasis | Elementwise)
    spectrum = {role: x.flatten().cpu() for role, x in mean.items()}
    return LayerFisher(entry, spectrum, moments.shapes)


def _complete_basis(factor: Factor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """Return an orthonormal basis `[d, d]` and its eigenvalues `[d]`; None for the coordinates."""
    match factor:
        case DiagonalFactor():
            return None, factor.values.cpu()
        case IsotropicFactor():
            return None, torch.full((factor.dim,), factor.mean, dtype=torch.float64)
        case Eigen():
            count = factor.vectors.shape[1]
            zeros = torch.zeros(factor.dim - count, dtype=torch.float64)
            values = torch.cat([factor.values.cpu(), zeros])
            if count == factor.dim:
                return factor.vectors.to(dtype), values
            basis = torch.linalg.qr(factor.vectors.double(), mode="complete").Q
            return basis.to(dtype).contiguous(), values


def eigenvalues(entry: Entry, spectrum: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's Fisher eigenvalues in the layout of its scales, float64."""
    if isinstance(entry, Elementwise):
        return {role: spectrum[role].to(x.device).view(x.shape) for role, x in entry.scale.items()}
    assert isinstance(entry, Eigenbasis)
    device = entry.scale.device
    if "A" in spectrum:
        return {"weight": torch.outer(spectrum["G"].to(device), spectrum["A"].to(device))}
    return {"weight": spectrum["weight"].to(device).view(entry.scale.shape)}


def clamp_eigenvalues(
    entry: Entry, spectrum: Mapping[str, Tensor], floor: float, exponent: float
) -> Eigenbasis | Elementwise:
    """Return the map max(F, floor · I)^(−exponent), with each eigenvalue of the product clamped.

    Args:
        entry: with the bases; its scales are replaced.
        spectrum: as `LayerFisher.spectrum`.
        floor: λ, positive.
        exponent: 1/2 whitens, 1 gives the natural gradient.
    """
    scale: dict[str, Tensor] = {}
    for role, values in eigenvalues(entry, spectrum).items():
        scale[role] = values.clamp(min=floor).pow(-exponent)
    if isinstance(entry, Elementwise):
        return Elementwise({role: scale[role].to(own) for role, own in entry.scale.items()})
    assert isinstance(entry, Eigenbasis)
    return replace(entry, scale=scale["weight"].to(entry.scale))


def split_low_rank(entry: Entry) -> Entry:
    """Return the same map in a form whose norms cost less, if a floor leaves few free directions.

    The floor gives most input directions one common scale. If no direction has another scale, the
    map is a multiple of the identity. With up to a quarter of the directions above the floor, the
    map rotates to these alone. The result equals the given map up to rounding.
    """
    if not isinstance(entry, Eigenbasis) or entry.input is None or entry.rest is not None:
        return entry
    largest = float(entry.scale.max())
    active = torch.nonzero((entry.scale < largest).any(0)).flatten()
    if not len(active):
        return Kronecker(Identity(largest), Identity(1.0))
    if 4 * len(active) > entry.scale.shape[1]:
        return entry
    basis = entry.input[:, active].contiguous()
    return Eigenbasis(entry.scale[:, active], basis, entry.output, largest)


def condition(values: Mapping[str, Tensor], floor: float = 0.0) -> float:
    """Return largest ÷ smallest eigenvalue with a floor; infinite if the smallest is zero."""
    largest = max(floor, *(float(x.max()) for x in values.values()))
    smallest = max(floor, min(float(x.min()) for x in values.values()))
    return largest / smallest if smallest > 0 else float("inf")


# --------------------------------------------------------------------------------------------------

_READOUTS = {"split": ("natural", "whitened"), "after": ("whitened",), "before": ("inverse",)}
_LEAST = 1e-30  # smaller eigenvalues count as zero


@dataclass(frozen=True)
class AfterClip(Kronecker):
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
    loss: Callable[[Any, torch.Generator], Tensor] | None = None
    order: str = "split"
    probe_size: int | None = None
    chunk: int = 64
    max_factor_size: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        check_probe(self.probe)
        choices = {"labels": LABELS, "likelihood": LIKELIHOODS, "order": tuple(_READOUTS)}
        check_choices(self, choices)
        check_positive(self, ("steps", "every", "probe_size", "chunk", "max_factor_size"))
        if not (self.lambda_safe > 0 and math.isfinite(self.lambda_safe)):
            raise ValueError(
                f"lambda_safe must be positive and finite, got {self.lambda_safe}; see NGD.matched"
            )
        if not 0 < self.base <= self.lambda_safe:
            raise ValueError(
                f"lambda_base must lie in (0, lambda_safe = {self.lambda_safe}], got "
                f"{self.lambda_base}"
            )
        if not 0 <= self.warm < 1:
            raise ValueError(f"warm is a fraction of the steps in [0, 1), got {self.warm}")
        if not (self.power > 0 and math.isfinite(self.power)):
            raise ValueError(f"power must be positive and finite, got {self.power}")

    @classmethod
    def matched(
        cls, *, eta: float, clip: float, eta_sgd: float, clip_sgd: float, **settings: Any
    ) -> NGD:
        """Return settings whose largest step in parameter space is that of a tuned DP-SGD.

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
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        return cls(lambda_safe=(eta * clip / (eta_sgd * clip_sgd)) ** 2, **settings)

    @property
    def base(self) -> float:
        """λ_base in force."""
        if self.lambda_base is None:
            return min(1e-4, 0.1 * self.lambda_safe)
        return self.lambda_base

    @property
    def exponent(self) -> float:
        """Power of F̃⁻¹ in one application of the map."""
        return 0.5 if self.order == "split" else 1.0

    def floor(self, step: int) -> float:
        """Return λ_t before a step (from 0); λ_safe from step T on (Eq. 18)."""
        safe, base = self.lambda_safe, self.base
        warm = self.warm * self.steps
        if step < warm:
            return safe - (safe - base) * step / warm
        progress = min(1.0, (step - warm) / (self.steps - warm))
        return base + (safe - base) * progress**self.power

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        name = "ngd" if self.order == "split" else f"ngd-{self.order}"
        return self._describe(name, lambda_base=self.base)

    def check_plan(self, steps: int, readout: str) -> None:
        """Refuse a plan that does not fit this schedule.

        Raises:
            ValueError: the schedule is longer than the run, or `order` needs another read-out.
        """
        if self.steps > steps:
            raise ValueError(
                f"NGD(steps={self.steps}) is longer than the {steps} steps of the plan, so the "
                f"floor would not come back to lambda_safe; use steps={steps}"
            )
        if readout not in _READOUTS[self.order]:
            wanted = " or ".join(repr(r) for r in _READOUTS[self.order])
            raise ValueError(
                f"NGD(order={self.order!r}) needs PrivacyConfig(readout={wanted}), got {readout!r}"
            )

    @property
    def supports_distributed_build(self) -> bool:
        """Whether each process may run a part of the probe.

        A loss that draws random numbers of its own has to see all of the probe.
        """
        return self.loss is None

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Mapping[str, str] | None = None,
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
        metric: dict[str, Entry] = {}
        report: list[dict[str, Any]] = []
        for name, layer in layers.items():
            metric[name] = clamp_eigenvalues(layer.entry, layer.spectrum, floor, self.exponent)
            report += _report(name, layer, floor)
        return PreconditionerState(
            metric=metric,
            step=step,
            report=tuple(report),
            spectra={name: layer.spectrum for name, layer in layers.items()},
            shapes={name: layer.shapes for name, layer in layers.items()},
            note=note,
        )

    def metric_at(self, state: PreconditionerState, step: int) -> Metric:
        """Return the metric of a step: the eigenvalues of the state under this step's floor."""
        floor = self.floor(step)
        metric: dict[str, Entry] = {}
        for name, entry in state.metric.items():
            clamped = clamp_eigenvalues(entry, state.spectra[name], floor, self.exponent)
            metric[name] = split_low_rank(clamped)
            if self.order == "before":
                metric[name] = AfterClip(back=metric[name])
        return metric


def _report(name: str, layer: LayerFisher, floor: float) -> list[dict[str, Any]]:
    """Return one row a side, with the condition number of the layer before and after the clamp."""
    values = eigenvalues(layer.entry, layer.spectrum)
    sides = {"A": "input", "G": "output"}
    low = sum(int((x <= floor).sum()) for x in values.values())
    total = sum(x.numel() for x in values.values())
    note = f"{low / total:.0%} of the eigenvalues at the floor {floor:.3g}"
    rows = []
    for side, spectrum in layer.spectrum.items():
        rows.append(
            {
                "layer": name,
                "side": sides.get(side, side),
                "dim": spectrum.numel(),
                "kind": "eigenbasis" if side in sides else "diagonal",
                "rank": int((spectrum > _LEAST).sum()),
                "trace": float(spectrum.sum()),
                "condition_before": condition(values),
                "condition_after": condition(values, floor),
                "note": "; ".join(text for text in (layer.note, note) if text),
            }
        )
    return rows
