"""DP-NGD: natural gradients from public curvature with a floor on the eigenvalues that follows a schedule.

    every `every` steps   F = A ⊗ G of every layer on public data, F = Q Λ Qᵀ
    every step            Λ̃ = max(Λ, λ_t), λ_t by Eq. 18
    z_i = F̃^(−1/2) g_i,   clip_C(z_i),   + noise,   step F̃^(−1/2) z̄          `order="split"`, readout "natural"

F does not read private data, so the cost is that of DP-SGD. λ_t is absolute: losses are in the scale of one example, and
nothing rescales the metric. Norm layers, embeddings and every other parameter without a Kronecker product have the diagonal of
their Fisher information under the same floor, so that all parameters are in the same units.

Where the paper leaves things open: labels of the probe are drawn from the model (the Fisher information itself; public labels
need not fit the head); a layer with T positions has A = 1/n Σ a aᵀ and G = 1/(nT) Σ b bᵀ, so that tr(A ⊗ G) is E‖g‖²; the
clamp acts on the products Λ, not on the factors; F is measured anew at every refresh, on single views of the public data.

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

from dpkfc.curvature.base import check_choices, check_positive, check_probe, described, run_of
from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor, IsotropicFactor
from dpkfc.curvature.kfac import Preconditioner
from dpkfc.curvature.layer_factors import LayerAccumulator, Positions, Structure, is_known
from dpkfc.curvature.probe_loss import LABELS, LIKELIHOODS
from dpkfc.curvature.probe_pass import (
    Capture,
    ProbeRun,
    Team,
    agreed,
    blocks_on_probe,
    joined,
    own_rows,
    probe_digest,
    public_generator,
    undisturbed,
)
from dpkfc.curvature.probes import Inputs, Probe, device_of
from dpkfc.curvature.refresh import added
from dpkfc.linalg.blocks import Block, Lookup, Outer, PerExample, Tied, write_out_patches
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry, Identity, Kronecker, Metric

# --------------------------------------------------------------------------------------------------
# Second moments of gradients, entry by entry: what diagonal metrics are made of.
#
#     example    v = 1/N Σ_n g_n²                     the diagonal of the Fisher information (labels drawn from the model)
#     batch      v = 1/M Σ_m (1/B Σ_(n in m) g_n)²    squares of mini-batch means, as RMSProp sees public data (AdaDPS)
#
# Moments of a matrix-shaped layer have the layout of its metric: `[d_out, d_in]` with the bias in
# the last column, averaged over the groups of a convolution, `[d, V]` for an embedding and `[V, d]`
# for a tied table.

PER = ("example", "batch")
_CHUNK_ELEMENTS = 1 << 22
_ROLE = "weight"  # the one name of a matrix-shaped layer's moments
_KINDS: dict[type, str] = {PerExample: "elementwise", Lookup: "lookup", Tied: "tied", Outer: "outer"}


@dataclass(frozen=True)
class Moments:
    """Σ of squares of one layer over `count` gradients; both add up over micro-batches.

    Attributes:
        kind: outer, lookup, tied or elementwise, as in `LayerFactors`.
        squares: float64, role to the layout above (`weight` alone for matrix-shaped layers).
        count: gradients that were squared.
        dtype: of the layer's gradients.
        groups: of a convolution.
    """

    kind: str
    squares: Mapping[str, Tensor]
    count: int
    dtype: torch.dtype
    groups: int = 1

    def plus(self, other: Moments) -> Moments:
        """The moments of both."""
        squares = {role: x + other.squares[role] for role, x in self.squares.items()}
        return replace(self, squares=squares, count=self.count + other.count)

    @property
    def mean(self) -> dict[str, Tensor]:
        """v, float64."""
        return {role: x / self.count for role, x in self.squares.items()}

    def entry(self, scale: Mapping[str, Tensor]) -> Entry:
        """The diagonal map with these factors, in the layout of `squares`."""
        typed = {role: x.to(self.dtype).contiguous() for role, x in scale.items()}
        return Elementwise(typed) if self.kind == "elementwise" else Eigenbasis(typed[_ROLE])

    @property
    def shapes(self) -> dict[str, Any]:
        """Kind and sizes of the sides, for `Preconditioner.check`."""
        if self.kind == "elementwise":
            return {"kind": self.kind, **{role: list(x.shape) for role, x in self.squares.items()}}
        d_out, d_in = self.squares[_ROLE].shape
        return {"kind": self.kind, "input": [d_in], "output": [d_out]}


@dataclass(frozen=True)
class Sums:
    """Σ g of one layer over `count` examples, which add up over the parts of a mini-batch.

    Attributes:
        kind: as in `Moments`.
        sums: float64, role to `[groups, d_out, d_in]`, `[V, d]` of a table, or the shape of the parameter.
        count: examples.
        dtype: of the layer's gradients.
    """

    kind: str
    sums: Mapping[str, Tensor]
    count: int
    dtype: torch.dtype

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""
        sums = {role: x + other.sums[role] for role, x in self.sums.items()}
        return replace(self, sums=sums, count=self.count + other.count)

    def squared(self, size: int | None = None) -> Moments:
        """The moments of one mini-batch: the square of the mean over `size` examples, by default those that were added.

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
    """The sum of one layer's gradients over the examples of a block.

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
                sums = {_ROLE: _scattered(block, block.b.new_zeros(block.num_rows, block.b.shape[-1], dtype=torch.float64))}
            case Tied():
                sums = {_ROLE: _scattered(block.lookup, _outer_sum(block.outer)[0])}
            case _:
                raise _unknown(block)
    return Sums(_KINDS[type(block)], sums, block.batch_size, _dtype(block))


def squared_gradients(block: Block, per: str) -> Moments:
    """The moments of one micro-batch.

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


