"""A client's model, and the private sums that it forms from per-example gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpkfc.data.loading import Collate, MicroBatches, Part, layout
from dpkfc.data.missing_values import warn_of_missing_values
from dpkfc.federated.party import PartyModel
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.sums import total_norm, zero_sums
from dpkfc.gradients.autograd_graph import gradient_of
from dpkfc.gradients.clip import Clip, clip_factors
from dpkfc.gradients.clipped_sum import GradientMode, clipped_sum
from dpkfc.gradients.layers import device_of_layers
from dpkfc.gradients.loss_function import LossFn
from dpkfc.gradients.loss_state import make_stateless
from dpkfc.gradients.one_pass import move_batch
from dpkfc.gradients.state import own_pass
from dpkfc.linalg.blocks import raise_precision
from dpkfc.public_rows.template import UNREADABLE, find_template
from dpkfc.rng_state import randomize_generators
from dpkfc.tensors import NamedTensors, Tensors
from dpkfc.verification.check import check_on_public_rows
from dpkfc.verification.own_generators import refuse_own_generators

Indices = NDArray[np.int64]
# Relative error of a norm in float32 against a sum of squares in float64.
_ROUNDING = 1 + 1e-6


class ClientRecords:
    """A client's own data.

    Args:
        dataset: a map-style dataset, or a tuple of tensors with a common first axis.
        collate_fn: maps a list of examples to a batch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        self.dataset = dataset
        self.loader = MicroBatches(dataset, collate_fn=collate_fn)
        self.all = np.arange(len(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def micro_batches(self, indices: Indices, bound: int | None) -> Iterable[tuple[Any, Part]]:
        """Return micro-batches with their rows.

        Args:
            indices: of records, as `data.loading.layout` takes them.
            bound: most rows of a micro-batch.
        """
        parts = layout(indices, bound)
        return zip(self.loader.load([part.records for part in parts]), parts, strict=True)


class LocalModel(PartyModel):
    """The model of one or several clients of one process, and its preconditioner.

    The parameters come from the last round.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; its trained parameters are overwritten by every
            round.
        loss_fn: maps (model, batch) to one loss per example.

    Raises:
        ValueError: a model that the gradient engine does not cover.
    """

    def __init__(self, plan: FederatedPlan, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__(plan, model)
        self.loss_fn = make_stateless(loss_fn)
        self.digest = ""
        self._clip = Clip(plan.config.max_grad_norm)
        self._gradient_mode = GradientMode()
        self._is_verified = False

    def load(self, values: NamedTensors) -> None:
        """Take the parameters of a round.

        Raises:
            ValueError: as `check_values`; nothing is taken then.
        """
        self.check_values(values)
        with torch.no_grad():
            for name, x in values.items():
                self.parameters[name].copy_(x)

    def check_values(self, values: NamedTensors) -> None:
        """Refuse tensors of a round that do not fit the parameters of this model.

        Raises:
            ValueError: different names or shapes, or numbers that the parameters' type cannot hold.
        """
        if {name: tuple(x.shape) for name, x in values.items()} != self.shapes:
            raise ValueError(
                "the parameters of the round have different names or shapes than this model's"
            )
        for name, x in values.items():
            if not x.to(self.parameters[name]).isfinite().all():
                raise ValueError(f"'{name}' among the parameters of the round is not finite")

    def take_metric(self, state: NamedTensors) -> None:
        """Take a preconditioner that the server built."""
        preconditioner = self.coordinates.restore(state)
        self.coordinates.current = preconditioner
        self.digest = preconditioner.digest

    def advance_metric(self, step: int) -> None:
        """Set the number of the round, for a preconditioner that changes between refreshes.

        Raises:
            ValueError: the preconditioner should have been rebuilt.
        """
        current = self.coordinates.current
        self.coordinates.refresh(step)
        if self.coordinates.current is not current:
            raise ValueError(
                f"the preconditioner of round {step} is older than its schedule allows; send a new "
                "one"
            )

    def zeros(self) -> Tensors:
        """Return the sum over no records."""
        return zero_sums(self.parameters)

    def verify(self, records: ClientRecords) -> None:
        """Check model and loss once, on public rows.

        No value of a record is used, and no type that most records do not share. Where no record
        can be read, nothing is checked: such records contribute zero. Where the loss takes no
        public rows, a `UserWarning` says so, and the examples of every micro-batch that is not
        proved are differentiated one at a time.

        Args:
            records: of a client.

        Raises:
            ValueError: the loss mixes examples, by name of the operation.
        """
        if self._is_verified:
            return
        warn_of_missing_values(stacklevel=4)
        collate = records.loader.collate
        refuse_own_generators(records.dataset, collate)
        template = find_template(records.dataset)
        if template.problem == UNREADABLE:
            return
        template.warn(stacklevel=4)
        verdict = check_on_public_rows(
            self.model,
            self.layers,
            self.loss_fn,
            template.attempts(collate, device_of_layers(self.layers)),
            expected=self._config.local_divisor,
            bound=self._config.max_physical_batch_size,
        )
        verdict.warn(stacklevel=4)
        self._gradient_mode.unproved_operation = verdict.operation
        self._is_verified = True

    def clipped_sum(
        self, records: ClientRecords, indices: Indices, *, together: bool = False
    ) -> Tensors:
        """PRIVATE: return the sum of clipped gradients of some records, in preconditioned space.

        Args:
            records: of the client.
            indices: of the records, `[n]`.
            together: clip the mean gradient of all records once, as one unit.

        Raises:
            ValueError: the sum is not finite, as under a preconditioner that is not.
        """
        table = indices[None, :] if together and indices.size else indices
        sums, _ = clipped_sum(
            self.model,
            self.layers,
            self.coordinates.metric,
            self._clip,
            loss_fn=self.loss_fn,
            micro_batches=records.micro_batches(table, self._config.max_physical_batch_size),
            one_record=records.loader.load_one,
            mode=self._gradient_mode,
            repeatable=self.plan.test_mode,
        )
        if not all(x.sum().isfinite() for x in sums.values()):
            raise ValueError("a clipped sum is not finite; check the preconditioner of the round")
        return sums

    def mean_gradient(self, records: ClientRecords) -> Tensors:
        """PRIVATE and unclipped: return the gradient of the mean loss over all records.

        A parameter without a gradient has zeros.
        """
        with (
            torch.enable_grad(),
            randomize_generators(self.plan.test_mode),
            own_pass(self.model),
        ):
            batch = move_batch(records.loader.batch(records.all), device_of_layers(self.layers))
            gradients = gradient_of(self.model, self.loss_fn(self.model, batch).mean())
        return zero_sums(self.parameters) | gradients


def clip_as_one(tensors: NamedTensors, max_grad_norm: float) -> Tensors:
    """Clip a whole contribution to norm C; return zeros for a contribution that is not finite."""
    # A product in 16 bits could exceed C.
    tensors = {name: raise_precision(x) for name, x in tensors.items()}
    norm = torch.tensor([total_norm(tensors) * _ROUNDING], dtype=torch.float64)
    factor = float(clip_factors(norm, max_grad_norm)[0])
    if factor == 0:
        # A product with 0 would keep NaN.
        return {name: torch.zeros_like(x) for name, x in tensors.items()}
    return {name: x * factor for name, x in tensors.items()}
