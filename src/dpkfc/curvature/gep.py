"""GEP: split private gradients along a subspace of public gradients, then clip both parts.

    Ĝ public gradients [m, p] of a group of layers
    L ← Ĝᵀ Ĝ L made orthonormal, from a Gaussian L [p, k]
    w = Lᵀ g,  r = g − L w,  one Gaussian over (w / S₁, r / S₂)
    step (1 / B) (S₁ L w̃ + S₂ r̃);  B-GEP drops r̃

L depends on the probe, a public random stream and the released parameters: it costs no privacy.
Embedding and residual are ONE release of sensitivity √2 of the same sample. With noise σ on either
part a step is charged as (q, σ / √2). The authors' code adds up the costs of two releases of
(q, σ), as if each had a sample of its own; that cost is too small.

Source: Yu, Zhang, Chen, Liu, "Do not let privacy overbill utility" (ICLR 2021), Algorithm 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_in_range, check_positive
from dpkfc.curvature.base import PreconditionerState, ProbePreconditioner, probe_examples
from dpkfc.curvature.eigen import largest_entry
from dpkfc.curvature.layer_factors import Rules
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import Capture, ProbeLoss, public_generator, run_probe
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.refresh_group import assign_owners
from dpkfc.curvature.report import UNREACHED, report_row
from dpkfc.linalg.blocks import Block, Blocks
from dpkfc.linalg.metric import Shape
from dpkfc.linalg.subspace import Span, Subspace, clipping_of

Shapes = Mapping[str, Shape]
"""Role to shape; the role "" is weight and bias as one matrix."""


@dataclass(frozen=True, kw_only=True)
class GEP(ProbePreconditioner):
    """How the subspace is found, and how gradients are clipped along it.

    Use it as `PrivacyConfig(preconditioner=GEP(...), clipping="embedding_residual")`, or with
    `clipping="embedding"` to drop the residual. Memory: `rank` numbers for every parameter of a
    group, twice while the subspace is built.

    Attributes:
        probe: source of public examples; see `probes`.
        rank: directions k of all groups together. A group has a part of them in proportion to
            √(its parameters).
        embedding_norm: S₁, to which embeddings are clipped.
        residual_norm: S₂, to which residuals are clipped. None drops the residual (B-GEP): the step
            stays in the subspace.
        share: fraction s in (0, 1) of the embedding in the cost of a release. The noise on w / S₁
            is σ / √(2 s) and that on r / S₂ is σ / √(2 (1 − s)), σ being the plan's `stddev`. Read
            only with a residual.
        groups: neighbouring layers share a subspace. The layers are cut into at most this many
            groups of about equal size.
        power_iterations: multiplications by ĜᵀĜ, one pass over the probe each.
        every: steps between rebuilds.
        probe_size: public examples m, at least as many as directions. None takes all of the probe,
            256 of an endless one. A public constant, never the size of a private batch.
        chunk: public examples in one forward pass; bounds memory.
        labels: `uniform` at random (the paper's), `given` takes the probe's, `model` draws them
            from the model's predictions.
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
    loss: ProbeLoss | None = None
    seed: int = 0

    counts = ("rank", "groups", "power_iterations", "every", "chunk")

    def __post_init__(self) -> None:
        self._check()
        check_positive("embedding_norm", self.embedding_norm)
        if self.residual_norm is not None:
            check_positive("residual_norm", self.residual_norm)
        check_in_range("share", self.share, "(0, 1)")
        examples = probe_examples(self.probe, self.probe_size)
        if self.rank > examples:
            raise ValueError(
                f"rank={self.rank} directions cannot be found from the gradients of {examples} "
                "public examples; raise probe_size, with a probe that large, or lower rank"
            )

    @property
    def name(self) -> str:
        """Short name: gep, or b-gep without the residual."""
        if self.residual_norm is None:
            return "b-gep"
        return "gep"

    @property
    def required_clipping(self) -> str:
        """The clipping that a plan must have; the sensitivity follows from it."""
        return clipping_of(self.residual_norm)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the plan's hash and the privacy card."""
        return self._describe(self.name)

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Rules | None = None,
    ) -> PreconditionerState:
        """Find the subspace at the model's present parameters.

        Args:
            model: any module; parameters, gradients, buffers, modes and the global random state
                stay as they are.
            capture: maps (model, loss) to layer name and block, as for `KFAC.build`.
            step: step of training; with `seed` it names the public random stream.
            rules: layer name to rule; shows which layers the probe did not reach.

        Raises:
            ValueError: gradients that are not finite, more directions than a group has parameters,
                or without a residual a layer that the probe does not reach.
        """
        with preserve_model(model), torch.no_grad():
            subspaces = self._find_subspaces(model, capture, step)
            spans = _make_spans(subspaces)
            defect = max(group.defect(basis) for group, basis in subspaces)
        missing = [name for name in rules or {} if name not in spans]
        if missing and self.residual_norm is None:
            raise ValueError(
                f"layer '{missing[0]}' is {UNREACHED}, so it would never move without a residual; "
                "set residual_norm, freeze the layer, or use a probe that reaches it"
            )
        report = [group.report_row(number) for number, (group, _) in enumerate(subspaces)]
        report += [report_row(name) for name in missing]
        embedding_norm = float(self.embedding_norm)
        metric = Subspace(spans, embedding_norm, self.residual_norm, self.share, defect)
        return PreconditionerState(metric=metric, step=step, report=tuple(report))

    def _find_subspaces(
        self, model: nn.Module, capture: Capture, step: int
    ) -> list[tuple[_Group, Tensor]]:
        """Return the groups of layers, each with its basis Lᵀ `[k, p]`."""
        subspaces: list[tuple[_Group, Tensor]] = []
        for _ in range(self.power_iterations):
            images: list[Tensor] = []
            for microbatch in run_probe(model, capture, self.probe_spec(step)):
                blocks = _known_blocks(microbatch.blocks)
                if not subspaces:
                    generator = public_generator(self.seed, step, "subspace")
                    groups = _make_groups(blocks, self.rank, self.groups)
                    subspaces = _gaussian_starts(groups, blocks, generator)
                if not images:
                    images = [torch.zeros_like(basis) for _, basis in subspaces]
                for (group, basis), image in zip(subspaces, images, strict=True):
                    group.add_image(blocks, basis, image)
                # Otherwise these stay in memory next to the next ones.
                del microbatch, blocks
            groups = [group for group, _ in subspaces]
            subspaces = []
            for group, image in zip(groups, images, strict=True):
                basis = group.orthonormalize(image)
                subspaces.append((group, basis))
        return subspaces


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
        """Return layer name to its columns in Lᵀ `[k, p]`."""
        columns = {}
        start = 0
        for name, shapes in self.layers.items():
            stop = start + _size(shapes)
            columns[name] = slice(start, stop)
            start = stop
        return columns

    def add_image(self, blocks: Blocks, basis: Tensor, image: Tensor) -> None:
        """Add Lᵀ Ĝᵀ Ĝ over some public examples to `image` `[k, p]`."""
        gradients = []
        projections = []
        for name, columns in self.columns().items():
            if name in blocks:
                # `[m, columns]`
                gradient = blocks[name].flatten()
                gradients.append((columns, gradient))
                directions = basis[:, columns].T
                projections.append(gradient @ directions)
        # `[m, k]`
        products = torch.stack(projections)
        products = products.sum(0)
        for columns, gradient in gradients:
            image[:, columns].addmm_(products.T, gradient)

    def orthonormalize(self, image: Tensor) -> Tensor:
        """Return orthonormal rows that span the rows of `image`, by Householder reflections.

        Rows of a deficient image are completed by arbitrary ones.

        Raises:
            ValueError: the image is not finite.
        """
        largest = largest_entry(image)
        if not math.isfinite(largest):
            raise ValueError(
                f"the public gradients of {self.quoted_names} contain NaN or infinity, or overflow "
                "when squared; check the probe's scale and the model's parameters"
            )
        if largest > 0:
            image = image / largest
        columns, _ = torch.linalg.qr(image.T)
        return columns.T

    def defect(self, basis: Tensor) -> float:
        """Return an upper bound of ‖Lᵀ L − I‖: its Frobenius norm, in float64."""
        rank = self.rank
        gram = basis.new_zeros(rank, rank, dtype=torch.float64)
        for part in basis.split(1 << 14, 1):
            wide = part.double()
            gram.addmm_(wide, wide.T)
        gram.diagonal().sub_(1)
        return float(gram.norm())

    def report_row(self, number: int) -> dict[str, Any]:
        """Return the row of the report."""
        names = ", ".join(self.layers)
        return report_row(
            names,
            side=f"group {number}",
            kind="subspace",
            dim=self.size,
            rank=self.rank,
            note=f"{self.rank} public directions",
        )

    @property
    def quoted_names(self) -> str:
        """The names of the layers, for a message."""
        return ", ".join(f"'{name}'" for name in self.layers)