def _unknown(block: Any) -> TypeError:
    return TypeError(f"no second moments are known for a {type(block).__name__}")


def _squares(block: Block) -> tuple[dict[str, Tensor], int]:
    """(role to Σ g² over examples, groups)."""
    match block:
        case PerExample():
            return {role: g.detach().double().square().sum(0) for role, g in block.grads.items()}, 1
        case Outer():
            return {_ROLE: _outer_squares(block.explicit()).mean(0)}, block.groups
        case Lookup():
            return {_ROLE: _lookup_squares(block).T}, 1
        case Tied():
            return {_ROLE: _tied_squares(block)}, 1
    raise _unknown(block)


def _outer_sum(block: Outer) -> Tensor:
    """Σ g over examples, `[groups, d_out, d_in]`."""
    a, b = (x.double().unflatten(0, (-1, block.groups)).transpose(0, 1).flatten(1, 2) for x in (block.a, block.b))
    return b.mT @ a


def _scattered(block: Lookup, total: Tensor) -> Tensor:
    """`total` `[V, d]` with the gradients of the rows that are read added to it."""
    return total.index_add_(0, block.ids.flatten(), block.b.double().flatten(0, 1))


def _outer_squares(block: Outer) -> Tensor:
    """Σ_n g_n² `[groups, d_out, d_in]`."""
    a, b = (x.double().unflatten(0, (-1, block.groups)).transpose(0, 1) for x in (block.a, block.b))
    if block.a.shape[1] == 1:
        return b[:, :, 0].square().mT @ a[:, :, 0].square()
    total = b.new_zeros(block.groups, b.shape[-1], a.shape[-1])
    for rows in _chunks(block.batch_size, total.numel()):
        total += (b[:, rows].mT @ a[:, rows]).square().sum(1)
    return total


def _lookup_squares(block: Lookup) -> Tensor:
    """`[V, d]`; rows that an example reads twice add up before they are squared."""
    n, v = block.batch_size, block.num_rows
    rows, total = block.b.double().flatten(0, 1), block.b.new_zeros(v, block.b.shape[-1], dtype=torch.float64)
    example = torch.arange(n, device=block.ids.device).unsqueeze(1) * v
    keys, inverse = torch.unique((block.ids + example).flatten(), return_inverse=True)
    sums = rows.new_zeros(len(keys), rows.shape[1]).index_add_(0, inverse, rows)
    return total.index_add_(0, keys % v, sums.square())


