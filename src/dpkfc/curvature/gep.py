"""GEP: a subspace spanned by public per-example gradients, along which private gradients are split before they are clipped.

    Ĝ public gradients [m, p] of a group of layers,   L ← Ĝᵀ Ĝ L made orthonormal, from a Gaussian L [p, k]
    w = Lᵀ g,  r = g − L w,  one Gaussian over (w / S₁, r / S₂),  step (1 / B) (S₁ L w̃ + S₂ r̃);  B-GEP drops r̃

L depends on the probe, a public random stream and the released parameters: it costs no privacy. Embedding and residual are
ONE release of sensitivity √2 of the same sample: with noise σ on either part a step is charged as (q, σ / √2). Adding up the
costs of two releases of (q, σ), as the authors' code does, takes the two to be sampled apart and comes out too small.

Source: Yu, Zhang, Chen, Liu, "Do not let privacy overbill utility" (ICLR 2021), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import check_choices, check_positive, check_probe, described, probe_examples, run_of
from dpkfc.curvature.damping import UNREACHED, identity_row
from dpkfc.curvature.kfac import Preconditioner
from dpkfc.curvature.layer_factors import KNOWN
from dpkfc.curvature.probe_loss import LABELS, LIKELIHOODS
from dpkfc.curvature.probe_pass import Capture, ProbeRun, blocks_on_probe, public_generator, undisturbed
from dpkfc.curvature.probes import Probe
from dpkfc.linalg.blocks import Block, PerExample, write_out_patches
from dpkfc.linalg.metric import Elementwise, Span, Subspace, clipping_of, pack, unpack

__all__ = ["GEP", "Basis"]

Shapes = Mapping[str, tuple[int, ...]]  # role to shape; "" for weight and bias as one matrix


@dataclass(frozen=True, kw_only=True)
class Basis(Preconditioner):
    """A subspace built at one step; `metric` holds it, and leaves every layer as it is."""

    metric: Subspace

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors, ready for safetensors; `from_state_dict` restores every bit."""
        m = self.metric
        rest = {
            "step": self.step,
            "report": [dict(row) for row in self.report],
            "spans": {name: [span.start, span.length] for name, span in m.spans.items()},
            "settings": [m.embedding_norm, m.residual_norm, m.share, m.defect],
        }
        return pack({name: Elementwise(span.vectors) for name, span in m.spans.items()}, {}, rest)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Basis:
        """The basis that wrote this state.

        Raises:
            ValueError: tensors that `state_dict` did not write.
        """
        held, _, rest = unpack(state)
        if "spans" not in rest:
            raise ValueError("not the state of a public subspace: it was written by another preconditioner")
        # Tensors read from a file begin anywhere in memory, and a product of unaligned ones can differ in its last bit.
        vectors = {n: {r: v.clone() for r, v in x.scale.items()} for n, x in held.items() if isinstance(x, Elementwise)}
        spans = {n: Span(v, *rest["spans"][n]) for n, v in vectors.items()}
        return cls(metric=Subspace(spans, *rest["settings"]), step=rest["step"], report=tuple(rest["report"]))

    def to(self, device: torch.device | str) -> Basis:
        """The same basis on another device."""
        return replace(self, metric=self.metric.to(device))

    def check(self, layers: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Raise unless this basis fits a model.

        Args:
            layers: layer name to the shapes of its trainable parameters, role to shape.

        Raises:
            ValueError: naming the first layer that is missing or of another shape.
        """
        spans = self.metric.spans
        problems = [(n, "is not in the model") for n in spans if n not in layers]
        problems += [(n, "has no rows in it") for n in layers if n not in spans and n not in self._left_alone]
        for name, span in spans.items() if not problems else ():
            size = sum(math.prod(shape) for shape in layers[name].values())
            rows = sum(v[0].numel() for v in span.vectors.values())
            problems += [] if size == rows else [(name, f"has {size} parameters, the basis {rows} rows")]
        for name, what in problems:
            raise ValueError(f"the public subspace belongs to another model: layer '{name}' {what}; build a new one")


@dataclass(frozen=True, kw_only=True)
class GEP:
    """How the subspace is found, and how gradients are clipped along it.

    Given as `PrivacyConfig(preconditioner=GEP(...), clipping="embedding_residual")`, or `clipping="embedding"` where the
    residual is dropped. Memory: `rank` numbers for every parameter of a group, twice while the subspace is built.

    Attributes:
        probe: where public examples come from; see `probes`.
        rank: directions k of all groups together; a group has a part of them in proportion to √(its parameters).
        embedding_norm: S₁, to which embeddings are clipped.
        residual_norm: S₂, to which residuals are clipped; None drops the residual (B-GEP): the step stays in the subspace.
        share: share in (0, 1) of the embedding in what a release costs: with s of it, the noise on w / S₁ is σ / √(2 s) and on
            r / S₂ σ / √(2 (1 − s)), σ being the plan's `stddev`. Read where there is a residual.
        groups: neighbouring layers share a subspace; the layers are cut into at most so many groups of about equal size.
        power_iterations: multiplications by ĜᵀĜ, one pass over the probe each.
        every: steps between rebuilds.
        probe_size: public examples m, at least as many as directions; None takes all that the probe holds, 256 of an endless
            one. A public constant, never the size of a private batch.
        chunk: public examples a forward pass; bounds memory.
        labels: `uniform` at random (the paper's), `given` takes the probe's, `model` draws them from the model's predictions.
        likelihood: categorical, gaussian or bernoulli; see `likelihood`.
        loss: maps (model output, generator) to losses `[N]`, instead of a likelihood.
        seed: of the public random stream, one stream a step.
    """

    probe: Probe
    rank: int
    embedding_norm: float = 5.0
    residual_norm: float | None = 2.0
    share: float = 0.5
    groups: int = 3
    power_iterations: int = 1
    every: int = 1
    probe_size: int | None = None
    chunk: int = 64
    labels: str = "uniform"
    likelihood: str = "categorical"
    loss: Callable[[Any, torch.Generator], Tensor] | None = None
    seed: int = 0
    result: ClassVar[type[Preconditioner]] = Basis  # what `build` makes, for checkpoints

    def __post_init__(self) -> None:
        check_probe(self.probe)
        check_choices(self, {"labels": LABELS, "likelihood": LIKELIHOODS})
        check_positive(self, ("rank", "groups", "power_iterations", "every", "probe_size", "chunk"))
        for name in ("embedding_norm", "residual_norm"):
            value = getattr(self, name)
            if not (value is None and name == "residual_norm") and not 0 < float(value or 0) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie between 0 and 1, got {self.share!r}; residual_norm=None drops the residual")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        examples = probe_examples(self.probe, self.probe_size)
        if self.rank > examples:
            raise ValueError(
                f"rank={self.rank} directions cannot be found from the gradients of {examples} public examples; raise "
                "probe_size (and give the probe more of them) or lower rank"
            )

    @property
    def name(self) -> str:
        """Short name: gep, or b-gep without the residual."""
        return "b-gep" if self.residual_norm is None else "gep"

    @property
    def clipping(self) -> str:
        """The clipping that a plan must have; its sensitivity follows from it."""
        return clipping_of(self.residual_norm)

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        return described(self, self.name)

    def due(self, step: int) -> bool:
        """Whether the subspace is to be rebuilt before this step (from 0)."""
        return step % self.every == 0

    def run_at(self, step: int) -> ProbeRun:
        """The probe of one rebuild."""
        return run_of(self, step)

    def build(
        self, model: nn.Module, capture: Capture, step: int, rules: Mapping[str, str] | None = None
    ) -> Basis:
        """Find the subspace at the model's present parameters.

        Args:
            model: any module; parameters, gradients, buffers, modes and the global random state stay as they are.
            capture: maps (model, loss) to layer name and block, as for `KFAC.build`.
            step: step of training; with `seed` it names the public random stream.
            rules: layer name to kind; tells which layers the probe did not reach.

        Raises:
            ValueError: gradients that are not finite; more directions than a group has parameters; a layer that the probe does
                not reach where the residual is dropped.
        """
        groups: list[_Group] = []
        bases: list[Tensor] = []
        with undisturbed(model), torch.no_grad():
            for _ in range(self.power_iterations):
                images: list[Tensor] = []
                for piece in blocks_on_probe(model, capture, self.run_at(step)):
                    known = {n: b for n in piece.blocks if isinstance(b := write_out_patches(piece.blocks[n]), KNOWN)}
                    if not groups:
                        groups = _groups(known, self.rank, self.groups)
                        bases = _gaussian(groups, known, public_generator(self.seed, step, "subspace"))
                    images = images or [torch.zeros_like(basis) for basis in bases]
                    for group, basis, image in zip(groups, bases, images, strict=True):
                        group.add_image(known, basis, image)
                    del piece, known  # or they stay in memory beside the next ones
                bases = [g.orthonormal(image) for g, image in zip(groups, images, strict=True)]
            spans = _spans(groups, bases)
            defect = max(g.defect(basis) for g, basis in zip(groups, bases, strict=True))
        missing = [name for name in rules or {} if name not in spans]
        if missing and self.residual_norm is None:
            raise ValueError(
                f"layer '{missing[0]}' is {UNREACHED}, so that it would never move without a residual; set residual_norm, freeze "
                "the layer, or take a probe that reaches it"
            )
        rows = [group.row(i) for i, group in enumerate(groups)] + [identity_row(name) for name in missing]
        metric = Subspace(spans, float(self.embedding_norm), self.residual_norm, self.share, defect)
        return Basis(metric=metric, step=step, report=tuple(rows))


@dataclass(frozen=True)
class _Group:
    """Neighbouring layers that share a subspace.

    Attributes:
        layers: layer name to the shapes of its gradients.
        rank: directions k.
    """

    layers: Mapping[str, Shapes]
    rank: int

    @property
    def size(self) -> int:
        """Parameters p."""
        return sum(_size(shapes) for shapes in self.layers.values())

    def columns(self) -> dict[str, slice]:
        """Layer name to its columns in Lᵀ `[k, p]`."""
        found, start = {}, 0
        for name, shapes in self.layers.items():
            found[name] = slice(start, start + _size(shapes))
            start = found[name].stop
        return found

    def add_image(self, blocks: Mapping[str, Block], basis: Tensor, image: Tensor) -> None:
        """Add Lᵀ Ĝᵀ Ĝ over some public examples to `image` `[k, p]`."""
        flat = {name: _flat(blocks[name]) for name in self.layers if name in blocks}
        columns = self.columns()
        products = torch.stack([g @ basis[:, columns[name]].T for name, g in flat.items()]).sum(0)
        for name, g in flat.items():
            image[:, columns[name]].addmm_(products.T, g)

    def orthonormal(self, image: Tensor) -> Tensor:
        """Orthonormal rows that span those of `image`, by Householder reflections; any others where it is deficient.

        Raises:
            ValueError: the image is not finite.
        """
        top = max(abs(float(x)) for x in torch.aminmax(image))
        if not math.isfinite(top):
            raise ValueError(
                f"the public gradients of {self._names} contain NaN or infinity, or overflow when squared; check the probe's "
                "scale and the model's parameters"
            )
        return torch.linalg.qr((image / top if top > 0 else image).T)[0].T

    def defect(self, basis: Tensor) -> float:
        """‖Lᵀ L − I‖, from above by its Frobenius norm, in float64."""
        gram = torch.zeros(self.rank, self.rank, dtype=torch.float64, device=basis.device)
        for part in basis.split(1 << 14, 1):
            wide = part.double()
            gram.addmm_(wide, wide.T)
        return float((gram - torch.eye(self.rank, dtype=torch.float64, device=basis.device)).norm())

    def row(self, number: int) -> dict[str, Any]:
        """The row of the report."""
        found = identity_row(", ".join(self.layers), f"{self.rank} public directions")
        return found | {"side": f"group {number}", "dim": self.size, "kind": "subspace", "rank": self.rank}

    @property
    def _names(self) -> str:
        return ", ".join(f"'{name}'" for name in self.layers)


def _size(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _shapes(block: Block) -> dict[str, tuple[int, ...]]:
    """Role to the shape of one example's gradient; parameters of a matrix are one entry ""."""
    if isinstance(block, PerExample):
        return {role: tuple(block.grads[role].shape[1:]) for role in sorted(block.grads)}
    first = block.select(slice(0, 1)).per_example()
    return {"": (math.prod(first.shape[:-1]), first.shape[-1])}


def _flat(block: Block) -> Tensor:
    """Gradients `[n, p]` of one layer, in the order of `_shapes`."""
    if isinstance(block, PerExample):
        return torch.cat([block.grads[role].reshape(block.batch_size, -1) for role in sorted(block.grads)], 1)
    return block.per_example().reshape(block.batch_size, -1)


def _groups(blocks: Mapping[str, Block], rank: int, most: int) -> list[_Group]:
    """Layers in the model's order, cut where a group has its share of the parameters.

    Raises:
        ValueError: a group would have as many directions as parameters, or none.
    """
    shapes = {name: _shapes(block) for name, block in blocks.items()}
    total, before = sum(map(_size, shapes.values())), 0
    cut: dict[int, dict[str, Shapes]] = {}
    for name, shape in shapes.items():
        middle = before + _size(shape) / 2
        cut.setdefault(min(most - 1, int(most * middle / max(total, 1))), {})[name] = shape
        before += _size(shape)
    members = list(cut.values())
    ranks = _ranks([sum(map(_size, layers.values())) for layers in members], rank)
    groups = [_Group(layers, k) for layers, k in zip(members, ranks, strict=True)]
    for group in groups:
        if not 0 < group.rank < group.size:
            raise ValueError(
                f"rank={rank} gives the layers {group._names} {group.rank} directions of {group.size} parameters; it must be at "
                f"least one and fewer than there are parameters: change rank, or groups={most}"
            )
    return groups


def _ranks(sizes: Sequence[int], rank: int) -> list[int]:
    """`rank` in parts proportional to the square roots of the sizes, the largest remainders rounded up."""
    roots = [math.sqrt(size) for size in sizes]
    exact = [rank * root / sum(roots) for root in roots]
    found = [int(x) for x in exact]
    for i in sorted(range(len(sizes)), key=lambda i: found[i] - exact[i])[: rank - sum(found)]:
        found[i] += 1
    return found


def _gaussian(groups: Sequence[_Group], blocks: Mapping[str, Block], generator: torch.Generator) -> list[Tensor]:
    """Gaussian starts `[k, p]` in the type and on the device of the gradients."""
    flat = _flat(next(iter(blocks.values())).select(slice(0, 1))) if blocks else torch.zeros(0)
    starts = [torch.randn(g.rank, g.size, generator=generator) for g in groups]
    return [start.to(flat) for start in starts]


def _spans(groups: Sequence[_Group], bases: Sequence[Tensor]) -> dict[str, Span]:
    """Layer name to its rows of the basis."""
    spans: dict[str, Span] = {}
    start = 0
    for group, basis in zip(groups, bases, strict=True):
        for name, columns in group.columns().items():
            shapes, own = group.layers[name], basis[:, columns]
            pieces = own.split([math.prod(shape) for shape in shapes.values()], 1)
            vectors = {r: x.reshape(group.rank, *shapes[r]).contiguous() for r, x in zip(shapes, pieces, strict=True)}
            spans[name] = Span(vectors, start, float(torch.linalg.vector_norm(own, dtype=torch.float64)))
        start += group.rank
    return spans
