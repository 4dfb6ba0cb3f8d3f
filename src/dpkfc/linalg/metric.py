"""Metrics: the values in which curvature hands a preconditioner to the norm engine.

A metric assigns each layer a linear map `z = U_out g U_in` of its per-example gradient. Norms are taken of z, the clipped
sum is mapped once, noise is added in the coordinates of z. A layer without an entry keeps the identity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Identity:
    """The side `U = factor · I`."""

    factor: float = 1.0

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        return x if self.factor == 1.0 else x * self.factor

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        return self.apply(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1))

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return self.apply(x)

    @property
    def bound(self) -> float:
        """Operator norm of U."""
        return abs(self.factor)

    def scaled(self, factor: float) -> Identity:
        """The side `factor · U`."""
        return Identity(self.factor * factor)

    def inverse(self) -> Identity:
        """The side `U⁻¹`."""
        return Identity(1 / self.factor)

    def square_diagonal(self) -> Tensor:
        """The diagonal of U², as something that broadcasts over `[d]`."""
        return torch.tensor([self.factor**2], dtype=torch.float64)


@dataclass(frozen=True)
class Diagonal:
    """The side `U = diag(scale)`, scale `[d]`."""

    scale: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        return x * self.scale

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        return self.apply(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1))

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return x * self.scale.unsqueeze(-1)

    @cached_property  # a card is asked once a metric, not in every step
    def bound(self) -> float:
        """Operator norm of U."""
        return float(self.scale.abs().max())

    def scaled(self, factor: float) -> Diagonal:
        """The side `factor · U`."""
        return Diagonal(self.scale * factor)

    def inverse(self) -> Diagonal:
        """The side `U⁻¹`."""
        return Diagonal(1 / self.scale)

    def square_diagonal(self) -> Tensor:
        """The diagonal of U² `[d]`."""
        return self.scale.square()


@dataclass(frozen=True)
class Dense:
    """The side `U = root`, a symmetric matrix `[d, d]` whose operator norm is `norm`."""

    root: Tensor
    norm: float

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`; costs d² per row."""
        return x @ self.root

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        return torch.addmm(self.root[-1], x.reshape(-1, x.shape[-1]), self.root[:-1]).view(*x.shape[:-1], -1)

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        return self.root @ x

    @property
    def bound(self) -> float:
        """Operator norm of U."""
        return self.norm

    def scaled(self, factor: float) -> Dense:
        """The side `factor · U`."""
        return Dense(self.root * factor, self.norm * abs(factor))

    def inverse(self) -> Dense:
        """The side `U⁻¹`."""
        inverse = torch.linalg.inv(self.root.double())
        return Dense(inverse.to(self.root.dtype), float(torch.linalg.matrix_norm(inverse, 2)))

    def square_diagonal(self) -> Tensor:
        """The diagonal of U² `[d]`."""
        return self.root.square().sum(1)