def _tied_squares(block: Tied) -> Tensor:
    """`[V, d]` of the sum of both uses."""
    total = block.outer.b.new_zeros(block.lookup.num_rows, block.outer.a.shape[-1], dtype=torch.float64)
    for part in _chunks(block.batch_size, total.numel()):
        lookup = replace(block.lookup, ids=block.lookup.ids[part], b=block.lookup.b[part].double())
        outer = replace(block.outer, a=block.outer.a[part].double(), b=block.outer.b[part].double())
        total += Tied(lookup, outer).per_example().square().sum(0)
    return total


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, math.ceil(_CHUNK_ELEMENTS / max(1, elements_each)))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


# --------------------------------------------------------------------------------------------------
# The Fisher information of every layer by eigenvalues of its product: what a floor on the product
# is applied to.
#
# A matrix-shaped layer has F = A ⊗ G = (Q_A ⊗ Q_G)(λ_A ⊗ λ_G)(Q_A ⊗ Q_G)ᵀ with both bases complete,
# so that every product λ_G,o λ_A,i has a direction. Other parameters (norm layers, embeddings, tied
# tables, raw parameters) have the diagonal of their Fisher information. Both are in the scale of
# one example: tr(F) is E‖g‖² if inputs and output gradients were independent.


@dataclass(frozen=True)
class LayerFisher:
    """The Fisher information of one layer.

    Attributes:
        entry: the bases, with scales of one; a floor and a root give it its scales.
        spectrum: `A` and `G`, eigenvalues in the order of the bases, or role to the entries of a diagonal; float64.
        shapes: kind and sizes of the sides, for `Preconditioner.check`.
        note: what became of a side that was too wide.
    """

    entry: Eigenbasis | Elementwise
    spectrum: Mapping[str, Tensor]
    shapes: Mapping[str, Any]
    note: str = ""


def fisher_of_layers(
    model: nn.Module, capture: Capture, run: ProbeRun, max_factor_size: int, team: Team | None = None
) -> tuple[dict[str, LayerFisher], str]:
    """Run the probe once; of several processes, each runs its own examples and decomposes its own layers.

    Args:
        model: should be inside `undisturbed`.
        capture: maps (model, loss) to layer name and block.
        run: what to run.
        max_factor_size: wider sides keep the diagonal of their factor.
        team: the processes that share the refresh, None for this one alone.

    Returns:
        The layers by name, and a note on the probe's labels.

    Raises:
        ValueError: a layer's contribution on the probe is not finite, or of a kind without curvature.
        RuntimeError: the probe does not return the same inputs on every process.
    """
    if team is None:
        parts, note, _ = _parts(model, capture, run, max_factor_size)
        return _finished({name: [part] for name, part in parts.items()}), note
    parts, note, digest = team.together(lambda: _parts(model, capture, run, max_factor_size, team))
    told = team.everyone((digest, note))
    agreed("probe", [of for of, _ in told])
    found = joined(team, parts, _cost, _finished, device_of(model))
    return found, next((text for _, text in told if text), "")


_Part = LayerAccumulator | Moments


def _cost(part: _Part) -> float:
    """That of two complete bases; a diagonal is nothing beside them."""
    return part.full_cost if isinstance(part, LayerAccumulator) else 1.0


def _parts(
    model: nn.Module, capture: Capture, run: ProbeRun, max_factor_size: int, team: Team | None = None
) -> tuple[dict[str, _Part], str, str]:
    """What this process's examples add up to, a note on the probe's labels, and a hash of the probe where others run the rest."""
    structure = Structure(max_factor_size=max_factor_size)
    positions = Positions(public_generator(run.seed, run.step, "positions"), run.size, None)
    factors: dict[str, LayerAccumulator] = {}
    moments: dict[str, Moments] = {}
    note, rows, seen = "", own_rows(team, run.size), [""]

    def drawn(inputs: Inputs, labels: Tensor | None) -> None:
        seen[0] = "" if team is None else probe_digest(inputs, labels)

    for piece in blocks_on_probe(model, capture, run, rows.start, stop=rows.stop, drawn=drawn):
        positions.start(piece.rows, piece.mask)
        note = piece.note
        for name in piece.blocks:
            block = write_out_patches(piece.blocks[name])
            if not is_known(block):
                raise ValueError(f"layer '{name}': no curvature is known for a {type(block).__name__}; freeze it")
            try:
                if isinstance(block, Outer):
                    factors.setdefault(name, LayerAccumulator(block, structure, None, positions)).add(block)
                else:
                    new = squared_gradients(block, "example")
                    moments[name] = moments[name].plus(new) if name in moments else new
            except ValueError as error:
                raise ValueError(f"layer '{name}': {error}") from error
            del block
        del piece  # or it stays in memory beside the next one
    return {**{name: of.apart() for name, of in factors.items()}, **moments}, note, seen[0]


