"""Does every example have a loss and a gradient of its own? Asked of public rows, before the first private row is read.

What the tracker proves needs no test. What it cannot see is tested here: code that depends on the size of the batch, collate
functions, backward passes in Python. What it cannot prove is compared example by example: either examples really mix, which is
refused by name, or the layout is only unknown, and then examples are differentiated one at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpkfc.fsdp import in_graph
from dpkfc.gradients.calls import Call
from dpkfc.gradients.clipped_sum import batch_tracker, losses_of
from dpkfc.gradients.clipping import full_precision, split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.state import augmented, check_finite, check_memory, checked_state
from dpkfc.gradients.tape import Tape, check_losses, run_eagerly
from dpkfc.linalg.blocks import weighted_sum
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import begin_at, device_of, kept_numbers, restarter
from dpkfc.tracking.axes import Unknown
from dpkfc.tracking.tracker import UnknownOperation
from dpkfc.verification.public_rows import PublicRows

# --------------------------------------------------------------------------------------------------
# Constants in the place of random numbers, so that two passes of one model can be compared.
#
# Dropout and augmentation draw other numbers for a batch of another size. With constants, whatever
# still differs was changed by other examples, or by how many there are.


class ConstantNumbers(TorchDispatchMode):
    """Replace the random numbers of torch by constants inside the body."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with constants for what it draws."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        name = str(func.overloadpacket.__name__)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(output[1])
        if isinstance(output, Tensor):
            _fill(name, output, args)
        return output


def _fill(name: str, x: Tensor, args: Any) -> None:
    """Overwrite what an operation has drawn."""
    if name.startswith("randperm"):
        x.copy_(torch.arange(len(x), device=x.device).flip(0))
    elif "bernoulli" in name:
        x.fill_(1)
    elif not x.is_floating_point():
        x.fill_(0)
    elif "normal" in name or "randn" in name:
        x.fill_(0.25)
    elif name in ("uniform_", "uniform") and len(args) > 2:
        x.fill_((float(args[1]) + float(args[2])) / 2)
    else:
        x.fill_(0.5)


# --------------------------------------------------------------------------------------------------

LossFn = Callable[[nn.Module, Any], Tensor]
_MOST = 256  # rows of a batch that is compared
_ALONE = 8  # rows that are compared with batches of one
_SCALES = (1.0, 30.0, -30.0, 0.0)  # of rows beside those that are compared
_SEEDS = 4  # random states under which a pass is followed
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(frozen=True)
class Verdict:
    """What public rows have shown.

    Attributes:
        operation: why examples are differentiated one at a time; None where whole micro-batches are proved.
        unchecked: why nothing could be compared, or "".
    """

    operation: Unknown | None = None
    unchecked: str = ""

    def warn(self, stacklevel: int) -> None:
        """Warn where nothing could be compared.

        Args:
            stacklevel: as of `warnings.warn`, from the caller.
        """
        if self.unchecked:
            reason = self.unchecked.splitlines()[0][:60]
            warnings.warn(
                f"public rows could not be used: {reason}; whether examples mix is not checked",
                UserWarning,
                stacklevel=stacklevel + 1,
            )


def checked_verify(verify: bool | str) -> bool | str:
    """Return the setting of `verify=`.

    Raises:
        ValueError: another value than True, False and "strict".
    """
    if verify not in (True, False, "strict"):
        raise ValueError(f"verify must be True, False or 'strict', got {verify!r}")
    return verify


