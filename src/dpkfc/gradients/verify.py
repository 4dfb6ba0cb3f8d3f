"""A check that the tape's per-example gradients are what plain autograd says, before any budget is spent.

It finds what no inspection of modules can: a loss or a module that mixes examples, a leading axis that is not the batch,
a parameter used outside its own module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dpkfc.gradients.accumulate import full_precision, split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.random_state import device_of, drawn_since_now, restarter
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.sharded import in_graph
from dpkfc.gradients.sums import weighted_sum
from dpkfc.gradients.tape import Tape, check_losses

__all__ = [
    "RELATIVE", "as_long_as", "check_mode", "check_per_example_gradients", "check_whole_batch", "evaluation_mode",
    "in_training_mode",
]  # fmt: skip

# How far two gradients may be apart, by the coarsest type they were computed in.
RELATIVE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# A gradient that cancels to nothing (the bias of attention keys) is rounding of so many times the whole gradient.
_CANCELLED = 4


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, each put back to its own mode afterwards (dropout would differ between two passes).

    Recurrent layers without dropout, which compute the same in both modes, are in training mode: cuDNN differentiates them
    in no other.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for module, _ in modes:
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_per_example_gradients(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    pair: Any,
    singles: Sequence[Any],
    *,
    slack: float = 0.0,
    comparable: bool = True,
) -> bool:
    """Compare the tape with plain autograd on single examples.

    Where random numbers are drawn in evaluation mode too (the sample of a variational autoencoder), an example alone gets others
    than in a pair: nothing is compared then but which parameters are used. `check_mode` and `check_whole_batch`, which draw the
    same numbers twice, are what is left.

    Args:
        model: the model; its modes are put back.
        layers: its layers.
        loss_fn: maps model and batch to per-example losses.
        pair: a batch of the examples in `singles` together.
        singles: each example as a batch of its own.
        slack: how far two gradients of a parameter may be apart in any case, relative to their size (a tenth of it, relative to
            the whole gradient).
        comparable: the examples are the same in `pair` and `singles`: collating them draws no random numbers.

    Returns:
        Whether every example had a finite gradient; zeros and NaN agree with anything.

    Raises:
        ValueError: naming the parameter whose gradient differs, and the likely causes.
    """
    shown, used = True, set[str]()
    with evaluation_mode(model):
        for row, single in enumerate(singles):
            # Before the tape's pass, as what that notes may lie in memory which another pass writes over; one at a time, as a
            # pass of a few rows is cheaper than a gradient of the whole model that waits.
            expected = _autograd(model, loss_fn, single)
            used |= {name for name, gradient in expected.items() if gradient is not None}
            shown = shown and any(_shows(gradient) for gradient in expected.values())
            tape, drawn = Tape(model, layers, batch_size=len(singles)), drawn_since_now(device_of(layers))
            with tape:
                losses = loss_fn(model, pair)
            check_losses(losses, len(singles))
            calls = tape.backward(losses)
            comparable = comparable and not drawn()
            tolerance = _Tolerance.of(expected, _precision(calls), slack)
            with _Comparison(len(singles)) as comparison:
                for name, found in _sums(layers, calls, len(singles), _of_row(len(singles), row)):
                    if comparable:
                        comparison.add(name, expected.pop(name), found, tolerance)
                for name, gradient in expected.items() if comparable else ():
                    comparison.add(name, gradient, None, tolerance)
    _check_coverage(layers, used)
    return shown


def check_mode(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    pair: Any,
    twins: Any,
    *,
    batch_size: int = 2,
    row: int = 0,
) -> bool:
    """In the model's own mode, an example's gradient may not depend on the examples beside it.

    Both batches run under one random state, so dropout draws the same numbers.

    Args:
        model: in the mode it is trained in.
        layers: its layers.
        loss_fn: maps model and batch to per-example losses.
        pair: a batch of two examples, or of more.
        twins: a batch of one of them as many times; where it was padded to another length than the pair, dropout would
            draw other numbers, and rows of the pair are taken instead.
        batch_size: examples N in either.
        row: of the example that is looked at.

    Returns:
        Whether random numbers were drawn: under others another dependence may show.

    Raises:
        ValueError: naming the parameter whose gradient differs.
    """
    device = device_of(layers)
    restart, drawn = restarter(device), drawn_since_now(device)

    def passed(batch: Any) -> dict[str, list[Any]]:
        restart()
        tape = Tape(model, layers, batch_size=batch_size)
        with tape:
            losses = loss_fn(model, batch)
        check_losses(losses, batch_size)
        return tape.backward(losses)

    only = _of_row(batch_size, row)
    calls = passed(as_long_as(pair, twins, batch_size, row))
    precision, expected = _precision(calls), dict(_sums(layers, calls, batch_size, only))
    calls = passed(pair)
    tolerance = _Tolerance.of(expected, _coarser(precision, _precision(calls)))
    with _Comparison(batch_size) as comparison:
        for name, found in _sums(layers, calls, batch_size, only):
            comparison.add(name, expected.pop(name, None), found, tolerance)
        for name, gradient in expected.items():
            comparison.add(name, gradient, None, tolerance)
    return drawn()


def check_whole_batch(
    model: nn.Module, layers: Sequence[Layer], loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, batch_size: int
) -> None:
    """In a whole batch, each loss is the loss of one example, and the tape has seen every use of every parameter.

    What the tape makes of Σ_n w_n g_n must be autograd's gradient of Σ_n w_n ℓ_n, for weights w that tell examples apart.
    It finds what a pair of examples cannot show: triplets mined in the batch, groups of four. Both passes run under one
    random state, in the model's own mode. What it cannot find is an influence that no gradient carries (a detached
    statistic of the batch); `check_mode` does.

    Args:
        model: in the mode it is trained in.
        layers: its layers.
        loss_fn: maps model and batch to per-example losses.
        batch: any batch.
        batch_size: its examples N.

    Raises:
        ValueError: naming the parameter whose gradient differs.
    """
    parameters = {name: in_graph(p) for name, p in model.named_parameters() if p.requires_grad}
    weights = 0.5 + torch.frac(0.618 * torch.arange(1, batch_size + 1, dtype=torch.float64))
    restart = restarter(device_of(layers))
    losses = loss_fn(model, batch)
    check_losses(losses, batch_size)
    expected = _gradients((losses * weights.to(losses)).sum(), parameters)
    restart()
    tape = Tape(model, layers, batch_size=batch_size)
    with tape:
        losses = loss_fn(model, batch)
    calls = tape.backward(losses)
    tolerance = _Tolerance.of(expected, _precision(calls))
    wide = replace(tolerance, relative=5 * tolerance.relative)
    with _Comparison(batch_size, f"of {batch_size} examples do not add up to the gradient of their losses") as comparison:
        for name, found in _sums(layers, calls, batch_size, weights):
            comparison.add(name, expected.pop(name), found, wide)
        for name, gradient in expected.items():
            comparison.add(name, gradient, None, wide)


def in_training_mode(model: nn.Module) -> str:
    """What to add to an error where a module normalises over the batch now; empty where none does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f" Module '{name}' ({type(module).__name__}) is in training mode now; call .eval() on it after model.train()."
    return ""