def _finished(parts: Mapping[str, list[_Part]]) -> dict[str, LayerFisher]:
    """Layers from what every process has added up, in the order of the processes."""
    factors = {name: [x for x in held if isinstance(x, LayerAccumulator)] for name, held in parts.items()}
    moments = {name: [x for x in held if isinstance(x, Moments)] for name, held in parts.items()}
    found = {name: _product(layer) for name, layer in added({n: held for n, held in factors.items() if held}).items()}
    return found | {name: _diagonal(reduce(Moments.plus, held)) for name, held in moments.items() if held}


def _product(accumulator: LayerAccumulator) -> LayerFisher:
    layer = accumulator.result()
    (a, values_a), (g, values_g) = (_complete(layer.sides[side], layer.dtype) for side in ("input", "output"))
    ones = torch.ones(len(values_g), len(values_a), dtype=layer.dtype, device=layer.device)
    into, out = (None if q is None else q.to(layer.device) for q in (a, g))
    entry = Eigenbasis(ones, into, out)
    shapes = {"kind": "outer", **{side: list(shape) for side, shape in layer.shapes.items()}}
    note = "; ".join(f"{side}: {text}" for side, text in layer.notes.items())
    return LayerFisher(entry, {"A": values_a, "G": values_g}, shapes, note)


def _diagonal(moments: Moments) -> LayerFisher:
    mean = moments.mean
    entry = moments.entry({role: torch.ones_like(x) for role, x in mean.items()})
    assert isinstance(entry, Eigenbasis | Elementwise)
    return LayerFisher(entry, {role: x.flatten().cpu() for role, x in mean.items()}, moments.shapes)


