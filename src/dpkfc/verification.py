"""Check on public rows, before any private row, that each example has its own gradient.

The proof for a private pass is in `tracking`; `gradients.clipped_sum._Passes` asks for it.

What the tracker proves needs no test. This module tests what the tracker cannot see: code that
depends on the size of the batch, collate functions, backward passes in Python. What the tracker
cannot prove is compared example by example. Either examples really mix, which is refused by name,
or only their layout is unknown, and then examples are differentiated one at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dpkfc._checks import check_one_of
from dpkfc.distributed.context import flatten
from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.autograd_graph import gradient_of
from dpkfc.gradients.eager_mode import run_eagerly
from dpkfc.gradients.full_precision import full_precision
from dpkfc.gradients.layer_matrices import split_sum
from dpkfc.gradients.layers import Call, Layer, device_of_layers, named_tensors, tensors_of
from dpkfc.gradients.loss_function import LossFn, check_losses, losses_of
from dpkfc.gradients.model_checks import check_finite
from dpkfc.gradients.one_pass import follow_augmentation, follow_pass, move_batch
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.state import StateChangedError
from dpkfc.gradients.state_check import PublicCheck, check_memory, checked_state
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.metric import NamedTensors
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows import Attempts, PublicRows, warn_of_padding
from dpkfc.rng_state import host_states, preserve_generators, restarter, seed_generators
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import UnknownOperation, forget_batches

# --------------------------------------------------------------------------------------------------
# Constants in place of random numbers, so that two passes of one model can be compared.
#
# Dropout and augmentation draw different numbers for a batch of another size. With constants, only
# other examples, or their number, can cause a difference.


class ConstantNumbers(TorchDispatchMode):
    """Replaces the random numbers of torch by constants, except numbers of other generators."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: passes run uncompiled, and the mark would import the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with constants in place of its random numbers."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        is_known = kwargs.get("generator") is not None
        if is_known or torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        name = str(func.overloadpacket.__name__)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(output[1])
        if isinstance(output, Tensor):
            _fill_with_constant(name, output, args)
        return output


def _fill_with_constant(name: str, x: Tensor, args: Any) -> None:
    """Overwrite the random numbers of an operation."""
    if name.startswith("randperm"):
        x.copy_(torch.arange(len(x), device=x.device).flip(0))
    elif "bernoulli" in name:
        x.fill_(1)
    elif not x.is_floating_point():
        x.fill_(0)
    elif "normal" in name or "randn" in name:
        x.fill_(0.25)
    elif name in ("uniform_", "uniform") and len(args) > 2:
        middle = (float(args[1]) + float(args[2])) / 2
        x.fill_(middle)
    else:
        x.fill_(0.5)


# --------------------------------------------------------------------------------------------------

_MAX_ROWS = 256  # of a compared batch
_SINGLE_ROWS = 8  # compared with batches of one
_SCALES = (1.0, 30.0, -30.0, 0.0)  # of changed rows
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.05,
}


@dataclass(frozen=True)
class Verdict:
    """The result of the check on public rows.

    Attributes:
        operation: why examples are differentiated one at a time; None where whole micro-batches are
            proved.
        unchecked: why nothing could be compared, or "".
        is_accepted: whether the loss has accepted public rows.
    """

    operation: Unknown | None = None
    unchecked: str = ""
    is_accepted: bool = True

    def warn(self, stacklevel: int) -> None:
        """Warn where nothing could be compared.

        Args:
            stacklevel: as of `warnings.warn`, from the caller.
        """
        if self.unchecked:
            reason = self.unchecked.splitlines()[0][:60]
            warnings.warn(
                f"public rows could not be used: {reason}; whether examples mix is not checked",
                stacklevel=stacklevel + 1,
            )


def check_verify_setting(verify: bool | str) -> bool | str:
    """Return the setting of `verify=`.

    Raises:
        ValueError: another value than True, False and "strict".
    """
    check_one_of("verify", verify, (True, False, "strict"))
    return verify


