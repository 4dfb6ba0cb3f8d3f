"""Does padding to the longest example of a batch change what the model makes of the others? Was a batch changed on its way?

Inside a batch every example has its padding already, so a comparison of its rows cannot tell. Two examples are collated
together and each alone, and the model must give an example the same output in both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, default_collate

from dpkfc.gradients.broadcast import leading_size
from dpkfc.gradients.verify import evaluation_mode
from dpkfc.integrations._rows import Inputs, is_plain_list

__all__ = ["check_padding", "warn_of_changed_rows"]

_LOOKED_AT = 256
_RELATIVE = {torch.float64: 1e-8, torch.float32: 2e-3}

_MESSAGE = (
    "what the model makes of an example depends on how far it is padded, and so on the longest example of its batch: one "
    "example changes the gradients of the others. Leave padding out of the model (an attention mask, a mean over the real "
    "positions, packed sequences), or pad every batch to one length"
)


def check_padding(
    model: nn.Module, inputs: Inputs, batch: Any, loader: DataLoader[Any], drawn: Iterable[int] = ()
) -> None:
    """Compare the model's outputs for an example padded to another's length with those for the example alone.

    Nothing can be said where the inputs are no parts of the batch, where all of the examples looked at have one length, or
    where collating draws random numbers.

    Args:
        model: in any mode, which is kept.
        inputs: (args, kwargs) of the call of the model on `batch`.
        batch: as the loader handed it out.
        loader: of the script; its dataset and collate function.
        drawn: indices of examples that are looked at first, those of the batch. PRIVATE.

    Raises:
        ValueError: an output differs; padding carries something of one example to another.
    """
    dataset: Any = loader.dataset
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    places = _places(inputs, batch)
    pair = None if places is None else _of_two_lengths(dataset, collate, chain(drawn, range(len(dataset))))
    if places is None or pair is None:
        return
    together = collate(pair)
    with torch.no_grad(), evaluation_mode(model):
        joint = _outputs(model, _filled(inputs, places, together))
        for i, example in enumerate(pair):
            alone = collate([example])
            if not all(_agree(x[i], y[0], 0.0) for x, y in zip(_tensors(together), _tensors(alone), strict=True)):
                return  # collating is random
            for x, y in zip(joint, _outputs(model, _filled(inputs, places, alone)), strict=True):
                rows = x.dim() == y.dim() and len(x) == 2 and len(y) == 1
                if rows and not _agree(x[i], y[0], _RELATIVE.get(x.dtype, 0.1)):
                    raise ValueError(_MESSAGE)


def warn_of_changed_rows(inputs: Inputs, batch: Any, size: int) -> bool:
    """Warn of floating-point inputs of the model whose rows are none of the batch's, whatever their type, device and order.

    Args:
        inputs: (args, kwargs) of the call of the model on `batch`.
        batch: as the loader handed it out.
        size: examples in it.

    Returns:
        Whether it warned.
    """
    known = [_sorted_rows(x) for x in _tensors(batch) if len(x) == size]
    for x in _tensors(inputs):
        if not x.is_floating_point() or len(x) != size or x.requires_grad:
            continue
        rows = _sorted_rows(x)
        if not any(y.shape == rows.shape and torch.equal(y.to(rows), rows) for y in known):
            warnings.warn(
                f"rows changed after the loader: an input of the model, of shape {tuple(x.shape)}, is no part of the batch that "
                "the private loader handed out. A change of each row by itself is fine; mixing two examples (Mixup, CutMix, "
                "statistics of the batch) voids ε, since one example then enters the clipped gradients of several. Change single "
                "examples in the dataset or its collate function",
                UserWarning,
                stacklevel=3,
            )
            return True
    return False


def _sorted_rows(x: Tensor) -> Tensor:
    return x.detach().reshape(len(x), -1).nan_to_num(0.0).sort(1).values  # a NaN would be no row of its own batch


def _plain(tree: Any) -> Any:
    """The same with a dict in the place of every mapping that pytree does not know (BatchEncoding)."""
    return tree_map(lambda x: _plain(dict(x)) if isinstance(x, Mapping) else x, tree)


def _leaves(tree: Any, size: int) -> list[Any]:
    return tree_flatten(_plain(tree), is_leaf=lambda x: is_plain_list(x, size))[0]


def _tensors(tree: Any, size: int = 0) -> list[Tensor]:
    """All tensors with an axis, and lists of so many numbers (lengths) as tensors."""
    found = (torch.tensor(x) if is_plain_list(x, size) and _numbers(x) else x for x in _leaves(tree, size))
    return [x for x in found if isinstance(x, Tensor) and x.dim()]


def _numbers(x: Any) -> bool:
    return all(isinstance(y, (int, float)) for y in x)


def _places(inputs: Inputs, batch: Any) -> list[int] | None:
    """Which part of the batch each input of the model is, tensors and lists of numbers; None where one of them is none of it."""
    size = leading_size(_plain(inputs)) or 0
    if any(is_plain_list(x, size) and not _numbers(x) for x in _leaves(inputs, size)):
        return None
    parts, places = _tensors(batch, size), []
    for x in _tensors(inputs, size):
        same = [k for k, part in enumerate(parts) if part.shape == x.shape and torch.equal(part.to(x), x)]
        if not same:
            return None
        places.append(same[0])
    return places or None


def _of_two_lengths(dataset: Any, collate: Callable[[list[Any]], Any], order: Iterable[int]) -> list[Any] | None:
    """Two examples that collate alone to different shapes; the first such, in that order."""
    if collate is default_collate:
        return None  # which pads nothing
    first, shapes = None, None
    for i in islice(order, _LOOKED_AT):
        example = dataset[int(i)]
        own = [x.shape for x in _tensors(collate([example]))]
        if shapes is not None and own != shapes:
            return [first, example]
        first, shapes = (example, own) if shapes is None else (first, shapes)
    return None


def _filled(inputs: Inputs, places: list[int], batch: Any) -> Inputs:
    size = leading_size(_plain(inputs)) or 0
    parts, order = _tensors(batch, len(next(iter(_tensors(batch))))), iter(places)

    def of(x: Any) -> Any:
        if is_plain_list(x, size):
            return type(x)(parts[next(order)].tolist())
        return parts[next(order)].to(x) if isinstance(x, Tensor) and x.dim() else x

    filled: Inputs = tree_map(of, inputs, is_leaf=lambda x: is_plain_list(x, size))
    return filled


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return [x for x in _tensors(model(*inputs[0], **inputs[1])) if x.is_floating_point()]


def _agree(x: Tensor, y: Tensor, relative: float) -> bool:
    """Whether two tensors are equal where they overlap, padding being at the end or at the beginning."""
    if x.dim() != y.dim():
        return True
    shortest = [min(a, b) for a, b in zip(x.shape, y.shape, strict=True)]
    fronts = [z[tuple(slice(0, k) for k in shortest)] for z in (x, y)]
    backs = [z[tuple(slice(n - k, n) for n, k in zip(z.shape, shortest, strict=True))] for z in (x, y)]
    return any(_near(a.double(), b.double(), relative) for a, b in (fronts, backs))


def _near(a: Tensor, b: Tensor, relative: float) -> bool:
    return float((a - b).norm()) <= relative * max(float(a.norm()), float(b.norm())) + 1e-6 * (relative > 0)
