"""How one call of a module without a rule is divided into examples: which axis of which argument is the batch.

An argument as long as the batch may be one row an example, or shared by all (a position table `[T, d]` in a batch of T). What
was seen of it in batches of other sizes tells: the lengths alone, which no single example can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpkfc.gradients.attention import ARGUMENTS, check_query
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.put_off import is_waited_for

__all__ = ["Division", "divided"]

_MAX_ALTERNATIVES = 64
_Rebuild = Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut into examples: the batch axis, and whether it stays, with length 1."""

    axis: int = 0
    keep: bool = True


@dataclass(frozen=True)
class Division:
    """One call, and how it is divided into examples.

    Attributes:
        leaves: its arguments, flattened.
        rebuild: from leaves to positional and keyword arguments.
        cuts: how each leaf is cut, None where all examples share it.
        used: which of its floating-point outputs the losses depend on.
        gradients: at those.
        axes: the batch axis of each.
        known: whether the cuts are known rather than guessed from lengths.
    """

    leaves: list[Any]
    rebuild: _Rebuild
    cuts: list[Cut | None]
    used: list[int]
    gradients: list[Tensor]
    axes: list[int]
    known: bool = False

    def alternatives(self) -> Iterator[Division]:
        """The division itself, and others in which arguments as long as the batch are shared by all examples."""
        guessed = [] if self.known else [i for i, cut in enumerate(self.cuts) if cut is not None]
        choices = chain.from_iterable(combinations(guessed, size) for size in range(max(1, len(guessed))))
        for shared in islice(choices, _MAX_ALTERNATIVES):
            yield replace(self, cuts=[None if i in shared else cut for i, cut in enumerate(self.cuts)])

    def without(self, broken: Tensor) -> list[Any]:
        """The leaves with another example's row in the place of each broken one `[N]`; what all examples share stays.

        Half of that row, where it can be halved: no two rows of an argument come out alike.
        """
        if not is_waited_for(broken) and not bool(broken.any()):  # a card copies them rather than be waited for
            return self.leaves
        rows = torch.where(broken, broken.int().argmin(), torch.arange(len(broken), device=broken.device))
        return [self._replaced(x, cut.axis, rows, broken) if cut else x for x, cut in zip(self.leaves, self.cuts, strict=True)]

    @staticmethod
    def _replaced(x: Tensor, axis: int, rows: Tensor, broken: Tensor) -> Tensor:
        x = x.index_select(axis, rows.to(x.device))
        if not x.is_floating_point():
            return x
        return x * torch.where(broken, 0.5, 1.0).to(x).view([-1 if i == axis else 1 for i in range(x.dim())])

    def scaled(self, factors: Tensor) -> list[Tensor]:
        """The gradients at the outputs, example n's times factor n; a factor of zero leaves nothing of a NaN either."""
        found = []
        for g, axis in zip(self.gradients, self.axes, strict=True):
            wide = torch.promote_types(g.dtype, torch.float32)  # a factor may be past what half precision holds
            factor = factors.to(g.device, wide).view([-1 if i == axis else 1 for i in range(g.dim())])
            found.append((g.to(wide) * factor).masked_fill(factor == 0, 0.0).to(g.dtype))
        return found

    def sizes(self) -> Tensor:
        """The length of each example's gradients at the outputs `[N]`, in float64."""
        parts = [
            g.movedim(axis, 0).reshape(g.shape[axis], -1).double() for g, axis in zip(self.gradients, self.axes, strict=True)
        ]
        return torch.cat(parts, 1).norm(dim=1) if parts else torch.zeros(())


def divided(
    layer: Layer,
    module: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    gradients: list[Tensor],
    batch_size: int,
) -> Division:
    """How a call is divided into examples.

    Args:
        layer: names the module; what is seen of its arguments is remembered on it.
        module: the module that was called.
        inputs: (args, kwargs) of the call.
        gradients: at its outputs.
        batch_size: examples N.

    Raises:
        ValueError: an output does not lead with the batch.
    """
    dtypes = [p.dtype for role in layer.parameters if (p := module.get_parameter(role)).is_floating_point()]
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)  # inputs may come from an autocast region
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        leaves, rebuild, cuts, first = _of_attention(layer, module, inputs, batch_size)
    else:
        leaves, spec = tree_flatten(inputs)
        rebuild, first = partial(tree_unflatten, treespec=spec), None
        seen = layer.axis.shared_arguments
        seen |= {(str(spec), i) for i, x in enumerate(leaves) if _of_another_length(x, batch_size)}
        long = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == batch_size for x in leaves]
        cuts = [Cut() if as_long and (str(spec), i) not in seen else None for i, as_long in enumerate(long)]
    used, axes = list[int](), list[int]()
    for i, g in enumerate(gradients):
        axis = 0 if i or first is None else first
        if g.dim() > axis and g.shape[axis] == batch_size:
            used, axes = [*used, i], [*axes, axis]
        elif bool(g.any()):
            raise ValueError(
                f"module '{layer.display_name}' ({type(module).__name__}) owns parameters but its output {tuple(g.shape)} "
                f"does not lead with the batch of {batch_size}; move those parameters into a module whose output does"
            )
    leaves, gradients = [_at_least(x, widest) for x in leaves], [_at_least(gradients[i], widest) for i in used]
    return Division(leaves, rebuild, cuts, used, gradients, axes, known=first is not None)


def _of_another_length(x: Any, batch_size: int) -> bool:
    """Whether an argument can only be shared: an axis of 1 says nothing, there a batch may stand the next time."""
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] not in (1, batch_size)


def _at_least(x: Any, dtype: torch.dtype) -> Any:
    narrow = isinstance(x, Tensor) and x.is_floating_point() and torch.finfo(x.dtype).bits < torch.finfo(dtype).bits
    return x.to(dtype) if narrow else x


def _of_attention(
    layer: Layer, module: nn.MultiheadAttention, inputs: tuple[tuple[Any, ...], dict[str, Any]], batch_size: int
) -> tuple[list[Any], _Rebuild, list[Cut | None], int]:
    """Attention says itself what its arguments are: a mask `[T, T]` is shared also where T is the number of examples."""
    given = dict(zip(ARGUMENTS, inputs[0], strict=False)) | inputs[1]
    axis = check_query(layer, module, given["query"], batch_size)
    cuts: dict[str, Cut | None] = {"query": Cut(axis), "key": Cut(axis), "value": Cut(axis)}
    if given.get("key_padding_mask") is not None:
        cuts["key_padding_mask"] = Cut()
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 3:  # [batch * heads, T, S]
        given["attn_mask"] = mask.unflatten(0, (batch_size, module.num_heads))
        cuts["attn_mask"] = Cut(keep=False)

    def rebuild(full: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = dict(zip(given, full, strict=True))
        if call.get("attn_mask") is not None and call["attn_mask"].dim() == 4:
            call["attn_mask"] = call["attn_mask"].flatten(0, 1)
        return (), call

    return list(given.values()), rebuild, [cuts.get(name) for name in given], axis