def check_on_public_rows(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: LossFn,
    attempts: Attempts,
    *,
    expected: int,
    bound: int | None = None,
    augment: Augmentation | None = None,
    strict: bool = False,
) -> Verdict:
    """Check on public rows that every example has its own gradient, and choose how to compute it.

    Args:
        model: in the mode in which it is trained.
        layers: its layers.
        loss_fn: maps model and batch to losses `[n]`.
        attempts: each maps a number of records to public rows. The first rows that the loss accepts
            are used.
        expected: rows of a logical batch, on average.
        bound: most rows of a micro-batch, None for no bound.
        augment: maps a batch to one with as many rows.
        strict: raise where an operation has no batch rule.

    Returns:
        The verdict.

    Raises:
        ValueError: examples mix (with the name of the operation, where it is known), the loss fails
            on a batch of one example, or the forward pass keeps something of its examples.
        Exception: what the loss raises on records that a user has given.
        RuntimeError: not even two examples fit into memory.
        UnknownOperation: under `strict`, an operation that the tracker does not know.
    """
    check_finite(layers)
    twice = 2 * expected
    most = max(_MAX_ROWS, expected)
    max_rows = max(4, min(twice, bound or twice, most))
    device = device_of_layers(layers)
    with (
        _refuse_kept_results(model),
        run_eagerly(),
        forget_batches(),
        torch.enable_grad(),
        preserve_generators(),
        checked_state(model) as state,
    ):
        while True:
            seed_generators(1)
            check = _Check(model, layers, loss_fn, augment, device, max_rows, state)
            try:
                return check.verdict(attempts, expected, strict)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if max_rows == 2:
                    raise RuntimeError(
                        "the check on public rows needs two examples in memory, and they do not"
                        " fit; nothing was released. Use a smaller model, or verify=False"
                    ) from error
            max_rows = max(2, max_rows // 2)


@contextmanager
def _refuse_kept_results(model: nn.Module) -> Iterator[None]:
    """Raise if an object keeps results of passes that the body makes, as a cache of keys does.

    A replica copies what user code defines. Objects of installed packages stay shared by all
    passes, so one batch would see results of another.
    """
    try:
        yield
    finally:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                is_object = hasattr(value, "__dict__") and not isinstance(value, Tensor)
                if is_object and not name.startswith("_") and _holds_results(value):
                    raise ValueError(
                        f"'{name}' of the module '{path}' ({type(value).__name__}) keeps results of"
                        " a pass for the next one; make it anew in forward (docs/pitfalls.md)"
                    )


def _holds_results(x: Any, depth: int = 4) -> bool:
    if isinstance(x, Tensor):
        return x.grad_fn is not None
    if depth == 0 or isinstance(x, nn.Module):
        return False
    if isinstance(x, Mapping):
        parts = list(x.values())
    elif isinstance(x, (list, tuple)):
        parts = list(x)
    else:
        parts = list(vars(x).values()) if hasattr(x, "__dict__") else []
    return any(_holds_results(part, depth - 1) for part in parts)


@dataclass(frozen=True)
class _Check:
    """The comparisons of one model and loss.

    Attributes:
        model: the model.
        layers: its layers.
        loss_fn: maps model and batch to losses.
        augment: of the training.
        device: of the parameters.
        max_rows: of a batch.
        state: of the model before the check.
        is_afresh: begin each pass with the same state, as passes of a step do.
    """

    model: nn.Module
    layers: Sequence[Layer]
    loss_fn: LossFn
    augment: Augmentation | None
    device: torch.device
    max_rows: int
    state: PublicCheck
    is_afresh: bool = False

    # -- rows that the loss accepts ----------------------------------------------------------------

    def accepted_rows(self, attempts: Attempts) -> tuple[PublicRows | None, str]:
        """Return the first public rows that the loss accepts, or why there are none.

        What the loss raises on records that a user has given is raised.
        """
        reason = "no public rows were given"
        for make_rows in attempts:
            rows = None
            try:
                rows = make_rows(max(4, self.max_rows))
                # A number in any row may lie outside a table, so all rows are tried.
                for size in (2, min(self.max_rows, len(rows))):
                    self._check_accepts(rows, size)
            except Exception as error:
                are_given = rows is not None and rows.are_given
                if are_given or _is_permanent(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
            else:
                self._check_batch_of_one(rows)
                return rows, ""
        return None, reason

    def _check_accepts(self, rows: PublicRows, size: int) -> None:
        """Check that the loss accepts a batch, unless it refuses one of its rows alone."""
        batch = rows.batch(range(size))
        try:
            self.losses(batch, size)
            return
        except Exception as error:
            if _is_permanent(error):
                raise
            batch_error = error
        for i in range(size):
            try:
                self.losses(rows.batch([i]), 1)
            except Exception:
                raise batch_error from None
        raise ValueError(
            f"loss_fn takes each of {size} rows alone and fails on their batch"
            f" ({_first_line(batch_error)}): it depends on the batch"
            " (docs/errors.md#gradient-mismatch)"
        ) from batch_error

    def _check_batch_of_one(self, rows: PublicRows) -> None:
        try:
            self.losses(rows.batch([0]), 1)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"loss_fn fails on a batch of one example ({_first_line(error)}); write"
                " squeeze(-1) for squeeze(), and keep the batch axis"
            ) from error

    # -- passes ------------------------------------------------------------------------------------

    def losses(self, batch: Any, size: int) -> Tensor:
        """Return the losses `[n]` of a batch, augmented as in training."""
        batch = self._augment(batch, size)
        with self.state.begin_afresh(self.model) if self.is_afresh else nullcontext():
            losses = losses_of(self.loss_fn, self.model, batch)
        check_losses(losses, size)
        return losses

    def trace(self, batch: Any, size: int) -> tuple[Unknown | None, Tape, Tensor]:
        """Track one pass; return why it is not proved, its tape and its losses."""
        batch = move_batch(batch, self.device)
        batch, tracker = follow_augmentation(self.augment, self.model, batch, size)
        tape, losses = follow_pass(self.loss_fn, self.model, self.layers, batch, tracker)
        tape.check_enabled()
        tape.check_depends(losses)
        return tape.failure(losses), tape, losses

    def _augment(self, batch: Any, size: int) -> Any:
        batch = move_batch(batch, self.device)
        return augment_batch(self.augment, self.model, batch, size)

    def _augment_rows(self, rows: PublicRows, indices: Sequence[int]) -> Any:
        return self._augment(rows.batch(indices), len(indices))

    # -- the verdict -------------------------------------------------------------------------------

    def verdict(self, attempts: Attempts, expected: int, strict: bool) -> Verdict:
        """Return the verdict, unchecked where the loss accepts no public rows."""
        rows, reason = self.accepted_rows(attempts)
        if rows is None:
            return Verdict(unchecked=reason, is_accepted=False)
        size = max(2, min(self.max_rows // 2, expected))
        few = min(4, size)
        failure = self._trace_with_seeds(rows, size, few)
        collate_failure = self._check_row_functions(rows, min(32, size))
        failure = failure or collate_failure
        if failure is not None and strict:
            raise _unknown_operation(failure)
        self._check_padding(rows)
        make_batch = partial(self._augment_rows, rows, range(few))
        if self._is_repeatable(make_batch, restarted=True):
            failure = self._compare(rows, size, failure, make_batch)
            if failure is not None and strict:
                raise _unknown_operation(failure)
            return Verdict(failure)
        self._check_sizes_afresh(rows, failure)
        self._check_memory(rows)
        batch = make_batch()
        if failure is not None and not self._is_repeatable(lambda: batch, restarted=True):
            raise ValueError(
                "model or loss_fn remembers earlier batches, or has a random generator of its"
                " own; use torch's, numpy's and random's (docs/errors.md#state)"
            )
        # A proof needs no comparison. Without a proof every example has a pass of its own.
        return Verdict(
            failure,
            "two passes over the same rows differ, with the same seeds of torch, numpy and random",
        )

    def _compare(
        self,
        rows: PublicRows,
        size: int,
        failure: Unknown | None,
        make_batch: Callable[[], Any],
    ) -> Unknown | None:
        """Compare passes over the same rows, beside other rows and in batches of other sizes.

        Returns:
            Why the gradients of a pass do not belong to its examples, or None.
        """
        with ConstantNumbers():
            # numpy and random draw different numbers for a batch of another size.
            before = host_states()
            is_repeatable = self._is_repeatable(make_batch, restarted=False)
            is_drawn = host_states() != before
            are_constant = is_repeatable and not is_drawn
            if are_constant:
                self._check_sizes(rows, failure)
            if failure is None:
                failure = self._check_tape(rows, min(4, size), alone=are_constant)
            if failure is not None:
                self._check_neighbours(rows, size, failure, is_drawn=is_drawn)
        self._check_memory(rows)
        return failure

    def _trace_with_seeds(self, rows: PublicRows, size: int, few: int) -> Unknown | None:
        """Return the first reason why a pass is not proved, under several random states."""
        failure = None
        for seed, length in enumerate((size, few, few, few)):
            seed_generators(seed + 1)
            seed_failure, _, losses = self.trace(rows.batch(range(length)), length)
            failure = failure or seed_failure
            if seed_failure is None and seed == 0:
                self._warn_of_unused(losses)
        seed_generators(1)
        return failure

    def _check_row_functions(self, rows: PublicRows, size: int) -> Unknown | None:
        """Check that collate function and augmentation change each row on its own.

        Returns:
            Why a collate function cannot be compared, or None.
        """
        size = _size_apart(rows.records[:1], size)
        can_compare = self._check_rows("collate_fn", rows.batch, size)
        if self.augment is not None:
            if not self._check_rows("augment", partial(self._augment_rows, rows), size):
                self._check_augment_with_nan(rows, size)
        if can_compare:
            return None
        reason = "it draws random numbers of its own, so that it cannot be compared"
        return Unknown("collate_fn", reason)

    def _is_repeatable(self, make_batch: Callable[[], Any], *, restarted: bool) -> bool:
        """Return whether two passes agree, where torch draws constants.

        Args:
            make_batch: makes the batch of each pass.
            restarted: begin both with the same state of the global generators.
        """
        restart = restarter(self.device)
        passes = []
        with ConstantNumbers():
            for _ in range(2):
                if restarted:
                    restart()
                losses = losses_of(self.loss_fn, self.model, make_batch())
                passes.append(losses.detach())
        return not self._losses_differ(*passes)

    def _losses_differ(self, losses: Tensor, others: Tensor) -> bool:
        """Return whether losses differ by more than rounding."""
        losses = losses.detach().double()
        others = others.detach().double()
        dtypes = {p.dtype for p in named_tensors(self.layers).values()}
        tolerance = max(_TOLERANCES.get(dtype, 0.1) for dtype in dtypes)
        is_finite = losses.isfinite()
        if not torch.equal(is_finite, others.isfinite()):
            return True
        if not bool(is_finite.any()):
            return False
        losses = losses[is_finite]
        others = others[is_finite]
        scale = torch.maximum(losses.abs(), others.abs())
        bound = tolerance * (scale + scale.median()) + 1e-9
        distance = (losses - others).abs()
        return bool((distance > bound).any())

    def _check_sizes(self, rows: PublicRows, failure: Unknown | None) -> None:
        """Check that the loss of a row is the same in batches of several sizes, and alone."""
        count = min(self.max_rows, len(rows))

        def values(*batches: Sequence[int]) -> Tensor:
            parts = [self.losses(rows.batch(batch), len(batch)).detach() for batch in batches]
            return torch.cat(parts)

        whole = values(range(count))
        half = -(-count // 2)
        halves = values(range(half), range(half, count))
        comparisons = [(whole, halves, half)]
        size = (half // 2) | 1
        while size > 1:
            first_values = values(range(size))
            comparisons.append((whole[:size], first_values, size))
            size //= 2
        step = -(-count // _SINGLE_ROWS)
        single_rows = sorted({0, 1, count - 1, *range(0, count, step)})
        single_values = values(*([i] for i in single_rows))
        comparisons.append((whole[single_rows], single_values, 1))
        for losses, others, size in comparisons:
            if self._losses_differ(losses, others):
                sizes = f"in a batch of {count} differs from that in a batch of {size}"
                raise ValueError(_mixing_message(failure, f"the loss of a row {sizes}"))

    def _check_sizes_afresh(self, rows: PublicRows, failure: Unknown | None) -> None:
        """Compare sizes for a model that counts, say, its examples, but draws no random numbers.

        What such a model keeps makes two passes of this check differ; passes of a step are equal.
        """
        afresh = replace(self, is_afresh=True)
        few = min(4, len(rows))
        first, second = (afresh.losses(rows.batch(range(few)), few) for _ in range(2))
        if not self._losses_differ(first, second):
            afresh._check_sizes(rows, failure)

    def _check_neighbours(
        self, rows: PublicRows, size: int, failure: Unknown, *, is_drawn: bool
    ) -> None:
        """Check that no row changes the loss or the gradient of another.

        Any two rows are once on different sides of a split: one of them is then changed, the other
        not.

        Args:
            rows: public rows.
            size: of a batch.
            failure: why the pass is not proved.
            is_drawn: a pass draws numbers of numpy or random. Where it reads the examples, as
                SpecAugment reads the lengths of recordings, they may decide which numbers the rows
                after them get.
        """
        size = _size_apart(rows.records, size)
        restart = restarter(self.device)

        def run_pass(
            indices: list[int], kept: list[int], scale: float = 1.0
        ) -> tuple[Tensor, Tensor]:
            restart()
            changed = [i for i in range(size) if i not in kept]
            batch = _scale_rows(rows.batch(indices), changed, size, scale)
            losses = self.losses(batch, size)[kept]
            gradients = _all_gradients(self.model, losses.sum())
            return losses.detach(), flatten(gradients, torch.float64)

        every = list(range(size))
        part_gradients = []
        why = ""
        for bit, kept, replaced in _splits(size):
            losses, gradient = run_pass(every, kept)
            part_gradients.append(gradient)
            for scale in _SCALES if bit == 0 else _SCALES[:1]:
                try:
                    other_losses, other_gradient = run_pass(replaced, kept, scale)
                except Exception as error:
                    if scale == 1.0 or is_out_of_memory(error):
                        raise
                    # The loss takes no rows of this scale, as where a target is a probability.
                    continue
                differ = self._losses_differ(losses, other_losses)
                if differ or _gradients_differ(gradient, other_gradient):
                    why = "rows changed when only the rows next to them did"
            if len(part_gradients) == 2:
                total = part_gradients[0] + part_gradients[1]
                _, gradient = run_pass(every, every)
                if _gradients_differ(total, gradient):
                    why = "the gradients of parts of a batch do not add up to the batch's gradient"
                part_gradients = []
        if why and not (is_drawn and failure.is_read):
            raise ValueError(_mixing_message(failure, why))

    def _check_tape(self, rows: PublicRows, size: int, *, alone: bool) -> Unknown | None:
        """Compare the tape with plain autograd once.

        This is a guard against faults of this library, and against hooks that mix examples in the
        backward pass, where no operation is followed.

        Args:
            rows: public rows.
            size: of the batch on the tape.
            alone: let plain autograd differentiate one row at a time.

        Returns:
            The first module that computes something else when it runs again, as one that fills a
            cache does, or None.
        """
        restart = restarter(self.device)
        steps = torch.arange(1, size + 1, dtype=torch.float64, device=self.device)
        weights = 0.5 + torch.frac(0.618 * steps)
        restart()
        failure, tape, losses = self.trace(rows.batch(range(size)), size)
        if failure is not None:
            return failure
        calls = tape.backward(losses)
        step = 1 if alone else size
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, size, step):
            part = range(first, first + step)
            restart()
            losses = self.losses(rows.batch(part), step)
            weighted = losses * weights[list(part)].to(losses)
            total = total + weighted.sum()
        expected = _all_gradients(self.model, total)
        total_norm = _total_norm(expected)
        if not math.isfinite(total_norm):
            return None
        for layer in self.layers:
            try:
                _check_sums(layer, calls.pop(layer.name, []), weights, expected, total_norm)
            except Exception as error:
                if layer.rule != "fallback" or is_out_of_memory(error):
                    raise
                where = f"layer '{layer.display_name}'"
                return Unknown(where, "run again for an example, it computes something else")
        return None

    def _warn_of_unused(self, losses: Tensor) -> None:
        """Warn where the loss never uses a trainable parameter, which noise alone would train."""
        gradients = gradient_of(self.model, losses.sum())
        unused = [name for name in trainable_tensors(self.model) if name not in gradients]
        if unused:
            warnings.warn(
                f"parameter '{unused[0]}' is trainable but loss_fn never uses it ({len(unused)}"
                " such): it receives noise alone; freeze it with requires_grad_(False)",
                stacklevel=7,
            )

    def _check_rows(self, name: str, make: Callable[[Sequence[int]], Any], size: int) -> bool:
        """Check that a collate function, or an augmentation, keeps every record to its own row.

        Args:
            name: of the function, for the message.
            make: maps indices of records to their batch.
            size: records of a batch.

        Returns:
            Whether two batches of the same records agree, so that batches can be compared.
        """
        restart = restarter(self.device)
        every = list(range(size))

        def make_tensors(indices: Sequence[int]) -> list[Tensor]:
            restart()
            return [x.to_dense() for x in _row_tensors(make(indices), size)]

        whole = make_tensors(every)
        if not _are_rows_equal(whole, make_tensors(every), every):
            return False
        for _, kept, replaced in _splits(size):
            if not _are_rows_equal(whole, make_tensors(replaced), kept):
                raise ValueError(_mixing_rows_message(name))
        return True

    def _check_augment_with_nan(self, rows: PublicRows, size: int) -> None:
        """Check a random augmentation: NaN in a row may not reach another row."""
        batch = _scale_rows(rows.batch(range(size)), range(1, size), size, math.nan)
        augmented_batch: Any = ()
        # An augmentation may refuse NaN.
        with suppress(Exception):
            augmented_batch = self._augment(batch, size)
        for x in _row_tensors(augmented_batch, size):
            if bool(x[:1].isnan().any()):
                raise ValueError(_mixing_rows_message("augment"))

    def _gradient_norm(self, losses: Tensor) -> float:
        return _total_norm(_all_gradients(self.model, losses.sum()))

    def _check_padding(self, rows: PublicRows) -> None:
        """Check that the loss of a short record does not depend on the padding of its batch."""
        is_last = []

        def agree(batch: Any, alone: Any) -> bool:
            losses = self.losses(batch, 2)
            others = self.losses(alone, 1)
            if self._losses_differ(losses[:1], others):
                is_last.append(not self._losses_differ(losses[1:], others))
                return False
            if have_equal_gradients(self.model, losses[:1].sum(), others.sum()):
                return True
            # A preference between two equal texts has a gradient that is zero but for rounding, in
            # the batch as alone.
            few = min(len(rows), _SINGLE_ROWS)
            usual = self._gradient_norm(self.losses(rows.batch(range(few)), few))
            padded = self._gradient_norm(self.losses(batch, 2)[:1])
            short = self._gradient_norm(self.losses(alone, 1))
            return max(padded, short) <= 1e-5 * usual

        with ConstantNumbers():
            is_different = rows.depends_on_padding(agree)
        if is_different is None:
            warn_of_padding(stacklevel=7)
        elif any(is_last):
            raise ValueError(
                "collate_fn sorts the records of a batch by their lengths; leave record i in row i"
                " (pack_padded_sequence takes enforce_sorted=False)"
            )
        elif is_different:
            raise ValueError(
                "an example padded to the length of a longer one has another loss than alone;"
                " mask the padding (docs/errors.md#gradient-mismatch)"
            )

    def _check_memory(self, rows: PublicRows) -> None:
        """Check that the forward pass keeps no value of its examples for later ones."""
        few = range(len(rows))[:4]
        pairs = [(0, 1), *((i, i) for i in few)]
        batches = [rows.batch(pair) for pair in pairs]
        losses = partial(self.losses, size=2)
        check_memory(self.model, self.state, losses, batches, self.device)


def _unknown_operation(failure: Unknown) -> UnknownOperation:
    """Return the error of `verify="strict"`."""
    return UnknownOperation(
        f"{failure.operation}: {failure.reason[:70]}; register a rule, or drop verify='strict'"
        " (docs/errors.md#one-example-at-a-time)"
    )


def _size_apart(records: Sequence[Any], size: int) -> int:
    """Return a size that is the length of no tensor of a record: at most `size`, at least 2.

    A tensor of one record would look like one with a row for each.
    """
    lengths = {x.shape[:1] for x in tensors_of(records)}
    while size > 2 and (size,) in lengths:
        size -= 1
    return size


def _splits(size: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield splits of rows into kept and replaced ones, two for each bit of the row numbers.

    Row i is replaced by row i + size. The numbers of any two rows differ in a bit.

    Args:
        size: number of rows, at least 2.

    Yields:
        The bit, the kept rows, and the indices of the batch with the other rows replaced.
    """
    for bit in range(math.ceil(math.log2(size))):
        for side in (0, 1):
            kept = []
            replaced = list(range(size))
            for i in range(size):
                if (i >> bit) & 1 == side:
                    replaced[i] += size
                else:
                    kept.append(i)
            yield bit, kept, replaced


def _first_line(error: Exception) -> str:
    """Return the beginning of the message of an error, or its type."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:60]


def _row_tensors(batch: Any, size: int) -> list[Tensor]:
    """Return the tensors of a batch with one row for each example."""
    return [x for x in tensors_of(batch) if not x.is_nested and x.shape[:1] == (size,)]


def _gradients_differ(gradient: Tensor, other: Tensor) -> bool:
    """Return whether two gradients differ by more than rounding, as whole vectors."""
    if gradient.shape != other.shape:
        return True
    scale = max(_norm(gradient), _norm(other))
    if not math.isfinite(scale):
        return False
    return _norm(gradient - other) > 1e-2 * scale + 1e-9


def _are_rows_equal(tensors: list[Tensor], others: list[Tensor], rows: list[int]) -> bool:
    """Return whether rows of two batches agree, or the batches have different padding."""
    shapes = [x.shape[1:] for x in tensors]
    if shapes != [x.shape[1:] for x in others]:
        return True
    for x, y in zip(tensors, others, strict=True):
        if x.is_complex():
            continue
        kept = x[rows].double()
        other_kept = y[rows].double()
        if not torch.allclose(kept, other_kept, rtol=1e-5, atol=1e-6, equal_nan=True):
            return False
    return True


def _check_sums(
    layer: Layer,
    calls: Sequence[Any],
    weights: Tensor,
    expected: NamedTensors,
    total_norm: float,
) -> None:
    """Check the weighted sums of the examples' gradients of a layer, against autograd's."""
    sums: NamedTensors = {}
    if calls:
        with full_precision():
            block = blocks_of(layer, calls, len(weights))
            sums = split_sum(layer, block.weighted_sum(weights))
    dtype = _coarsest_dtype(layer, calls)
    for name in layer.parameters.values():
        one = sums.get(name)
        if one is None:
            one = torch.zeros_like(expected[name])
        difference = _difference(expected[name], one, total_norm, dtype)
        if difference:
            raise ValueError(
                f"the per-example gradients of '{name}' do not add up to the gradient of "
                f"autograd (relative difference {difference:.2g}; see"
                " docs/errors.md#gradient-mismatch)"
            )


def _coarsest_dtype(layer: Layer, calls: Sequence[Any]) -> torch.dtype:
    """Return the floating-point type of a layer's parameters and outputs that rounds most."""
    dtypes = [layer.tensor(role).dtype for role in layer.parameters]
    for call in calls:
        if isinstance(call, Call):
            dtypes += [output.dtype for output in tensors_of(call.output_gradients)]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _difference(one: Tensor, other: Tensor, total_norm: float, dtype: torch.dtype) -> float:
    """Return the relative difference of two gradients of a parameter, 0 where it is rounding.

    Args:
        one: a gradient.
        other: another.
        total_norm: norm of the gradient of all parameters.
        dtype: the type of the layer that rounds most.
    """
    # The slack is for a gradient that is zero up to rounding.
    tolerances = {torch.float32: (1e-2, 1e-5), torch.float64: (1e-6, 1e-5)}
    relative, slack = tolerances.get(dtype, (0.2, 1e-2))
    scale = max(_norm(one), _norm(other))
    distance = _norm(one.to(other) - other)
    if distance > relative * scale + slack * total_norm + 1e-12:
        return distance / max(scale, 1e-30)
    return 0.0


def have_equal_gradients(model: nn.Module, one: Tensor, other: Tensor) -> bool:
    """Return whether two numbers have one gradient in every parameter, up to rounding.

    An attention over padding hardly changes the outputs of an untrained model.
    """
    gradients = _all_gradients(model, one)
    others = _all_gradients(model, other)
    total_norm = _total_norm(gradients)
    for name, gradient in gradients.items():
        if _difference(gradient, others[name], total_norm, gradient.dtype):
            return False
    return True


def _all_gradients(model: nn.Module, total: Tensor) -> NamedTensors:
    """Return the gradient of a number at every trainable parameter, zeros where it has none."""
    gradients = gradient_of(model, total)
    dense = {}
    for name, p in trainable_tensors(model).items():
        gradient = gradients.get(name)
        dense[name] = torch.zeros_like(p) if gradient is None else gradient
    return dense


def _total_norm(gradients: NamedTensors) -> float:
    return math.hypot(*map(_norm, gradients.values()))


def _norm(x: Tensor) -> float:
    """Return the Euclidean norm of a tensor, summed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _scale_rows(batch: Any, rows: Sequence[int], size: int, scale: float) -> Any:
    """Return a batch with the floating-point numbers of some rows multiplied by a factor."""
    if scale == 1.0 or not rows:
        return batch

    def scale_tensor(x: Tensor) -> Tensor:
        is_strided = x.is_floating_point() and x.layout == torch.strided
        if not is_strided or x.shape[:1] != (size,):
            return x
        x = x.clone()
        x[list(rows)] *= scale
        return x

    return tree_map_only(Tensor, scale_tensor, batch)


def _mixing_rows_message(name: str) -> str:
    """Return the message for a collate function or an augmentation that mixes rows."""
    return (
        f"{name} mixes the rows of a batch: a row changed when only the rows next to it did."
        " Change each row on its own (docs/errors.md#mixes-examples)"
    )


def _mixing_message(failure: Unknown | None, what: str) -> str:
    """Return the message for a model that mixes examples."""
    if failure is None:
        return (
            f"{what}: model, loss_fn or augment depends on the batch"
            " (docs/errors.md#mixes-examples)"
        )
    begin = f"{failure.operation} mixes examples: "
    end = " (docs/errors.md#mixes-examples)"
    room = 160 - len(begin) - len(end)
    reason = failure.reason
    if len(reason) > room:
        reason = reason.partition(" (shapes")[0]
    return begin + reason[:room] + end


def _is_permanent(error: Exception) -> bool:
    """Return whether an error would recur on any rows: memory, state, or the shape of losses."""
    begins = ("loss_fn must return", "loss_fn returned", "loss_fn takes each")
    is_of_losses = isinstance(error, ValueError) and str(error).startswith(begins)
    return is_of_losses or isinstance(error, StateChangedError) or is_out_of_memory(error)
