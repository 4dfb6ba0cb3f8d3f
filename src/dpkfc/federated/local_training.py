"""A client's model and the private sums that it forms from per-example gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpkfc.data.loading import MicroBatches, Part, collate, layout, tensors_of
from dpkfc.federated.messages import contract_of, shapes_of
from dpkfc.federated.options import FedNewStep
from dpkfc.federated.plan import FederatedPlan
from dpkfc.gradients.clipped_sum import LossFn, Proof, clipped_sum
from dpkfc.gradients.clipping import Clip, clip_factors
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.state import make_stateless
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.rng_state import device_of, randomize_generators
from dpkfc.verification import check_on_public_rows, draw_public_rows

Tensors = dict[str, Tensor]
# Most parameters of a model whose Fisher matrix a client may form.
_MAX_FISHER = 4096
# Relative error of a norm in float32 against a sum of squares in float64.
_ROUNDING = 1 + 1e-6


class Records:
    """A client's own data.

    Args:
        dataset: a map-style dataset, or a tuple of tensors with a common first axis.
        collate_fn: maps a list of examples to a batch.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.loader = MicroBatches(dataset, collate_fn=collate_fn)
        self.all = np.arange(len(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def micro_batches(
        self, indices: NDArray[np.int64], bound: int | None
    ) -> Iterable[tuple[Any, Part]]:
        """Return micro-batches with their rows.

        One batch of all records of a tuple of tensors is copied, not looked up record by record.

        Args:
            indices: of records, as `data.loading.layout` takes them; `all` itself for all of them.
            bound: most rows of a micro-batch.
        """
        tensors = tensors_of(self.dataset) if self.collate_fn is None else None
        is_one_batch = indices is self.all and indices.size and bound is None
        if is_one_batch and tensors is not None:
            return [(tuple(x.clone() for x in tensors), Part(indices, None, indices.size))]
        parts = layout(indices, bound)
        return zip(self.loader.load([part.records for part in parts]), parts, strict=True)

    def example(self) -> Any:
        """Return the first readable record, not collated; None without one.

        Its types and shapes are public.
        """
        for index in self.all:
            with suppress(Exception):
                return self.loader.example(int(index))
        return None

    def batch(self, indices: NDArray[np.int64]) -> Any:
        """Return the records at some indices as one batch."""
        return collate(self.dataset, indices, self.collate_fn)


class LocalModel:
    """The model of one or several clients of one process, and its preconditioner.

    The parameters are those of the last round.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; its trained parameters are overwritten by every
            round.
        loss_fn: maps (model, batch) to one loss per example.

    Raises:
        ValueError: FedNew with a model too large for its matrix; a model that the gradient engine
            does not cover.
    """

    def __init__(self, plan: FederatedPlan, model: nn.Module, loss_fn: LossFn) -> None:
        self.plan = plan
        self.model = model
        self.loss_fn = make_stateless(loss_fn)
        self.layers = find_layers(model)
        self.parameters: Tensors = trained_parameters(model)
        self.shapes = shapes_of(model)
        self.contract = contract_of(plan.hash, model)
        self.coordinates = PreconditionerManager(plan.config.preconditioner, model, self.layers)
        self.digest = ""
        self._clip = Clip(plan.config.max_grad_norm)
        self._proof = Proof()
        self._is_verified = False
        if isinstance(plan.config.local, FedNewStep) and self.numbers > _MAX_FISHER:
            raise ValueError(
                f"the model has {self.numbers:,} parameters, and FedNew forms a matrix of their"
                f" square; use a head of at most {_MAX_FISHER:,}"
            )

    @property
    def numbers(self) -> int:
        """Return the number of trained numbers, d."""
        return sum(p.numel() for p in self.parameters.values())

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take the parameters of a round.

        Raises:
            ValueError: different names or shapes, or numbers that are not finite.
        """
        if {name: tuple(x.shape) for name, x in values.items()} != self.shapes:
            raise ValueError(
                "the parameters of the round have different names or shapes than this model's"
            )
        with torch.no_grad():
            for name, x in values.items():
                if not bool(torch.isfinite(x).all()):
                    raise ValueError(f"the parameter '{name}' of the round is not finite")
                self.parameters[name].copy_(x)

    def take_metric(self, state: Mapping[str, Tensor]) -> None:
        """Take a preconditioner that the server built."""
        preconditioner = self.coordinates.restore(state)
        self.coordinates.current = preconditioner
        self.digest = preconditioner.digest

    def build_metric(self, step: int) -> None:
        """Build the preconditioner from synthetic probes and the parameters of the round."""
        self.coordinates.refresh(step)
        if self.coordinates.current is not None:
            self.digest = self.coordinates.current.digest

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

    def verify(self, records: Records, *, strict: bool = False) -> None:
        """Check model and loss once, on public rows with the types and shapes of a record.

        No value of a record is used. Where no record can be read, nothing is checked: such records
        contribute zero. Where the loss takes no public rows, a `UserWarning` says so, and the
        examples of every micro-batch that is not proved are differentiated one at a time.

        Args:
            records: of a client.
            strict: refuse an operation that the tracker does not know.

        Raises:
            ValueError: the loss mixes examples, by name of the operation.
            UnknownOperation: under `strict`, by name.
        """
        example = records.example()
        if self._is_verified or example is None:
            return
        config = self.plan.config
        collate = records.loader.collate
        kinds = ["bits", "ones"]
        # A wrong label ends a CUDA process, so tokens are tried on the CPU only.
        if device_of(self.layers).type == "cpu":
            kinds.insert(0, "tokens")
        verdict = check_on_public_rows(
            self.model,
            self.layers,
            self.loss_fn,
            [partial(draw_public_rows, example, collate=collate, integers=kind) for kind in kinds],
            expected=max(1, round(config.expected_records * config.example_rate / config.clients)),
            bound=config.max_physical_batch_size,
            strict=strict,
        )
        verdict.warn(stacklevel=4)
        self._proof.operation = verdict.operation
        self._is_verified = True

    def clipped_sum(
        self, records: Records, indices: NDArray[np.int64], *, together: bool = False
    ) -> Tensors:
        """PRIVATE: return the sum of clipped gradients of some records, in preconditioned space.

        Args:
            records: of the client.
            indices: of the records, `[n]`.
            together: clip the mean gradient of all records once, as that of one unit.
        """
        table = indices[None, :] if together and indices.size else indices
        sums, _ = clipped_sum(
            self.model,
            self.layers,
            self.coordinates.metric,
            self._clip,
            loss_fn=self.loss_fn,
            micro_batches=records.micro_batches(table, self.plan.config.max_physical_batch_size),
            one_record=records.loader.alone,
            proof=self._proof,
            repeatable=self.plan.test_mode,
        )
        return sums

    def _batch(self, records: Records, indices: NDArray[np.int64]) -> Any:
        """Return the records at some indices, on the model's device."""
        device = device_of(self.layers)
        return tree_map(
            lambda x: x.to(device) if isinstance(x, Tensor) else x, records.batch(indices)
        )

    def mean_gradient(self, records: Records) -> Tensors:
        """PRIVATE and unclipped: return the gradient of the mean loss over all records."""
        with torch.enable_grad(), randomize_generators(self.plan.test_mode):
            losses = self.loss_fn(self.model, self._batch(records, np.arange(len(records))))
            return self._gradients(losses.mean())

    def fisher(self, records: Records) -> Tensor:
        """PRIVATE: return the empirical Fisher matrix of all records, `[d, d]` in float64."""
        matrix = torch.zeros(
            self.numbers, self.numbers, dtype=torch.float64, device=device_of(self.layers)
        )
        for index in range(len(records)):
            with torch.enable_grad(), randomize_generators(self.plan.test_mode):
                loss = self.loss_fn(self.model, self._batch(records, np.array([index]))).sum()
                gradients = self._gradients(loss)
            g = flatten({name: x.double() for name, x in gradients.items()})
            matrix.addr_(g, g)
        return matrix / max(1, len(records))

    def _gradients(self, loss: Tensor) -> Tensors:
        """PRIVATE: return the gradient of a loss; zeros for a parameter that it does not use."""
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        result = {}
        for (name, p), g in zip(self.parameters.items(), gradients, strict=True):
            result[name] = torch.zeros_like(p) if g is None else g.detach()
        return result

    @contextmanager
    def restore_parameters(self) -> Iterator[Tensors]:
        """Yield a copy of the parameters, and restore them from it at the end."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            yield before
        finally:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(before[name])


def trained_parameters(model: nn.Module) -> Tensors:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """Return the type of sums and releases: float64 for a float64 parameter, else float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def zero_sums(parameters: Mapping[str, Tensor]) -> Tensors:
    """Return zeros that sums over messages or records start from."""
    sums = {}
    for name, p in parameters.items():
        sums[name] = torch.zeros(p.shape, dtype=accumulation_dtype(p), device=p.device)
    return sums


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors as one vector, in their order."""
    return torch.cat([x.flatten() for x in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Cut a vector into tensors of the shapes and types of others."""
    pieces = vector.split([x.numel() for x in like.values()])
    tensors = {}
    for (name, x), piece in zip(like.items(), pieces, strict=True):
        tensors[name] = piece.view(x.shape).to(x.dtype)
    return tensors


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm over all tensors together, in float64."""
    return float(torch.stack([x.double().square().sum() for x in tensors.values()]).sum().sqrt())


def clip_as_one(tensors: Mapping[str, Tensor], max_grad_norm: float) -> Tensors:
    """Clip a whole contribution to norm C; return zeros for a contribution that is not finite."""
    norm = torch.tensor([total_norm(tensors) * _ROUNDING], dtype=torch.float64)
    factor = float(clip_factors(norm, max_grad_norm)[0])
    if factor == 0:
        # A product with 0 would keep NaN.
        return {name: torch.zeros_like(x) for name, x in tensors.items()}
    return {name: x * factor for name, x in tensors.items()}