@dataclass(frozen=True)
class LowRank:
    """The side `U = tail · I + V diag(scale − tail) Vᵀ` with orthonormal V `[d, k]` and scale `[k]`.

    The exact root of a factor that has only k eigenvalues besides its damping: costs 2·k·d per row instead of d².
    """

    vectors: Tensor
    scale: Tensor
    tail: float

    def apply(self, x: Tensor) -> Tensor:
        """Map the last axis of x `[..., d]`."""
        coordinates = (x @ self.vectors) * (self.scale - self.tail)
        flat = torch.addmm(
            x.reshape(-1, x.shape[-1]),
            coordinates.reshape(-1, coordinates.shape[-1]),
            self.vectors.T,
            beta=self.tail,
        )
        return flat.view(x.shape)

    def apply_(self, x: Tensor) -> Tensor:
        """Map the last axis of a contiguous x `[..., d]` in its own memory."""
        rows = x.view(-1, x.shape[-1])
        coordinates = (rows @ self.vectors).mul_(self.scale - self.tail)
        rows.addmm_(coordinates, self.vectors.T, beta=self.tail)
        return x

    def apply_homogeneous(self, x: Tensor) -> Tensor:
        """Map (x, 1) for x `[..., d - 1]` without writing the column of ones out first."""
        rows, d = x.reshape(-1, x.shape[-1]), x.shape[-1]
        coordinates = torch.addmm(self.vectors[-1], rows, self.vectors[:-1]).mul_(self.scale - self.tail)
        out = coordinates @ self.vectors.T
        out[:, :d].add_(rows, alpha=self.tail)
        out[:, d] += self.tail
        return out.view(*x.shape[:-1], d + 1)

    def apply_left(self, x: Tensor) -> Tensor:
        """Map the second-last axis of x `[..., d, n]`: U x without a transposed copy."""
        coordinates = (self.scale - self.tail).unsqueeze(-1) * (self.vectors.T @ x)
        return self.tail * x + self.vectors @ coordinates

    @cached_property  # a card is asked once a metric, not in every step
    def bound(self) -> float:
        """Operator norm of U."""
        return max(abs(self.tail), float(self.scale.abs().max()) if self.scale.numel() else 0.0)

    def scaled(self, factor: float) -> LowRank:
        """The side `factor · U`."""
        return LowRank(self.vectors, self.scale * factor, self.tail * factor)

    def inverse(self) -> LowRank:
        """The side `U⁻¹`."""
        return LowRank(self.vectors, 1 / self.scale, 1 / self.tail)

    def square_diagonal(self) -> Tensor:
        """The diagonal of U² `[d]`."""
        return self.tail**2 + self.vectors.square() @ (self.scale.square() - self.tail**2)


Side = Identity | Diagonal | Dense | LowRank


@dataclass(frozen=True)
class Kronecker:
    """The map `z = output · g · input` of a matrix-shaped gradient g `[..., d_out, d_in]`.

    `input` acts on the input features (the homogeneous coordinate last), `output` on the output features.
    """

    input: Side = field(default_factory=Identity)
    output: Side = field(default_factory=Identity)

    @property
    def is_identity(self) -> bool:
        """Whether the map changes nothing."""
        return self.input == Identity() and self.output == Identity()

    @property
    def folded(self) -> Kronecker:
        """The same map, with a multiple of the identity on the output side moved to an input side that is a few vectors.

        Rows of output gradients, or whole gradients, are then not multiplied by a number, which is a copy of each.
        """
        if isinstance(self.output, Identity) and self.output.factor != 1.0 and isinstance(self.input, LowRank | Diagonal):
            return Kronecker(self.input.scaled(self.output.factor))
        return self

    def whiten(self, g: Tensor) -> Tensor:
        """z for g `[..., d_out, d_in]`."""
        sides = self.folded
        return sides.output.apply_left(sides.input.apply(g))

    def whiten_(self, g: Tensor) -> None:
        """Put z into the memory of g `[n, d_out, d_in]`."""
        sides = self.folded
        if isinstance(sides.input, LowRank) and sides.output == Identity() and g.is_contiguous():
            sides.input.apply_(g)
        else:
            g.copy_(self.whiten(g))

    def scaled(self, factor: float) -> Kronecker:
        """The map `factor · z`."""
        return replace(self, output=self.output.scaled(factor))

    def inverse(self) -> Kronecker:
        """The map that undoes this one."""
        return Kronecker(self.input.inverse(), self.output.inverse())

    def variance(self) -> Tensor:
        """Variance of every entry of `whiten(z)` for z of unit white noise; broadcasts to `[d_out, d_in]`."""
        of_output, of_input = self.output.square_diagonal(), self.input.square_diagonal()
        device = of_input.device if isinstance(self.output, Identity) else of_output.device  # an identity is on none
        return torch.outer(of_output.to(device), of_input.to(device))


