"""Parameters that a forward function reads itself: class tokens, positions, scales, latent queries.

Where such a parameter is added to, multiplied with or set beside what the examples hold, it is handed on as a view with one row
an example. The values are the same, and the backward pass that is made anyway brings every example a gradient of its own: the
module need not run again, and may hold whatever it likes below, dropout too. Torch's function mode shows these uses. What is
used in any other way is left to the per-module fallback, and what was found is compared with the gradient that autograd adds up.

One example decides for nobody else: where its gradient is not finite, it is left out on both sides of every comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vjp
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from dpkfc.gradients.broadcast import marks
from dpkfc.gradients.computed import vectorised
from dpkfc.gradients.sharded import is_divided

if TYPE_CHECKING:
    from dpkfc.gradients.layers import Layer

__all__ = ["Direct", "Passed", "Uses", "direct_parameters"]

Use: TypeAlias = tuple[str, str, int, int]  # role, function, axes before and after
Structure: TypeAlias = tuple[Use, ...]  # of a call

_BROADCASTING = {
    "add", "iadd", "radd", "sub", "isub", "rsub", "subtract", "mul", "imul", "rmul", "multiply", "div", "idiv", "rdiv", "truediv",
    "itruediv", "rtruediv", "divide", "true_divide", "where", "maximum", "minimum",
}  # fmt: skip
_SPREADING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
_SHARED = _SPREADING | _BROADCASTING - {"where"} | {
    "getitem", "unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim",
    "t", "narrow", "select", "to", "type_as", "type", "float", "double", "half", "bfloat16", "contiguous", "clone", "neg", "exp",
    "sigmoid", "tanh", "softplus", "relu", "softmax", "square", "sqrt", "abs",
}  # fmt: skip
_WIDE = (torch.float32, torch.float64)
_STRUCTURES = 100  # of calls that are remembered; one that is not is looked at each time
_RELATIVE = 1e-3  # how far the rows may add up to something else than autograd's own sum
_LARGEST = 2.0**100  # entries of rows that are compared: beyond it, few of them already add up to infinity in float32


@dataclass(frozen=True)
class _Shared:
    """A tensor that is made of one parameter alone: `value = made(parameter)`.

    `rows`: it was spread to as many rows as there are examples, and handed on as theirs. What it meets next may show that they
    are as many by chance: positions in a batch of T examples.
    """

    role: str
    value: Tensor
    made: Callable[[Tensor], Tensor]
    rows: _Rows | None = None


@dataclass(frozen=True, eq=False)
class _Rows:
    """A use: `value = made(parameter)` was handed on with one row an example.

    Attributes:
        shape: of the rows `[N, ...]`, to which the value broadcasts.
        edge: where their gradients arrive.
    """

    role: str
    made: Callable[[Tensor], Tensor]
    shape: torch.Size
    edge: GradientEdge

    def pulled(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Gradients `[N, *parameter.shape]` from those of the rows."""
        rest = (1, *self.shape[1:])
        value, pull = vjp(lambda own: torch.broadcast_to(self.made(own), rest), parameter.detach())[:2]
        return vectorised(lambda g: {"": pull(g.unsqueeze(0))[0]}, gradient.to(value.dtype))[""]