def as_long_as(pair: Any, twins: Any, batch_size: int = 2, row: int = 0) -> Any:
    """The twins, or a row of the pair as many times where the two were padded to different lengths."""
    shapes = [[x.shape for x in tree_flatten(batch)[0] if isinstance(x, Tensor)] for batch in (pair, twins)]
    if shapes[0] == shapes[1]:
        return twins
    same = [row] * batch_size
    return tree_map(lambda x: x[same] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch_size else x, pair)


def _sums(
    layers: Sequence[Layer], calls: dict[str, list[Any]], n: int, weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Names of parameters and weighted sums of their gradients over n examples, layer by layer; `calls` lose what was used."""
    for layer in layers:
        if layer.name in calls:
            own = weights.to(layer.tensor(next(iter(layer.parameters))).device)
            with full_precision():
                gradients = dict(split_sum(layer, weighted_sum(blocks_of(layer, calls.pop(layer.name), n), own)))
            for name in list(gradients):
                yield name, gradients.pop(name)


def _of_row(n: int, row: int) -> Tensor:
    """Weights `[n]` of one example alone."""
    return torch.eye(n, dtype=torch.float64)[row]


class _Comparison:
    """Compares gradients one by one, so that none has to be kept; the first that differs is named when all have been formed.

    So what a layer says of calls that have no examples comes before a difference in an earlier layer.
    """

    def __init__(self, n: int, what: str | None = None) -> None:
        self._n, self._what = n, what
        self._failure: ValueError | None = None

    def __enter__(self) -> _Comparison:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._failure is not None:
            raise self._failure

    def add(self, name: str, expected: Tensor | None, found: Tensor | None, tolerance: _Tolerance) -> None:
        """Compare two gradients of a parameter, None for none."""
        if self._failure is None:
            try:
                _compare(name, expected, found, self._n, tolerance, what=self._what)
            except ValueError as error:
                self._failure = error


def _shows(gradient: Tensor | None) -> bool:
    """Whether a gradient is finite and not zero."""
    return gradient is not None and bool(gradient.any()) and bool(gradient.isfinite().all())


def _autograd(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], single: Any) -> dict[str, Tensor | None]:
    parameters = {name: in_graph(p) for name, p in model.named_parameters() if p.requires_grad}
    losses = loss_fn(model, single)
    check_losses(losses, 1)
    return _gradients(losses.sum(), parameters)


def _gradients(total: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """By plain autograd; dense also of `nn.Embedding(sparse=True)`."""
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    dense = (g.to_dense() if g is not None and g.is_sparse else g for g in found)
    return dict(zip(parameters, dense, strict=True))


@dataclass(frozen=True)
class _Tolerance:
    """How far two gradients of one parameter may be apart: `relative` of their size, and `absolute`."""

    relative: float
    absolute: float

    @classmethod
    def of(cls, gradients: Mapping[str, Tensor | None], precision: torch.dtype, slack: float = 0.0) -> _Tolerance:
        """For the gradients of one example, computed in a precision (that of an autocast region, say)."""
        sizes = [float(torch.linalg.vector_norm(g)) for g in gradients.values() if g is not None]
        whole = math.sqrt(sum(size * size for size in sizes if math.isfinite(size)))
        coarse = max((precision, *(g.dtype for g in gradients.values() if g is not None)), key=_roundoff)
        cancelled = max(_CANCELLED * _roundoff(coarse), slack / 10)
        return cls(max(RELATIVE.get(coarse, 0.1), slack), 1e-6 + cancelled * whole)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=_roundoff)


def _precision(calls: Mapping[str, Sequence[Any]]) -> torch.dtype:
    """The coarsest type in which the layers' outputs were computed."""
    outputs = [g for several in calls.values() for call in several for g in call.outputs if g is not None]
    return max((g.dtype for g in outputs), key=_roundoff, default=torch.float64)


def _compare(
    name: str, expected: Tensor | None, found: Tensor | None, n: int, tolerance: _Tolerance, *, what: str | None = None
) -> None:
    if expected is None and found is None:
        return
    zero = torch.zeros(())
    expected = zero if expected is None else expected
    found = zero if found is None else found.to(expected)
    scale = max(float(torch.linalg.vector_norm(expected)), float(torch.linalg.vector_norm(found)))
    if not math.isfinite(scale):
        if what is None and bool(found.isfinite().all()):
            raise ValueError(
                f"the gradient of '{name}' of an example is finite in a batch of {n} and not where the example stands alone, or "
                "beside a copy of itself: the model or loss_fn mixes examples (a standard deviation over the batch)"
            )
        return  # a broken example is clipped to zero later
    difference = float(torch.linalg.vector_norm(found - expected))
    if difference > tolerance.relative * scale + tolerance.absolute:
        raise ValueError(
            f"the per-example gradient{'s' if what else ''} of '{name}' "
            f"{what or f'in a batch of {n} differs from that of the example alone'} "
            f"(relative difference {difference / max(scale, 1e-30):.2g}). Either the model or loss_fn mixes examples (a mean "
            "over the batch, a batch statistic, padding to the longest example without an attention mask), or the leading "
            "axis is not the batch, or the parameter is used outside the module that owns it (for example through F.linear "
            "with another module's weight, in loss_fn, or in a method other than forward): call that module itself, or give "
            "the parameter to the module whose forward uses it."
        )


def _check_coverage(layers: Sequence[Layer], used: set[str]) -> None:
    for layer in layers:
        layer.used.update(used.intersection(layer.parameters.values()))  # once is enough: some examples may pass it by
        for full in layer.parameters.values():
            if full not in layer.used:
                raise ValueError(
                    f"parameter '{full}' of layer '{layer.display_name}' is trainable but loss_fn never uses it: it would "
                    "receive noise alone; freeze it with requires_grad_(False) or use it (an expert that takes some of the "
                    "examples has to be called with all of them, and weighed)"
                )
