"""Check each loss of a session on public rows, and say how gradients of examples are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpkfc.gradients.augmentation import Augmentation, augment_batch
from dpkfc.gradients.clipped_sum import GradientMode
from dpkfc.gradients.layers import Layer, device_of_layers
from dpkfc.gradients.loss_function import LossFn, identify_program, losses_of
from dpkfc.gradients.one_pass import move_batch
from dpkfc.gradients.padding_rows import find_padding_rows
from dpkfc.gradients.state import own_pass
from dpkfc.lazy_noise import LazyNoise
from dpkfc.public_rows.rows import PublicRows
from dpkfc.public_rows.template import Attempts, find_template
from dpkfc.rng_state import preserve_generators, restarter
from dpkfc.verification.check import check_on_public_rows
from dpkfc.verification.differences import all_gradients
from dpkfc.verification.graph_comparison import compare_graph
from dpkfc.verification.own_generators import refuse_own_generators

_log = logging.getLogger(__name__)


@dataclass
class LossCheck:
    """Checks each loss once, before its first private pass.

    Attributes:
        model: in training.
        layers: its layers.
        mode: how the gradients of the session are computed, which a check may change.
        verify: as of `Session`.
        expected_rows: rows of a logical batch, on average.
        public_records: as of `Session`.
        augment: as of `Session`.
        is_sharded: whether the model is divided between processes.
    """

    model: nn.Module
    layers: Sequence[Layer]
    mode: GradientMode
    verify: bool
    expected_rows: int
    public_records: Sequence[Any] | None
    augment: Augmentation | None
    is_sharded: bool
    _checked: set[Hashable] = field(default_factory=set)
    _unchecked_reason: str = ""

    def forget(self) -> None:
        """Check all losses again, since passes run in another way from now on."""
        self._checked.clear()

    def check(
        self,
        loss_fn: LossFn,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        bound: int | None,
        lazy: LazyNoise,
    ) -> None:
        """Check a loss on public rows, unless that was done before.

        Args:
            loss_fn: of this step.
            dataset: whose types and shapes public rows take.
            collate: makes a batch of records.
            bound: most rows of a micro-batch, None for no bound.
            lazy: tables whose noise waits, which are exposed here.

        Raises:
            ValueError: examples mix, or a sharded model has an operation that is not proved; a loss
                that lazy noise does not go with.
        """
        program = identify_program(loss_fn)
        if not self.verify or program in self._checked:
            return
        lazy.expose()
        self.mode.unproved_operation = None
        self.mode.is_checked = False
        if self.mode.graph is not None:
            self.mode.graph.refusal = None
        refuse_own_generators(dataset, collate)
        template = find_template(dataset, self.public_records)
        template.warn(stacklevel=4)
        device = device_of_layers(self.layers)
        verdict = check_on_public_rows(
            self.model,
            self.layers,
            loss_fn,
            template.attempts(collate, device),
            expected=self.expected_rows,
            bound=bound,
            augment=self.augment,
        )
        unproved = verdict.operation
        if self.is_sharded and unproved is not None:
            raise ValueError(
                f"{unproved.operation}: {unproved.reason[:60]}; a model divided by fully_shard"
                " needs a proved batch axis (docs/errors.md#one-example-at-a-time)"
            )
        if lazy.tables and unproved is not None:
            raise ValueError(
                f"lazy_noise: {unproved.operation} takes one pass for each example"
                f" ({unproved.reason[:50]}); register_batch_rule, or leave lazy_noise()"
            )
        if lazy.tables:
            self._check_reads(loss_fn, template.attempts(collate, device), lazy)
        self._checked.add(program)
        self.mode.unproved_operation = unproved
        if verdict.rows is not None:
            self._check_padding(loss_fn, verdict.rows, device)
            if unproved is None:
                self._compare_graph(loss_fn, verdict.rows, device)
        # A failing record of one process would leave the others of a divided model waiting.
        self.mode.is_checked = verdict.is_accepted and not self.is_sharded
        if unproved is not None:
            _log.warning("%s", self.gradients)
        self._unchecked_reason = ""
        if verdict.unchecked:
            self._unchecked_reason = f": {verdict.unchecked.splitlines()[0][:60]}"
        verdict.warn(stacklevel=4)

    def _check_padding(self, loss_fn: LossFn, rows: PublicRows, device: torch.device) -> None:
        """Refuse a row of padding with a gradient on public rows, since no step would move it."""
        padding = find_padding_rows(self.layers)
        if not padding or self.is_sharded:
            return
        size = min(4, len(rows))
        with preserve_generators(), own_pass(self.model), torch.enable_grad():
            batch = move_batch(rows.batch(range(size)), device)
            batch = augment_batch(self.augment, self.model, batch, size)
            total = losses_of(loss_fn, self.model, batch).sum()
            gradients = all_gradients(self.model, total)
        for name, index in padding.items():
            if bool(gradients[name][index].any()):
                raise ValueError(
                    f"'{name}' has padding_idx={index}, and loss_fn or the model reads this row"
                    " elsewhere too; leave padding_idx out, or tie the weight to an nn.Linear"
                )

    def _compare_graph(self, loss_fn: LossFn, rows: PublicRows, device: torch.device) -> None:
        """Refuse captured graphs that compute something else than the loss on public rows."""
        if self.mode.graph is None:
            return
        # From 16 rows on a convolution has another graph.
        size = max(2, min(16, self.expected_rows, len(rows)))
        graph = self.mode.graph
        with preserve_generators():  # a collate function may draw numbers
            batch = move_batch(rows.batch(range(size)), device)
            compare_graph(graph, self.model, self.layers, loss_fn, self.augment, batch, size)

    def _check_reads(self, loss_fn: LossFn, attempts: Attempts, lazy: LazyNoise) -> None:
        """Refuse a loss that reads a table beside the calls of its module, on public rows.

        It would find NaN, where noise waits.
        """

        def find_finite(batch: Any) -> Tensor:
            restart()
            with own_pass(self.model), torch.no_grad():
                batch = augment_batch(self.augment, self.model, tree_map(deepcopy, batch), 2)
                return losses_of(loss_fn, self.model, batch).isfinite()

        restart = restarter()
        device = device_of_layers(self.layers)
        for make_rows in attempts:
            try:
                batch = move_batch(make_rows(2).batch(range(2)), device)
                exposed = find_finite(batch)
            except Exception:
                # The loss does not accept these rows.
                continue
            with lazy.passes():
                hidden = find_finite(batch)
            if not torch.equal(exposed, hidden):
                raise ValueError(
                    "lazy_noise: loss_fn or the model reads the weight of an embedding otherwise"
                    " than by calling its module; leave lazy_noise()"
                )
            return

    @property
    def unproved_operation(self) -> str:
        """The operation that forces one pass for each example; "" if the batch axis is proved."""
        operation = self.mode.unproved_operation
        return "" if operation is None else operation.operation

    @property
    def gradients(self) -> str:
        """How the gradients of examples are computed, the reason, and whether that was checked."""
        checked = ""
        if not self._checked or self._unchecked_reason:
            checked = f"; not checked on public rows{self._unchecked_reason}"
        unproved = self.mode.unproved_operation
        if unproved is None:
            return f"whole micro-batches, with a proved batch axis{checked}"
        return (
            f"one example at a time, since {unproved.operation} hides the batch axis "
            f"({unproved.reason}): a micro-batch of n examples takes n passes; register_batch_rule "
            f"makes it one{checked}"
        )