class Uses(TorchFunctionMode):
    """Follows the parameters of one call of a module, between its first and its last operation.

    Attributes:
        rows: the uses that were seen.
        structure: what they were, whatever N is.
        lost: a parameter was used in a way that cannot be followed.
        other_lengths: the uses that spread a parameter to another length than N.
    """

    def __init__(self, parameters: Mapping[str, Tensor], batch_size: int, direct: Direct) -> None:
        super().__init__()
        self.rows: list[_Rows] = []
        self.structure: list[Use] = []
        self.lost = False
        self.other_lengths = set[Use]()
        self._size = batch_size
        self._settled = {use for structure in direct.followed for use in structure} - direct.other_lengths
        self._known = {id(p): _Shared(role, p, lambda own: own) for role, p in parameters.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - torch's own signature
        """One operation of the forward pass: as it is, or with a row an example in place of a parameter."""
        kwargs = kwargs or {}
        if self.lost or not torch.is_grad_enabled() or not self._mentions((*args, *kwargs.values())):
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        sure = [x for x in tensors if self._is_shared(x)]
        shared = sure or [x for x in tensors if id(x) in self._known]
        others = [x for x in tensors if not any(x is y for y in shared)]
        name = getattr(func, "__name__", "").strip("_")
        if name == "get":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        written = self._is_written(func, args)
        if name in _BROADCASTING and others and not written:
            return self._beside(func, name, args, kwargs, others)
        result = func(*args, **kwargs)
        if not any(isinstance(x, Tensor) for x in tree_flatten(result)[0]) or name in ("detach", "data"):
            return result  # a shape, or what has no gradient
        alone = len(shared) == 1 and bool(args) and shared[0] is args[0] and isinstance(result, Tensor)
        followed = alone and not written and name in (_SHARED | {"T", "mT"})
        if not followed or others and name not in ("expand_as", "type_as", "to"):
            self.lost = bool(sure)  # rows of the examples may be used in any way
            return result
        return self._followed(name, self._known[id(args[0])], result, lambda x: func(x, *args[1:], **kwargs))

    def _mentions(self, values: Iterable[Any]) -> bool:
        return any(id(x) in self._known or (isinstance(x, (list, tuple, dict)) and self._inside(x)) for x in values)

    def _is_shared(self, x: Any) -> bool:
        known = self._known.get(id(x))
        return known is not None and known.rows is None

    def _inside(self, x: Any) -> bool:
        return any(id(leaf) in self._known for leaf in tree_flatten(x)[0])

    def _is_written(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether an operation writes to a shared tensor."""
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.startswith("__") or name.startswith("__i") or name == "__setitem__"
        return writes and bool(args) and id(args[0]) in self._known

    def _followed(self, name: str, shared: _Shared, result: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        """What an operation makes of a shared tensor alone: shared too, or rows, where it is spread over the examples."""
        shape, dtype, place = result.shape, result.dtype, result.device
        before = shared.made
        if name in ("expand_as", "type_as", "to"):
            made: Callable[[Tensor], Tensor] = lambda own: before(own).to(place, dtype).expand(shape)  # noqa: E731
        else:
            made = lambda own: again(before(own))  # noqa: E731
        rows, use = shared.rows, (shared.role, name, shared.value.dim(), result.dim())
        if name in _SPREADING and result.dim() and (shared.value.dim() < result.dim() or shared.value.shape[0] == 1):
            if shape[0] != self._size:
                self.other_lengths.add(use)
            elif all(a in (1, b) for a, b in zip(reversed(shared.value.shape), reversed(shape), strict=False)):
                result, rows = self._handed_on(name, shared, result, result.dim()), self.rows[-1]
                if use in self._settled or self._size == 1:
                    return result
        self._known[id(result)] = _Shared(shared.role, result, made, rows)
        return result

    def _beside(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], others: Sequence[Tensor]
    ) -> Any:  # noqa: ANN401
        """An operation in which a shared tensor meets what has the batch in front."""
        most = max(x.dim() for x in others)
        leads = any(x.dim() == most and most and x.shape[0] == self._size for x in others)

        def with_rows(x: Any) -> Any:  # noqa: ANN401
            if not isinstance(x, Tensor) or id(x) not in self._known:
                return x
            shared = self._known[id(x)]
            if not leads or x.dim() > most or (x.dim() == most and x.shape[0] != 1):
                self.lost = self.lost or shared.rows is None
                return x
            rows = x.reshape((1,) * (most - x.dim()) + tuple(x.shape)).expand(self._size, *(-1,) * (most - 1))
            return self._handed_on(name, shared, rows, most)

        return func(*tree_map(with_rows, args), **tree_map(with_rows, kwargs))

    def _handed_on(self, name: str, shared: _Shared, rows: Tensor, most: int) -> Tensor:
        if shared.rows is not None and shared.rows in self.rows:  # they were as many by chance
            i = self.rows.index(shared.rows)
            del self.rows[i], self.structure[i]
        rows = rows.view_as(rows)  # a node of its own: the one of expand(1, ...) may be the parameter itself
        rows.register_hook(_finite_alone)
        rows = rows.view_as(rows)
        self.rows.append(_Rows(shared.role, shared.made, rows.shape, get_gradient_edge(rows)))
        self.structure.append((shared.role, name, shared.value.dim(), most))
        return rows

    def end(self, output: Any) -> None:  # noqa: ANN401
        """The module has returned: what it hands on may hold no parameter as it is."""
        self.lost = self.lost or any(self._is_shared(x) for x in tree_flatten(output)[0])
        self._known = {}


@dataclass
class Direct:
    """What has been seen of the parameters that a layer's module reads itself.

    Attributes:
        followed: structures of calls whose rows were seen to belong to the examples.
        other_lengths: uses that were seen with another length than the batch; where it is the same, that may be by chance.
        opaque: they cannot be followed; the fallback is used from then on.
    """

    followed: set[Structure] = field(default_factory=set)
    other_lengths: set[Use] = field(default_factory=set)
    opaque: bool = False


def direct_parameters(layers: Sequence[Layer], module: nn.Module, size: int | None) -> dict[str, Tensor] | None:
    """The parameters to follow in a call of a module, None where it is left to the fallback.

    A module with nothing below it costs little to run again, and every call of it is then held against single examples.
    """
    if size is None or len(layers) != 1 or layers[0].rule != "fallback" or layers[0].direct.opaque:
        return None
    if type(module).__module__.split(".")[0] == "torch" or hasattr(module, "parametrizations") or not list(module.children()):
        return None
    found: dict[str, Tensor] = {role: module.get_parameter(role) for role in layers[0].parameters}
    return None if any(is_divided(p) for p in found.values()) else found


class Passed:
    """The uses in one forward pass, until the backward pass has brought their gradients.

    Attributes:
        edges: of all rows.
        parameters: of all layers followed, for autograd's own gradient.
        doubtful: of the edges those whose rows have not been seen yet to belong to the examples.
    """

    def __init__(self, calls: Sequence[tuple[Layer, Uses]], batch_size: int) -> None:
        self._calls: dict[str, list[Uses]] = {}
        self._layers = {layer.name: layer for layer, _ in calls}
        for layer, uses in calls:
            self._calls.setdefault(layer.name, []).append(uses)
        for name, several in list(self._calls.items()):
            if any(uses.lost or any(r.shape[0] != batch_size for r in uses.rows) for uses in several):
                self._layers[name].direct.opaque = True
                del self._calls[name]
        self._size = batch_size
        self.edges = [r.edge for several in self._calls.values() for uses in several for r in uses.rows]
        known = {name: self._layers[name].direct.followed for name in self._calls}
        self._new = [name for name, several in self._calls.items() if _structure(several) not in known[name]]
        self.doubtful = [r.edge for name in self._new for uses in self._calls[name] for r in uses.rows]
        self._roles = [(name, role) for name in self._calls for role in self._layers[name].parameters]
        self.parameters = [self._layers[name].tensor(role) for name, role in self._roles]

    def gradients(
        self, arrived: Sequence[Tensor | None], summed: Sequence[Tensor | None], marked: Sequence[Tensor | None], losses: Tensor
    ) -> dict[Uses, dict[str, Tensor]]:
        """Of every call that could be followed: role to gradients `[N, *parameter.shape]`.

        Args:
            arrived: at `edges`.
            summed: at `parameters`, by autograd.
            marked: at `doubtful`, from `marked_gradients`.
            losses: `[N]`.
        """
        at, marked_at = dict(zip(self.edges, arrived, strict=True)), dict(zip(self.doubtful, marked, strict=True))
        whole = {name: dict[str, Tensor | None]() for name in self._calls}
        for (name, role), g in zip(self._roles, summed, strict=True):
            whole[name][role] = g
        found: dict[Uses, dict[str, Tensor]] = {}
        for name, several in self._calls.items():
            layer, structure = self._layers[name], _structure(several)
            layer.direct.other_lengths.update(*(uses.other_lengths for uses in several))  # not before: a checkpoint repeats
            own = [_gradients(layer, uses, at, self._size) for uses in several]
            pairs = [(at[r.edge], marked_at[r.edge]) for uses in several for r in uses.rows] if name in self._new else []
            if _adds_up(layer, [x for rows in own for x in rows], whole[name]):
                usable = structure in layer.direct.followed or _told(layer.direct, structure, pairs, losses)
            else:  # where the sum is not finite, it shows nothing: what was seen before holds
                layer.direct.opaque = _is_finite(whole[name])
                usable = not layer.direct.opaque and structure in layer.direct.followed
            if usable:
                found.update(zip(several, (_joined(layer, rows, self._size) for rows in own), strict=True))
        return found


def _structure(calls: Sequence[Uses]) -> Structure:
    return tuple(x for uses in calls for x in uses.structure)


def _told(direct: Direct, structure: Structure, pairs: Sequence[tuple[Tensor | None, Tensor | None]], losses: Tensor) -> bool:
    """Whether rows of a structure that is not known may be used. It is known from then on, where they have shown enough."""
    if len(losses) == 1:
        return True  # there is no other example that they could belong to
    verdicts = [_belongs(gradient, marked, losses) for gradient, marked in pairs if gradient is not None and marked is not None]
    direct.opaque = any(usable is False for usable, _ in verdicts)
    if verdicts and all(usable and shown for usable, shown in verdicts):
        direct.followed |= {structure} if len(direct.followed) < _STRUCTURES else set()
    return all(usable for usable, _ in verdicts)


def _gradients(
    layer: Layer, uses: Uses, gradients: Mapping[GradientEdge, Tensor | None], n: int
) -> list[tuple[str, Tensor, Tensor]]:
    """Of every use in one call the role, gradients `[N, *parameter.shape]`, and which of them autograd's sum holds `[N]`."""
    found = list[tuple[str, Tensor, Tensor]]()
    for rows in uses.rows:
        gradient = gradients[rows.edge]
        if gradient is not None:
            found.append((rows.role, rows.pulled(layer.tensor(rows.role), gradient), _fine(gradient)))
    return found


def _joined(layer: Layer, found: Sequence[tuple[str, Tensor, Tensor]], n: int) -> dict[str, Tensor]:
    """Role to gradients `[N, *parameter.shape]` of one call, in float32 at least; zeros where nothing came."""
    every = dict[str, Tensor]()
    for role, own, _ in found:
        every[role] = every[role] + own if role in every else own
    for role in layer.parameters:
        every[role] = every[role] if role in every else layer.tensor(role).detach().new_zeros(n, *layer.tensor(role).shape)
    return {role: g if g.dtype in _WIDE else g.float() for role, g in every.items()}


def _adds_up(layer: Layer, found: Sequence[tuple[str, Tensor, Tensor]], whole: Mapping[str, Tensor | None]) -> bool:
    """Whether the rows of all calls add up to autograd's gradient: a use that nobody saw would be missing.

    Rows that are not finite are in neither: see `_finite_alone`.
    """
    agrees = list[Tensor]()
    for role, expected in whole.items():
        coarse = 1.0 if expected is None or expected.dtype in _WIDE else 50.0
        total = layer.tensor(role).detach().new_zeros(()) if expected is None else expected
        apart, allowed = -total.double().flatten(), total.new_zeros((), dtype=torch.float64)
        for _, own, fine in (x for x in found if x[0] == role):
            rows = torch.where(fine.unsqueeze(1), own.double().reshape(len(own), -1), 0.0)
            apart, allowed = apart + rows.sum(0), allowed + rows.norm(dim=1).sum()
        agrees.append(apart.norm() <= coarse * _RELATIVE * allowed + 1e-12)
    return bool(torch.stack(agrees).all())


def _fine(gradient: Tensor) -> Tensor:
    """Which rows are finite, and small enough to stay so when they are added up `[N]`."""
    small = gradient.abs() <= min(_LARGEST, torch.finfo(gradient.dtype).max)
    return small.reshape(len(gradient), math.prod(gradient.shape[1:])).all(1)


def _finite_alone(gradient: Tensor) -> Tensor:
    """What goes on to the parameter: so autograd's sum is one over the rows that are finite, and can be compared with theirs."""
    return gradient.masked_fill(~_fine(gradient).view(-1, *(1,) * (gradient.dim() - 1)), 0.0)


def _is_finite(whole: Mapping[str, Tensor | None]) -> bool:
    return all(bool(g.isfinite().all()) for g in whole.values() if g is not None)


def _belongs(gradient: Tensor, marked: Tensor, losses: Tensor) -> tuple[bool | None, bool]:
    """Whether rows can be used, as row n scales with the loss of example n, and whether two rows or more have shown it.

    None where nothing shows whom they belong to. Rows of zeros can be used all the same, and those not finite where the loss of
    that example is not finite either: nobody else's contribution is lost.
    """
    factors, fine = marks(losses).double(), _fine(gradient) & _fine(marked)
    expected = gradient.double().reshape(len(factors), -1) * factors.unsqueeze(1)
    expected = torch.where(fine.unsqueeze(1), expected, 0.0)
    error = torch.where(fine.unsqueeze(1), marked.double().reshape_as(expected) - expected, 0.0)
    size, apart = float(expected.norm()), float(error.norm())
    if size == 0.0:
        usable = apart == 0.0 and bool((fine | ~losses.isfinite()).all())
        return (True if usable else None), False
    belongs = apart <= (_RELATIVE if gradient.dtype in _WIDE else 50 * _RELATIVE) * size
    return belongs, int(expected.any(1).sum()) > 1