def check_on_public_rows(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: LossFn,
    attempts: Sequence[Callable[[int], PublicRows]],
    *,
    expected: int,
    bound: int | None = None,
    augment: Callable[[Any], Any] | None = None,
    strict: bool = False,
) -> Verdict:
    """Check on public rows that every example has a gradient of its own, and find out how to compute it.

    Args:
        model: in the mode in which it is trained.
        layers: its layers.
        loss_fn: maps model and batch to losses `[n]`.
        attempts: each maps a number of records to public rows; the first whose rows the loss takes is used.
        expected: rows of a logical batch, on average.
        bound: most rows of a micro-batch, None for no bound.
        augment: maps a batch to one with as many rows.
        strict: raise where an operation has no batch rule.

    Returns:
        The verdict.

    Raises:
        ValueError: examples mix, by name of the operation where it is known; the loss fails on a batch of one example; the
            forward pass keeps something of its examples.
        RuntimeError: not even two examples fit into memory.
        UnknownOperation: under `strict`, an operation that the tracker does not know.
    """
    check_finite(layers)
    most = max(4, min(2 * expected, bound or 2 * expected, max(_MOST, expected)))
    with run_eagerly(), torch.enable_grad(), kept_numbers(), checked_state(model) as before:
        while True:
            begin_at(1)
            check = _Check(model, layers, loss_fn, augment, device_of(layers), most)
            try:
                return check.verdict(attempts, before, expected, strict)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if most == 2:
                    raise RuntimeError(
                        "the check on public rows needs two examples in memory, and they do not fit; nothing was released. Use a "
                        "smaller model, or verify=False"
                    ) from error
            most = max(2, most // 2)


class BatchSizeError(ValueError):
    """The loss takes examples alone and fails on their batch."""


@dataclass(frozen=True)
class _Check:
    """The comparisons of one model and loss."""

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    augment: Callable[[Any], Any] | None
    device: torch.device
    most: int

    # -- rows that the loss takes ---------------------------------------------------------------------------

    def usable(self, attempts: Sequence[Callable[[int], PublicRows]]) -> tuple[PublicRows | None, str]:
        """Return the first public rows that the loss takes, or why there are none."""
        reason = "no public rows were given"
        for make in attempts:
            try:
                rows = make(max(4, self.most))
                for size in (2, min(self.most, len(rows))):  # a number in any row may lie outside a table
                    self._check_takes(rows.batch(range(size)), rows, size)
            except Exception as error:
                if isinstance(error, BatchSizeError) or _is_permanent(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
            else:
                self._check_batch_of_one(rows)
                return rows, ""
        return None, reason

    def _check_takes(self, batch: Any, rows: PublicRows, size: int) -> None:
        """Check that the loss takes a batch, wherever it takes every row of it alone."""
        try:
            self.losses(batch, size)
            return
        except Exception as error:
            if _is_permanent(error):
                raise
            failed = error
        for i in range(size):
            try:
                self.losses(rows.batch([i]), 1)
            except Exception:
                raise failed from None
        text = str(failed).splitlines()[0][:60] if str(failed) else type(failed).__name__
        raise BatchSizeError(
            f"loss_fn takes each of {size} rows alone and fails on their batch ({text}): it depends on the batch size"
        ) from failed

    def _check_batch_of_one(self, rows: PublicRows) -> None:
        try:
            self.losses(rows.batch([0]), 1)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            text = str(error).splitlines()[0][:60] if str(error) else type(error).__name__
            raise ValueError(
                f"loss_fn fails on a batch of one example ({text}); write squeeze(-1) for squeeze(), and keep the batch axis"
            ) from error

    # -- passes ---------------------------------------------------------------------------------------------

    def losses(self, batch: Any, size: int) -> Tensor:
        """Return the losses `[n]` of a batch, augmented as in training."""
        losses = losses_of(self.loss_fn, self.model, self._augmented(batch, size))
        check_losses(losses, size)
        return losses

    def values(self, batch: Any, size: int) -> Tensor:
        """Return losses that can be compared, in float64."""
        return self.losses(batch, size).detach().double()

    def trace(self, batch: Any, size: int) -> tuple[Unknown | None, Tape, Tensor]:
        """Follow one pass; return why it is not proved, its tape and its losses."""
        moved = _moved(batch, self.device)
        tracker = batch_tracker(self.model, moved, size)
        with tracker.following():
            moved = augmented(self.augment, self.model, moved, size)
        tape = Tape(self.model, self.layers, size, tracker=tracker)
        with tape, tracker.following():
            losses = losses_of(self.loss_fn, self.model, moved)
        check_losses(losses, size)
        tape.check_depends(losses)
        tape.check_enabled()
        return tape.failure(losses), tape, losses

    # -- the verdict ----------------------------------------------------------------------------------------

    def verdict(
        self, attempts: Sequence[Callable[[int], PublicRows]], before: Any, expected: int, strict: bool
    ) -> Verdict:
        """Return the verdict, without a check where the loss takes no public rows."""
        rows, reason = self.usable(attempts)
        return Verdict(unchecked=reason) if rows is None else self.run(rows, before, expected, strict)

    def run(self, rows: PublicRows, before: Any, expected: int, strict: bool) -> Verdict:
        """Return the verdict on rows that the loss takes."""
        size = max(2, min(self.most // 2, expected))
        some, few = min(32, size), min(4, size)
        failure = None
        for seed in range(_SEEDS):
            begin_at(seed + 1)
            length = size if seed == 0 else few
            found, tape, losses = self.trace(rows.batch(range(length)), length)
            failure = failure or found
            if found is None and seed == 0:
                self._warn_of_unused(losses)
        begin_at(1)
        if not self._check_rows("collate_fn", rows.batch, some):
            failure = failure or Unknown(
                "collate_fn", "it draws random numbers of its own, so that it cannot be compared"
            )
        if self.augment is not None:
            repeatable = self._check_rows("augment", lambda chosen: self._augmented(rows.batch(chosen), some), some)
            if not repeatable:
                self._check_rows_with_nan(rows, some)
        if failure is not None and strict:
            raise UnknownOperation(
                f"{failure.operation}: {failure.reason[:70]}; register its rule with dpkfc.register_batch_rule, or drop "
                "verify='strict'"
            )
        self._check_padding(rows)
        if not self._agree(rows, few, restarted=True):
            self._check_memory(rows, before)
            # A proof needs no comparison, and without one every example has a pass of its own.
            return Verdict(
                failure, "two passes over the same rows differ, with the same seeds of torch, numpy and random"
            )
        with ConstantNumbers():
            if self._agree(
                rows, few, restarted=False
            ):  # numpy and random draw other numbers for a batch of another size
                self._check_sizes(rows, failure)
            if failure is not None:
                self._check_neighbours(rows, size, failure)
        if failure is None:
            self._check_tape(rows, few)
        self._check_memory(rows, before)
        return Verdict(failure)

    def _agree(self, rows: PublicRows, size: int, *, restarted: bool) -> bool:
        """Return whether two passes over one batch agree, where torch draws constants.

        Args:
            rows: public rows.
            size: of the batch.
            restarted: begin both with the same state of the global generators.
        """
        restart = restarter(self.device)
        found = []
        with ConstantNumbers():
            for _ in range(2):
                if restarted:
                    restart()
                found.append(self.values(rows.batch(range(size)), size).nan_to_num())
        return bool(torch.equal(*found))

    def _differs(self, one: Tensor, other: Tensor) -> bool:
        """Return whether losses differ by more than rounding."""
        dtypes = [p.dtype for layer in self.layers for p in (layer.tensor(r) for r in layer.parameters)]
        coarse = max(_CLOSE.get(dtype, 0.1) for dtype in dtypes)
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return True
        if not bool(finite.any()):
            return False
        one, other = one[finite], other[finite]
        scale = torch.maximum(one.abs(), other.abs())
        return bool(((one - other).abs() > coarse * (scale + scale.median()) + 1e-9).any())

    def _check_sizes(self, rows: PublicRows, failure: Unknown | None) -> None:
        """Check that the loss of a row is the same in batches of several sizes, down to the row alone."""
        most = min(self.most, len(rows))
        whole = self.values(rows.batch(range(most)), most)
        half = -(-most // 2)
        parts = [range(half), range(half, most)]
        found = torch.cat([self.values(rows.batch(part), len(part)) for part in parts if len(part)])
        pairs = [(whole, found, half)]
        step = (half // 2) | 1
        while step > 1:
            pairs.append((whole[:step], self.values(rows.batch(range(step)), step), step))
            step //= 2
        alone = sorted({0, 1, most - 1, *range(0, most, -(-most // _ALONE))})
        single = torch.cat([self.values(rows.batch([i]), 1) for i in alone])
        pairs.append((whole[alone], single, 1))
        for one, other, size in pairs:
            if self._differs(one, other):
                raise ValueError(
                    _mixes(failure, f"the loss of a row in a batch of {most} differs from that in a batch of {size}")
                )

    def _check_neighbours(self, rows: PublicRows, size: int, failure: Unknown) -> None:
        """Check that no row changes the loss or the gradient of another.

        The numbers of any two rows differ in a bit: for each bit, the rows with a one are replaced, then those with a zero.
        """
        restart = restarter(self.device)

        def passed(chosen: list[int], kept: list[int], scale: float = 1.0) -> tuple[Tensor, Tensor]:
            restart()
            others = [i for i in range(size) if i not in kept]
            losses = self.losses(_scaled(rows.batch(chosen), others, size, scale), size)
            return losses[kept].detach().double(), self._gradient(losses[kept].sum())

        every = list(range(size))
        for bit in range(max(1, math.ceil(math.log2(size)))):
            parts = []
            for side in (0, 1):
                changed = [(i >> bit) & 1 == side for i in range(size)]
                kept = [i for i in range(size) if not changed[i]]
                if not kept or len(kept) == size:
                    continue
                chosen = [i + size if changed[i] else i for i in range(size)]
                one = passed(every, kept)
                parts.append(one[1])
                for scale in _SCALES if bit == 0 else (1.0,):
                    other = passed(chosen, kept, scale)
                    if self._differs(one[0], other[0]) or self._differs_as_a_whole(one[1], other[1]):
                        raise ValueError(_mixes(failure, "rows changed when only the rows beside them did"))
            if len(parts) == 2 and self._differs_as_a_whole(parts[0] + parts[1], passed(every, every)[1]):
                raise ValueError(
                    _mixes(failure, "the gradients of parts of a batch do not add up to that of the batch")
                )

    def _gradient(self, total: Tensor) -> Tensor:
        parameters = [in_graph(p) for p in self.model.parameters() if p.requires_grad]
        gradients = _gradients(total, parameters)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([g.detach().double().flatten() for g in dense])

    def _differs_as_a_whole(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return True
        scale = float(torch.maximum(one.norm(), other.norm()))
        return math.isfinite(scale) and float((one - other).norm()) > 1e-2 * scale + 1e-9

    def _check_tape(self, rows: PublicRows, size: int) -> None:
        """Compare the tape with plain autograd, once, as a guard against faults of this library."""
        restart = restarter(self.device)
        batch = rows.batch(range(size))
        weights = 0.5 + torch.frac(0.618 * torch.arange(1, size + 1, dtype=torch.float64, device=self.device))
        restart()
        failure, tape, losses = self.trace(batch, size)
        if failure is not None:
            return
        calls = tape.backward(losses)
        restart()
        losses = self.losses(batch, size)
        expected = self._named_gradients((losses * weights.to(losses)).sum())
        if not all(bool(g.isfinite().all()) for g in expected.values()):
            return
        whole = math.hypot(*map(_norm, expected.values()))
        for layer in self.layers:
            found: dict[str, Tensor] = {}
            coarse = _coarsest(layer, calls.get(layer.name, []))
            if layer.name in calls:
                with full_precision():
                    block = blocks_of(layer, calls.pop(layer.name), size)
                    found = dict(split_sum(layer, weighted_sum(block, weights)))
            for full in layer.parameters.values():
                _compare(full, expected.get(full), found.get(full), whole, coarse)

    def _named_gradients(self, total: Tensor) -> dict[str, Tensor]:
        parameters = {name: in_graph(p) for name, p in self.model.named_parameters() if p.requires_grad}
        found = _gradients(total, list(parameters.values()))
        return {name: g.to_dense().detach() for name, g in zip(parameters, found, strict=True) if g is not None}

    def _warn_of_unused(self, losses: Tensor) -> None:
        """Warn where a trainable parameter is never used: it is trained by noise alone."""
        parameters = {name: in_graph(p) for name, p in self.model.named_parameters() if p.requires_grad}
        found = _gradients(losses.sum(), list(parameters.values()))
        unused = [name for name, gradient in zip(parameters, found, strict=True) if gradient is None]
        if unused:
            warnings.warn(
                f"parameter '{unused[0]}' is trainable but loss_fn never uses it ({len(unused)} such): it receives noise alone; "
                "freeze it with requires_grad_(False)",
                UserWarning,
                stacklevel=6,
            )

    def _check_rows(self, what: str, make: Callable[[Sequence[int]], Any], size: int) -> bool:
        """Check that a collate function, or an augmentation, keeps every record to its own row.

        Args:
            what: name of the function, for the message.
            make: maps numbers of records to the batch of them.
            size: records of a batch.

        Returns:
            Whether two batches of the same records agree, so that batches can be compared.
        """
        restart = restarter(self.device)
        every = list(range(size))

        def made(chosen: Sequence[int]) -> list[Tensor]:
            restart()
            leaves = tree_leaves(make(chosen))
            return [x.to_dense() for x in leaves if isinstance(x, Tensor) and x.dim() and x.shape[0] == size]

        whole = made(every)
        if not _alike(whole, made(every), every):
            return False
        for bit in range(max(1, math.ceil(math.log2(size)))):
            for side in (0, 1):
                changed = [(i >> bit) & 1 == side for i in every]
                kept = [i for i in every if not changed[i]]
                chosen = [i + size if changed[i] else i for i in every]
                if kept and not _alike(whole, made(chosen), kept):
                    raise ValueError(_mixes_rows(what))
        return True

    def _check_rows_with_nan(self, rows: PublicRows, size: int) -> None:
        """Check an augmentation that draws random numbers of its own: a row that is NaN may not show in another one."""
        others = range(1, size)
        batch = _moved(_scaled(rows.batch(range(size)), others, size, math.nan), self.device)
        made: Any = ()
        with suppress(ArithmeticError, ValueError):  # NaN may be refused
            made = self._augmented(batch, size)
        leading = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.dim() and x.shape[0] == size]
        if any(bool(x[:1].isnan().any()) for x in leading):
            raise ValueError(_mixes_rows("augment"))

    def _augmented(self, batch: Any, size: int) -> Any:
        return augmented(self.augment, self.model, _moved(batch, self.device), size)

    def _check_padding(self, rows: PublicRows) -> None:
        """Check that the loss of a short record does not depend on how far a longer one makes the batch padded."""
        if len(rows.longer) < 2:
            return
        short, long = rows.longer[:2]
        with ConstantNumbers():
            try:
                together = self.values(rows.collate([short, long]), 2)
                alone = self.values(rows.collate([short]), 1)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                return  # records of several lengths cannot be batched at all
        if self._differs(together[:1], alone):
            raise ValueError(
                "an example that is padded to the length of a longer one has another loss than alone: mask the padding, or pad "
                "every batch to one length"
            )

    def _check_memory(self, rows: PublicRows, before: Any) -> None:
        """Check that the forward pass keeps nothing of its examples for later ones."""
        pairs = [rows.batch([0, 1]), *(rows.batch([i, i]) for i in range(min(4, len(rows))))]
        check_memory(self.model, before, lambda batch: self.losses(batch, 2), pairs, self.device)


def _gradients(total: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a number, None where it does not depend on a parameter."""
    if total.grad_fn is None:
        return [None] * len(parameters)
    return torch.autograd.grad(total, list(parameters), allow_unused=True, retain_graph=True)


def _alike(one: list[Tensor], other: list[Tensor], rows: list[int]) -> bool:
    """Return whether some rows of two batches agree."""
    if [x.shape[1:] for x in one] != [x.shape[1:] for x in other]:
        return True  # padded to other lengths
    return all(
        torch.allclose(x[rows].double(), y[rows].double(), rtol=1e-5, atol=1e-6, equal_nan=True)
        for x, y in zip(one, other, strict=True)
        if not x.is_complex()
    )


def _coarsest(layer: Layer, calls: Sequence[Any]) -> torch.dtype:
    """Return the floating-point type of a layer's parameters and outputs that rounds most."""
    dtypes = [layer.tensor(role).dtype for role in layer.parameters]
    dtypes += [y.dtype for call in calls if isinstance(call, Call) for y in call.output_gradients if y is not None]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _compare(name: str, expected: Tensor | None, found: Tensor | None, whole: float, coarse: torch.dtype) -> None:
    if expected is None and found is None:
        return
    relative = 1e-2 if coarse == torch.float32 else 1e-6 if coarse == torch.float64 else 0.2
    slack = 1e-5 if coarse in (torch.float32, torch.float64) else 1e-2  # of a gradient that is zero but for rounding
    scale = max(_norm(x) for x in (expected, found) if x is not None)
    if expected is None or found is None:
        distance = scale
    else:
        distance = _norm(expected.to(found) - found)
    if distance > relative * scale + slack * whole + 1e-12:
        raise ValueError(
            f"the per-example gradients of '{name}' do not add up to the gradient of autograd "
            f"(relative difference {distance / max(scale, 1e-30):.2g}); please report this model"
        )


def _norm(x: Tensor) -> float:
    """Return the Euclidean norm of a tensor, summed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _scaled(batch: Any, rows: Sequence[int], size: int, scale: float) -> Any:
    """Return a batch with the floating-point numbers of some rows multiplied by a factor."""
    if scale == 1.0 or not rows:
        return batch

    def of(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or x.shape[0] != size:
            return x
        if x.layout != torch.strided:
            return x
        x = x.clone()
        x[list(rows)] *= scale
        return x

    return tree_map(of, batch)


def _mixes_rows(what: str) -> str:
    """Return the message for a collate function or an augmentation that mixes rows."""
    return (
        f"{what} mixes the rows of a batch: a row changed when only the rows beside it did; one example would then move the "
        "gradients of others. Change each row on its own"
    )


def _mixes(failure: Unknown | None, what: str) -> str:
    """Return the message for a model that mixes examples."""
    if failure is None:
        return f"{what}: model, loss_fn or augment depends on the batch; compute each loss from its example alone"
    return f"{failure.operation} mixes examples: {what} ({failure.reason})"


def _is_permanent(error: Exception) -> bool:
    """Return whether an error would come again on any rows: no memory, or losses of the wrong shape."""
    shapes = isinstance(error, ValueError) and str(error).startswith(("loss_fn must return", "loss_fn returned"))
    return shapes or is_out_of_memory(error)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def program_of(function: Any) -> Any:
    """Return what identifies the program of a loss function: its code, whatever object or arguments it is bound to."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))
