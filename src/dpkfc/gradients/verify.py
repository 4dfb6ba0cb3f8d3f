"""A check that the tape's per-example gradients are what plain autograd says, before any budget is spent.

It finds what no inspection of modules can: a loss or a module that mixes examples, a leading axis that is not the batch,
a parameter used outside its own module, a forward pass that writes buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.gradients.accumulate import split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.sums import weighted_sum
from dpkfc.gradients.tape import Tape, check_losses

__all__ = ["check_mode", "check_per_example_gradients", "evaluation_mode", "restored_buffers"]

_RELATIVE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, each put back to its own mode afterwards (dropout would differ between two passes)."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Raise if the body changes a buffer of the model, after putting it back.

    Raises:
        ValueError: naming the buffer: it would carry statistics of private data outside the mechanism.
    """
    before = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
    frozen = {name: (p, p._version) for name, p in model.named_parameters()}
    try:
        yield
    finally:
        _put_back(model, before)
    written = [name for name, (p, version) in frozen.items() if p._version != version]
    if written:
        raise ValueError(
            f"the forward pass writes to the parameter '{written[0]}'; only released gradients may change one"
        )


def _put_back(model: nn.Module, before: dict[str, tuple[Tensor, int, Tensor]]) -> None:
    after = dict(model.named_buffers())
    changed = [n for n, (b, _, copy) in before.items() if after.get(n) is not b or not _same(b, copy)]
    changed += [n for n in after if n not in before]
    if not changed:
        return
    with torch.no_grad():
        for name, (_, _, copy) in before.items():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = copy
    raise ValueError(
        f"the forward pass changes the buffer '{changed[0]}', which would carry private data out of the model without noise; "
        "freeze it (.eval() for normalisation statistics) or use a layer without running state"
    )


def check_per_example_gradients(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    pair: Any,
    singles: Sequence[Any],
) -> None:
    """Compare the tape with plain autograd on single examples.

    Args:
        model: the model; its modes are put back.
        layers: its layers.
        loss_fn: maps model and batch to per-example losses.
        pair: a batch of the examples in `singles` together.
        singles: each example as a batch of its own.

    Raises:
        ValueError: naming the parameter whose gradient differs, and the likely causes.
    """
    with evaluation_mode(model):
        tape = Tape(model, layers)
        with tape:
            losses = loss_fn(model, pair)
        check_losses(losses, len(singles))
        calls = tape.backward(losses)
        found = _per_example(layers, calls, len(singles))
        for i, single in enumerate(singles):
            expected = _autograd(model, loss_fn, single)
            for name, gradient in expected.items():
                _compare(name, gradient, found[i].get(name), len(singles))
    _check_coverage(layers, found)


def check_mode(
    model: nn.Module, layers: Sequence[Layer], loss_fn: Callable[[nn.Module, Any], Tensor], pair: Any, twins: Any
) -> None:
    """In the model's own mode, an example's gradient may not depend on the example beside it.

    Both batches run under one random state, so dropout draws the same numbers.

    Args:
        model: in the mode it is trained in.
        layers: its layers.
        loss_fn: maps model and batch to per-example losses.
        pair: a batch of two examples.
        twins: a batch of the first of them twice.

    Raises:
        ValueError: naming the parameter whose gradient differs.
    """
    found = []
    state = torch.get_rng_state()
    for batch in (pair, twins):
        torch.set_rng_state(state)
        tape = Tape(model, layers)
        with tape:
            losses = loss_fn(model, batch)
        found.append(_per_example(layers, tape.backward(losses), 2)[0])
    for name, expected in found[1].items():
        _compare(name, expected, found[0].get(name), 2)


def _per_example(layers: Sequence[Layer], calls: dict[str, list[Any]], n: int) -> list[dict[str, Tensor]]:
    rows: list[dict[str, Tensor]] = [{} for _ in range(n)]
    for layer in layers:
        if layer.name not in calls:
            continue
        block = blocks_of(layer, calls[layer.name], n)
        for i in range(n):
            weights = torch.zeros(n, device=layer.tensor(next(iter(layer.parameters))).device)
            weights[i] = 1.0
            rows[i].update(split_sum(layer, weighted_sum(block, weights)))
    return rows


def _autograd(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], single: Any) -> dict[str, Tensor | None]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = loss_fn(model, single)
    check_losses(losses, 1)
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, gradients, strict=True))


def _compare(name: str, expected: Tensor | None, found: Tensor | None, n: int) -> None:
    if expected is None and found is None:
        return
    zero = torch.zeros(())
    expected = zero if expected is None else expected
    found = zero if found is None else found.to(expected)
    scale = max(float(torch.linalg.vector_norm(expected)), float(torch.linalg.vector_norm(found)))
    if not torch.isfinite(torch.as_tensor(scale)):
        return  # a broken example is clipped to zero later
    difference = float(torch.linalg.vector_norm(found - expected))
    if difference > _RELATIVE.get(expected.dtype, 0.1) * scale + 1e-6:
        raise ValueError(
            f"the per-example gradient of '{name}' in a batch of {n} differs from that of the example alone "
            f"(relative difference {difference / max(scale, 1e-30):.2g}). Either the model or loss_fn mixes examples (a mean "
            "over the batch, a batch statistic), or the leading axis is not the batch, or the parameter is used outside the "
            "module that owns it (for example through F.linear with another module's weight)."
        )


def _check_coverage(layers: Sequence[Layer], found: list[dict[str, Tensor]]) -> None:
    for layer in layers:
        for full in layer.parameters.values():
            if all(full not in row for row in found):
                raise ValueError(
                    f"parameter '{full}' is trainable but loss_fn never uses layer '{layer.display_name}': it would receive "
                    "noise alone; freeze it with requires_grad_(False) or use it"
                )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(
        torch.equal(a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b)
    )