def _complete(factor: Factor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """An orthonormal basis `[d, d]` (None: the coordinates) and the eigenvalues `[d]` in its order."""
    match factor:
        case DiagonalFactor():
            return None, factor.values.cpu()
        case IsotropicFactor():
            return None, torch.full((factor.dim,), factor.mean, dtype=torch.float64)
        case Eigen():
            held = factor.vectors.shape[1]
            values = torch.cat([factor.values.cpu(), torch.zeros(factor.dim - held, dtype=torch.float64)])
            if held == factor.dim:
                return factor.vectors.to(dtype), values
            return torch.linalg.qr(factor.vectors.double(), mode="complete").Q.to(dtype).contiguous(), values


def eigenvalues(entry: Entry, spectrum: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The eigenvalues of a layer's Fisher information in the layout of its scales, float64, role to tensor."""
    if isinstance(entry, Elementwise):
        return {role: spectrum[role].to(scale.device).view(scale.shape) for role, scale in entry.scale.items()}
    assert isinstance(entry, Eigenbasis)
    if "A" in spectrum:
        a, g = (spectrum[side].to(entry.scale.device) for side in ("A", "G"))
        return {"weight": torch.outer(g, a)}
    return {"weight": spectrum["weight"].to(entry.scale.device).view(entry.scale.shape)}


def clamped(entry: Entry, spectrum: Mapping[str, Tensor], floor: float, exponent: float) -> Eigenbasis | Elementwise:
    """The map max(F, floor · I)^(−exponent), each eigenvalue of the product on its own.

    Args:
        entry: with the bases; its scales are replaced.
        spectrum: as `LayerFisher.spectrum`.
        floor: λ, positive.
        exponent: 1/2 whitens, 1 gives the natural gradient.
    """
    values = eigenvalues(entry, spectrum)
    scale = {role: x.clamp(min=floor).pow(-exponent) for role, x in values.items()}
    if isinstance(entry, Elementwise):
        return Elementwise({role: scale[role].to(own) for role, own in entry.scale.items()})
    assert isinstance(entry, Eigenbasis)
    return replace(entry, scale=scale["weight"].to(entry.scale))


def parted(entry: Entry) -> Entry:
    """The same map where few input directions stand out from one scale that all others share, which a floor gives them.

    With none it is a multiple of the identity; with up to a quarter of the directions they alone are turned to. The map is the
    one that was given, to the last bits; only its norms cost less.
    """
    if not isinstance(entry, Eigenbasis) or entry.input is None or entry.rest is not None:
        return entry
    most = float(entry.scale.max())
    active = torch.nonzero((entry.scale < most).any(0)).flatten()
    if not len(active):
        return Kronecker(Identity(most), Identity(1.0))
    if 4 * len(active) > entry.scale.shape[1]:
        return entry
    return Eigenbasis(entry.scale[:, active], entry.input[:, active].contiguous(), entry.output, most)


def condition(values: Mapping[str, Tensor], floor: float = 0.0) -> float:
    """Largest ÷ smallest eigenvalue with a floor; infinite where the smallest is zero."""
    largest = max(floor, *(float(x.max()) for x in values.values()))
    smallest = max(floor, min(float(x.min()) for x in values.values()))
    return largest / smallest if smallest > 0 else float("inf")


# --------------------------------------------------------------------------------------------------

_READOUTS = {"split": ("natural", "whitened"), "after": ("whitened",), "before": ("inverse",)}
_LEAST = 1e-30  # eigenvalues below it are zero for the report


@dataclass(frozen=True)
class AfterClip(Kronecker):
    """The identity where examples are clipped; what `readout="inverse"` applies behind the noise is `back`."""

    back: Entry = field(kw_only=True)

    def inverse(self) -> Any:
        """`back`."""
        return self.back


@dataclass(frozen=True, kw_only=True)
class NGD:
    """How DP-NGD measures and clamps curvature. Use it with `PrivacyConfig(readout="natural")`.

    Attributes:
        probe: where inputs come from; the paper takes 500 public images, `PublicData(...)`.
        lambda_safe: λ_safe, the floor at the first and the last step; see `matched`.
        lambda_base: λ_base, the floor between them; None takes min(1e-4, 0.1 λ_safe). The same as λ_safe keeps it constant.
        steps: T, the length of the schedule; at most the steps of the plan.
        warm: share of T in which the floor sinks from λ_safe to λ_base.
        power: p, how late it rises again.
        every: steps between refreshes of F.
        labels: `model` draws them from the model's predictive distribution, `uniform` at random, `given` takes the probe's.
        likelihood, loss: as in `KFAC`.
        order: `split` clips F̃^(−1/2) g (DP-NGD with readout "natural"; with "whitened" the step is not mapped once more).
            The paper's ablations: `after` clips F̃⁻¹ g, with readout "whitened"; `before` clips g itself and maps by F̃⁻¹
            behind the noise, with readout "inverse".
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
        check_choices(self, {"labels": LABELS, "likelihood": LIKELIHOODS, "order": tuple(_READOUTS)})
        check_positive(self, ("steps", "every", "probe_size", "chunk", "max_factor_size"))
        if not (self.lambda_safe > 0 and math.isfinite(self.lambda_safe)):
            raise ValueError(f"lambda_safe must be positive and finite, got {self.lambda_safe}; see NGD.matched")
        if not 0 < self.base <= self.lambda_safe:
            raise ValueError(f"lambda_base must lie in (0, lambda_safe = {self.lambda_safe}], got {self.lambda_base}")
        if not 0 <= self.warm < 1:
            raise ValueError(f"warm is a share of the steps in [0, 1), got {self.warm}")
        if not (self.power > 0 and math.isfinite(self.power)):
            raise ValueError(f"power must be positive and finite, got {self.power}")

    @classmethod
    def matched(cls, *, eta: float, clip: float, eta_sgd: float, clip_sgd: float, **settings: Any) -> NGD:
        """With the floor at which the largest step in parameter space is that of a tuned DP-SGD.

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
        given = {"eta": eta, "clip": clip, "eta_sgd": eta_sgd, "clip_sgd": clip_sgd}
        for name, value in given.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        return cls(lambda_safe=(eta * clip / (eta_sgd * clip_sgd)) ** 2, **settings)

    @property
    def base(self) -> float:
        """λ_base in force."""
        return min(1e-4, 0.1 * self.lambda_safe) if self.lambda_base is None else self.lambda_base

    @property
    def exponent(self) -> float:
        """Power of F̃⁻¹ in one application of the map."""
        return 0.5 if self.order == "split" else 1.0

    def floor(self, step: int) -> float:
        """λ_t before a step (from 0); λ_safe from step T on (Eq. 18)."""
        safe, base, warm = self.lambda_safe, self.base, self.warm * self.steps
        if step < warm:
            return safe - (safe - base) * step / warm
        share = min(1.0, (step - warm) / (self.steps - warm))
        return base + (safe - base) * share**self.power

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        name = "ngd" if self.order == "split" else f"ngd-{self.order}"
        return described(self, name, lambda_base=self.base)

    def check_plan(self, steps: int, readout: str) -> None:
        """Raise where a plan and this schedule do not go together.

        Raises:
            ValueError: the schedule is longer than the run, or the read-out is not one of this order.
        """
        if self.steps > steps:
            raise ValueError(
                f"NGD(steps={self.steps}) is longer than the {steps} steps of the plan, so the floor would not come back to "
                f"lambda_safe; use steps={steps}"
            )
        if readout not in _READOUTS[self.order]:
            wanted = " or ".join(repr(r) for r in _READOUTS[self.order])
            raise ValueError(f"NGD(order={self.order!r}) needs PrivacyConfig(readout={wanted}), got {readout!r}")

    def due(self, step: int) -> bool:
        """Whether F is to be measured before this step (from 0)."""
        return step % self.every == 0

    def run_at(self, step: int) -> ProbeRun:
        """The probe of one refresh."""
        return run_of(self, step)

    @property
    def divides(self) -> bool:
        """Whether processes may each run a part of the probe; a loss that draws numbers of its own has to see all of it."""
        return self.loss is None

    def build(
        self, model: nn.Module, capture: Capture, step: int,
        rules: Mapping[str, str] | None = None, team: Team | None = None,
    ) -> Preconditioner:  # fmt: skip
        """Measure F on the probe at the model's present parameters; arguments as in `KFAC.build`.

        Returns:
            The bases, the eigenvalues and the metric of this very step; `metric_at` has that of every step until the next.

        Raises:
            ValueError: what the model gives on the probe is not finite, or the probe does not reach a layer.
        """
        with undisturbed(model), torch.no_grad():
            layers, note = fisher_of_layers(model, capture, self.run_at(step), self.max_factor_size, team)
        unreached = [name for name in rules or {} if name not in layers]
        if unreached:
            raise ValueError(
                f"the probe does not reach these layers: {', '.join(unreached)}. DP-NGD's scale is absolute, so a layer "
                "without curvature would be in other units; freeze it, or give a probe that reaches it"
            )
        floor = self.floor(step)
        return Preconditioner(
            metric={name: clamped(of.entry, of.spectrum, floor, self.exponent) for name, of in layers.items()},
            step=step,
            report=tuple(row for name, of in layers.items() for row in _rows(name, of, floor)),
            spectra={name: of.spectrum for name, of in layers.items()},
            shapes={name: of.shapes for name, of in layers.items()},
            note=note,
        )

    def metric_at(self, preconditioner: Preconditioner, step: int) -> Metric:
        """The metric of a step: the eigenvalues that are held, under this step's floor."""
        floor, spectra = self.floor(step), preconditioner.spectra
        entries = preconditioner.metric.items()
        metric = {name: parted(clamped(entry, spectra[name], floor, self.exponent)) for name, entry in entries}
        return {n: AfterClip(back=e) for n, e in metric.items()} if self.order == "before" else metric


def _rows(name: str, layer: LayerFisher, floor: float) -> list[dict[str, Any]]:
    """One row a side, with the condition number of the whole layer before and after the clamp."""
    values = eigenvalues(layer.entry, layer.spectrum)
    sides = {"A": "input", "G": "output"}
    low = sum(int((x <= floor).sum()) for x in values.values())
    total = sum(x.numel() for x in values.values())
    note = f"{low / total:.0%} of the eigenvalues at the floor {floor:.3g}"
    return [
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
        for side, spectrum in layer.spectrum.items()
    ]