@dataclass(frozen=True)
class Eigenbasis:
    """The symmetric map `z = Q_out (scale ⊙ (Q_outᵀ g Q_in)) Q_inᵀ` of a matrix-shaped gradient `[..., d_out, d_in]`.

    What a root of a Kronecker product becomes when its eigenvalues are changed one by one (a floor on the product), and,
    without rotations, any diagonal map. Norms do not factor over several positions: gradients are formed.

    Attributes:
        scale: `[d_out, d_in]`, positive.
        input: Q_in `[d_in, d_in]` with orthonormal columns, None for the identity; the homogeneous coordinate is the last row.
        output: Q_out `[d_out, d_out]`, None for the identity.
        rest: where Q_in has only k columns `[d_in, k]` and scale is `[d_out, k]`: the one scale, positive, of all that is
            orthogonal to them; None where Q_in is complete.
    """

    scale: Tensor
    input: Tensor | None = None
    output: Tensor | None = None
    rest: float | None = None

    @property
    def is_identity(self) -> bool:
        """Never: an entry that changes nothing is left out of a metric."""
        return False

    @cached_property  # a card is asked once a metric, not in every step
    def bound(self) -> float:
        """Operator norm of the map."""
        return max(float(self.scale.abs().max()), self.rest or 0.0)

    def rotate(self, g: Tensor) -> Tensor:
        """Q_outᵀ g Q_in for g `[..., d_out, d_in]`."""
        g = g if self.input is None else g @ self.input
        return g if self.output is None else self.output.T @ g

    def rotate_back(self, z: Tensor) -> Tensor:
        """Q_out z Q_inᵀ."""
        z = z if self.input is None else z @ self.input.T
        return z if self.output is None else self.output @ z

    def whiten(self, g: Tensor) -> Tensor:
        """The map of g `[..., d_out, d_in]`."""
        if self.rest is None:
            return self.rotate_back(self.rotate(g) * self.scale)
        return g * self.rest + self.rotate_back(self.rotate(g) * (self.scale - self.rest))

    def whiten_(self, g: Tensor) -> None:
        """Put z into the memory of g `[n, d_out, d_in]`."""
        g.copy_(self.whiten(g))

    def parted(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """What is turned and scaled `[..., d_out, k]`, and what keeps its direction, scaled; their squares add up to ‖z‖²."""
        assert self.rest is not None and self.input is not None
        turned = g @ self.input
        outside = (g - turned @ self.input.T) * self.rest
        return (turned if self.output is None else self.output.T @ turned) * self.scale, outside

    def complete(self) -> Eigenbasis:
        """The same map with all of Q_in written out."""
        if self.rest is None or self.input is None:
            return self
        k, d = self.scale.shape[1], self.input.shape[0]
        others = torch.linalg.qr(self.input.double(), mode="complete").Q[:, k:].to(self.input)
        even = self.scale.new_full((self.scale.shape[0], d - k), self.rest)
        return Eigenbasis(torch.cat([self.scale, even], 1), torch.cat([self.input, others], 1), self.output)

    def scaled(self, factor: float) -> Eigenbasis:
        """The map `factor · z`."""
        return replace(self, scale=self.scale * factor, rest=None if self.rest is None else self.rest * factor)

    def inverse(self) -> Eigenbasis:
        """The map that undoes this one."""
        return replace(self, scale=1 / self.scale, rest=None if self.rest is None else 1 / self.rest)

    def variance(self) -> Tensor:
        """Variance of every entry of `whiten(z)` for z of unit white noise `[d_out, d_in]`: (Q_out²) scale² (Q_in²)ᵀ."""
        even = 0.0 if self.rest is None else self.rest**2
        squares = self.scale.square() - even
        squares = squares if self.input is None else squares @ self.input.square().T
        return (squares if self.output is None else self.output.square() @ squares) + even


@dataclass(frozen=True)
class Elementwise:
    """The map `z = scale ⊙ g`, one tensor of the parameter's shape per role."""

    scale: Mapping[str, Tensor]

    def scaled(self, factor: float) -> Elementwise:
        """The map `factor · z`."""
        return Elementwise({role: s * factor for role, s in self.scale.items()})

    def inverse(self) -> Elementwise:
        """The map that undoes this one."""
        return Elementwise({role: 1 / s for role, s in self.scale.items()})


Entry = Kronecker | Eigenbasis | Elementwise
Metric = Mapping[str, Entry]


def scale_metric(metric: Metric, factor: float) -> Metric:
    """The metric `factor · U` for a positive finite factor.

    Raises:
        ValueError: if the factor is not positive and finite.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"a metric can only be scaled by a positive finite factor, got {factor}")
    return {name: entry.scaled(factor) for name, entry in metric.items()}


# --------------------------------------------------------------------------------------------------
# The value in which a public subspace is handed to the norm engine: an orthonormal basis L over
# groups of layers.
#
#     embedding w = Lᵀ g,   residual r = g − L w,   stacked (α w / S₁, β r / S₂), clipped to the norms α and β
#
# One Gaussian is added to the stacked vector, whose sensitivity is √(α² + β²): √2 with both parts,
# 1 for the embedding alone.

EMBEDDING = "<embedding>"  # name of the released embedding beside the names of parameters


def clipping_of(residual_norm: float | None) -> str:
    """What the clipping is called, with the residual or without; the sensitivity follows from the name."""
    return "embedding" if residual_norm is None else "embedding_residual"


@dataclass(frozen=True)
class Span:
    """One layer's rows of the basis of its group.

    Attributes:
        vectors: the k directions of the group, role to `[k, *parameter.shape]`; a layer whose weight and bias are one matrix
            has them under "" alone, `[k, d_out, d_in]`, in the form of its clipped sum.
        start: where those k begin in the embedding of the whole gradient.
        length: Frobenius norm of the vectors.
    """

    vectors: Mapping[str, Tensor]
    start: int
    length: float

    @property
    def rank(self) -> int:
        """Directions k."""
        return next(iter(self.vectors.values())).shape[0]

    @property
    def columns(self) -> slice:
        """The entries of the embedding that belong to this layer's group."""
        return slice(self.start, self.start + self.rank)

    def combine(self, embedding: Tensor) -> Tensor | dict[str, Tensor]:
        """This layer's part of L w, in the form of its clipped sum, for the embedding of the whole gradient `[K]`."""
        w = embedding[self.columns]
        return self._form({role: torch.tensordot(w.to(v.dtype), v, dims=1) for role, v in self.vectors.items()})

    @cached_property
    def diagonal(self) -> Tensor | dict[str, Tensor]:
        """This layer's part of the diagonal of L Lᵀ: the variance of L w for w of unit white noise."""
        return self._form({role: v.square().sum(0) for role, v in self.vectors.items()})

    @staticmethod
    def _form(tensors: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        return tensors[""] if "" in tensors else tensors


@dataclass(frozen=True, eq=False)
class Subspace(Mapping[str, Entry]):
    """A metric that leaves every layer as it is, and a basis along which the gradient is then split in two.

    Attributes:
        spans: layer name to its rows; the gradient of an absent layer is residual alone.
        embedding_norm: S₁.
        residual_norm: S₂; None drops the residual.
        share: α² / 2 where there are two parts, with α² + β² = 2: the embedding's share in what a release costs.
        defect: upper bound of ‖Lᵀ L − I‖.
    """

    spans: Mapping[str, Span]
    embedding_norm: float
    residual_norm: float | None
    share: float = 0.5
    defect: float = 0.0

    @property
    def clipping(self) -> str:
        """The clipping that this split needs."""
        return clipping_of(self.residual_norm)

    @property
    def embedding_scale(self) -> float:
        """α / S₁."""
        return (1.0 if self.residual_norm is None else math.sqrt(2 * self.share)) / self.embedding_norm

    @property
    def residual_scale(self) -> float:
        """β / S₂; 0 where the residual is dropped."""
        return 0.0 if self.residual_norm is None else math.sqrt(2 * (1 - self.share)) / self.residual_norm

    @property
    def width(self) -> int:
        """Entries K of the embedding."""
        return max(span.columns.stop for span in self.spans.values())

    def to(self, device: torch.device | str) -> Subspace:
        """The same on another device."""
        spans = {n: replace(s, vectors={r: v.to(device) for r, v in s.vectors.items()}) for n, s in self.spans.items()}
        return replace(self, spans=spans)

    def __getitem__(self, name: str) -> Entry:
        """No layer has a map of its own."""
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def __len__(self) -> int:
        """Zero."""
        return 0


# --------------------------------------------------------------------------------------------------
# A preconditioner as a flat dictionary of tensors, and back, without loss and without unpickling.
#
# Structure, names and Python floats go into one JSON text stored as bytes (`repr` of a float is
# exact); tensors are stored under names with an index, since a layer's name may hold any character.

_Held = TypeVar("_Held", bound=Identity | Diagonal | Dense | LowRank | Eigenbasis)
_META = "meta"
_STORED = "stored"


def pack(metric: Metric, spectra: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Flatten a metric, spectra and JSON-able values into tensors."""
    tensors = _Once()
    entries = [_pack_entry(f"metric.{i}", name, entry, tensors) for i, (name, entry) in enumerate(metric.items())]
    curves: list[list[str]] = []
    for i, (name, sides) in enumerate(spectra.items()):
        for side, values in sides.items():
            key = f"spectrum.{i}.{len(curves)}"
            curves.append([name, side, tensors.put(key, values)])
    text = json.dumps({"metric": entries, "spectra": curves, "rest": dict(rest)})
    tensors.put(_META, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone())
    return tensors.held


class _Once:
    """Tensors by key; one that several layers share is stored under its first key alone."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}

    def put(self, key: str, tensor: Tensor) -> str:
        """The key that the tensor is stored under."""
        known = self._keys.get(id(tensor))
        if known is not None and self.held[known] is tensor:
            return known
        self._keys[id(tensor)] = key
        self.held[key] = tensor
        return key


def _pack_entry(key: str, name: str, entry: Entry, tensors: _Once) -> dict[str, Any]:
    if isinstance(entry, Elementwise):
        roles = {role: tensors.put(f"{key}.{i}", scale) for i, (role, scale) in enumerate(entry.scale.items())}
        return {"layer": name, "elementwise": roles}
    if isinstance(entry, Eigenbasis):
        values = {f.name: getattr(entry, f.name) for f in fields(entry)}
        stored = {k: tensors.put(f"{key}.{k}", x) if isinstance(x, Tensor) else x for k, x in values.items()}
        return {"layer": name, "eigenbasis": stored}
    sides = {side: _pack_side(f"{key}.{side}", getattr(entry, side), tensors) for side in ("input", "output")}
    return {"layer": name, **sides}


def _pack_side(key: str, side: Side, tensors: _Once) -> dict[str, Any]:
    match side:
        case Identity():
            return {"kind": "identity", "factor": side.factor}
        case Diagonal():
            return {"kind": "diagonal", "scale": tensors.put(f"{key}.scale", side.scale)}
        case Dense():
            return {"kind": "dense", "root": tensors.put(f"{key}.root", side.root), "norm": side.norm}
        case LowRank():
            vectors = tensors.put(f"{key}.vectors", side.vectors)
            return {"kind": "lowrank", "vectors": vectors, "scale": tensors.put(f"{key}.scale", side.scale), "tail": side.tail}


def unpack(tensors: Mapping[str, Tensor]) -> tuple[Metric, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `pack` was given.

    Raises:
        ValueError: tensors that `pack` did not write.
    """
    try:
        state = json.loads(bytes(tensors[_META].cpu().tolist()).decode())
        metric = {entry["layer"]: _unpack_entry(entry, tensors) for entry in state["metric"]}
        spectra: dict[str, dict[str, Tensor]] = {}
        for name, side, key in state["spectra"]:
            spectra.setdefault(name, {})[side] = tensors[key]
        return metric, spectra, state["rest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the state of a preconditioner, or a damaged one: {error!r}") from error


def _unpack_entry(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Entry:
    if "elementwise" in entry:
        return Elementwise({role: tensors[key] for role, key in entry["elementwise"].items()})
    if "eigenbasis" in entry:
        stored = entry["eigenbasis"]
        into, out = (None if stored[side] is None else tensors[stored[side]] for side in ("input", "output"))
        rest = stored.get("rest")  # states written before the field existed do not have it
        return Eigenbasis(tensors[stored["scale"]], into, out, None if rest is None else float(rest))
    return Kronecker(_unpack_side(entry["input"], tensors), _unpack_side(entry["output"], tensors))


def _unpack_side(side: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Side:
    match side["kind"]:
        case "identity":
            return Identity(side["factor"])
        case "diagonal":
            return Diagonal(tensors[side["scale"]])
        case "dense":
            return Dense(tensors[side["root"]], side["norm"])
        case "lowrank":
            return LowRank(tensors[side["vectors"]], tensors[side["scale"]], side["tail"])
    raise ValueError(f"unknown side {side['kind']!r}")


def mismatch(shape: Mapping[str, Any], roles: Mapping[str, tuple[int, ...]]) -> str | None:
    """What does not fit between the sides of a layer's map and the shapes of its parameters, or None.

    A weight may be stored as `[d_out, d_in]` or, as in transformers' Conv1D, as `[d_in, d_out]`. Which of the two it is
    follows from the shape it had when the map was built, where that is known.

    Args:
        shape: `kind`, the sizes of the sides and the `stored` shape of the weight, as `Preconditioner.shapes` holds them.
        roles: role to parameter shape, trainable parameters only.
    """
    if shape["kind"] == "elementwise":
        held = {role: tuple(s) for role, s in shape.items() if role not in ("kind", _STORED)}
        return None if held == dict(roles) else f"parameters {dict(roles)}, the preconditioner {held}"
    d_in, d_out = shape["input"][0], shape["output"][0]
    weight = roles.get("weight", (*roles.get("bias", (0,)), 0))
    if shape["kind"] in ("lookup", "tied"):
        rows, columns = (d_in, d_out) if shape["kind"] == "lookup" else (d_out, d_in)
        fits = (weight[0], weight[-1]) == (rows, columns)
        return None if fits else f"a table {tuple(weight)}, the preconditioner one of {(rows, columns)}"
    stored = shape.get(_STORED)
    if "weight" in roles and stored is not None and tuple(stored) != tuple(weight):
        return f"a weight {tuple(weight)}, the preconditioner was built for {tuple(stored)}"
    bias = "bias" in roles
    columns = math.prod(weight[1:]) + bias
    fits = columns == d_in and weight[0] % d_out == 0
    fits = fits or (len(weight) == 2 and (weight[0] + bias, weight[1]) == (d_in, d_out))
    return None if fits else f"a gradient {(weight[0], columns)}, the preconditioner sides {(d_out, d_in)}"


def moved(entry: Entry, device: torch.device | str) -> Entry:
    """The same map with its tensors on a device."""
    if isinstance(entry, Elementwise):
        return Elementwise({role: scale.to(device) for role, scale in entry.scale.items()})
    if isinstance(entry, Eigenbasis):
        return _on(entry, device)
    return Kronecker(_on(entry.input, device), _on(entry.output, device))


def _on(value: _Held, device: torch.device | str) -> _Held:
    tensors = {f.name: getattr(value, f.name) for f in fields(value) if isinstance(getattr(value, f.name), Tensor)}
    return replace(value, **{name: tensor.to(device) for name, tensor in tensors.items()})
