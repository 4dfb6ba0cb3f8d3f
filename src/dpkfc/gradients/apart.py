"""Are the losses of two passes the same but for rounding?

Losses are cheap and continuous, so they are compared far more closely than gradients. Where float32 says that they differ (a
batch of another size takes other kernels, TF32, a difference of large numbers), a copy of the model in float64 has the last
word; only where none can be made or run does the coarse measure of gradients decide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dpkfc.gradients.verify import RELATIVE

__all__ = ["COPIED", "Compared", "apart", "doubled"]

COPIED = 1 << 27  # parameters of a model up to which it is copied

# Of a model and of what is done to each batch first: the losses `[n]` of the same rows in two passes.
Compared: TypeAlias = Callable[[nn.Module, Callable[[Any], Any]], tuple[Tensor, Tensor]]

_CLOSE = 1e-5  # relative; honest models differ by less than 1e-6 in float32


def apart(compared: Compared, model: nn.Module) -> bool:
    """Whether two passes of a model have other losses; a finite one and one that is not are others always.

    Args:
        compared: makes the two passes, which may take gradients themselves (a penalty on those of the inputs).
        model: of any precision.
    """
    if _close(*compared(model, lambda batch: batch), _CLOSE):
        return False
    if all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point()):
        return True
    wide = _in_double(compared, model)
    if wide is not None:
        return wide
    losses, precision = _with_precision(compared, model)
    least = 0.5 if precision.itemsize < torch.float32.itemsize else 0.0  # half: of logits, however small the losses
    return not _close(*losses, RELATIVE.get(precision, 0.1), least)


def _in_double(compared: Compared, model: nn.Module) -> bool | None:
    """Whether two passes of a copy in float64 have other losses; None where the model is large, or no copy can be made or run."""
    if sum(p.numel() for p in model.parameters()) > COPIED:
        return None
    try:
        return not _close(*compared(copy.deepcopy(model).double(), doubled), _CLOSE)
    except Exception:  # noqa: BLE001 - the text may hold private values
        return None


def doubled(batch: Any) -> Any:
    """The batch with its floating-point numbers in float64."""
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def _close(one: Tensor, other: Tensor, relative: float, least: float = 0.0) -> bool:
    one, other = one.detach().double(), other.detach().double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    if not bool(finite.any()):
        return True
    one, other = one[finite], other[finite]
    sizes = torch.maximum(one.abs(), other.abs())
    allowed = relative * (sizes + sizes.median().clamp(min=least)) + 1e-12
    return bool(((one - other).abs() <= allowed).all())


def _with_precision(compared: Compared, model: nn.Module) -> tuple[tuple[Tensor, Tensor], torch.dtype]:
    """The losses once more, and the coarsest type in which a module has computed."""
    seen = {torch.float64}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.update(x.dtype for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point())

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        losses = compared(model, lambda batch: batch)
    finally:
        for handle in handles:
            handle.remove()
    return losses, max((*seen, *(x.dtype for x in losses)), key=lambda dtype: torch.finfo(dtype).eps)