def _known_blocks(blocks: Blocks) -> dict[str, Block]:
    """Return the blocks whose gradients can be formed, formed one after another."""
    known = {}
    for name in blocks:
        block = blocks[name].explicit()
        if block.kind is not None:
            known[name] = block
    return known


def _size(shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _make_groups(blocks: Blocks, rank: int, most: int) -> list[_Group]:
    """Return at most `most` groups of consecutive layers with about equally many parameters.

    Raises:
        ValueError: a group would have as many directions as parameters, or none.
    """
    shapes = {name: block.gradient_shapes for name, block in blocks.items()}
    sizes = {name: _size(shape) for name, shape in shapes.items()}
    layers: dict[int, dict[str, Shapes]] = defaultdict(dict)
    parameters: dict[int, int] = defaultdict(int)
    # Groups share layers as processes do.
    for name, number in assign_owners([sizes] * most).items():
        layers[number][name] = shapes[name]
        parameters[number] += sizes[name]
    ranks = _split_rank([*parameters.values()], rank)
    groups = []
    for own_layers, own_rank in zip(layers.values(), ranks, strict=True):
        group = _Group(own_layers, own_rank)
        groups.append(group)
        if not 0 < group.rank < group.size:
            raise ValueError(
                f"rank={rank} gives the layers {group.quoted_names} {group.rank} directions of "
                f"{group.size} parameters, not 1 to {group.size - 1}; change rank or groups={most}"
            )
    return groups


def _split_rank(sizes: Sequence[int], rank: int) -> list[int]:
    """Split `rank` in proportion to the square roots of the sizes; round up largest remainders."""
    roots = [math.sqrt(size) for size in sizes]
    total = sum(roots)
    exact = [rank * root / total for root in roots]
    ranks = [int(x) for x in exact]
    remaining = rank - sum(ranks)
    numbers = range(len(sizes))
    by_remainder = sorted(numbers, key=lambda i: ranks[i] - exact[i])
    for i in by_remainder[:remaining]:
        ranks[i] += 1
    return ranks


def _gaussian_starts(
    groups: Sequence[_Group], blocks: Blocks, generator: torch.Generator
) -> list[tuple[_Group, Tensor]]:
    """Return groups with Gaussian starts `[k, p]` in the dtype and on the device of gradients."""
    subspaces = []
    for group in groups:
        first = next(iter(group.layers))
        example = blocks[first].select(slice(0, 1))
        start = torch.randn(group.rank, group.size, generator=generator)
        start = start.to(example.flatten())
        subspaces.append((group, start))
    return subspaces


def _make_spans(subspaces: Sequence[tuple[_Group, Tensor]]) -> dict[str, Span]:
    """Return layer name to its rows of the basis."""
    spans = {}
    start = 0
    for group, basis in subspaces:
        for name, columns in group.columns().items():
            own = basis[:, columns]
            vectors = {}
            first = 0
            for role, shape in group.layers[name].items():
                last = first + math.prod(shape)
                piece = own[:, first:last]
                piece = piece.reshape(group.rank, *shape)
                vectors[role] = piece.contiguous()
                first = last
            norm = float(torch.linalg.vector_norm(own, dtype=torch.float64))
            spans[name] = Span(vectors, start, norm)
        start += group.rank
    return spans
