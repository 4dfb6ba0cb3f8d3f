"""A client's model and the private sums that are formed with it, by the library's own engine of per-example gradients."""

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

from dpkfc.curvature.kfac import Preconditioner
from dpkfc.data.loading import MicroBatches, Part, collate, layout, tensors_of
from dpkfc.federated.messages import contract_of, shapes_of
from dpkfc.federated.options import FedNewStep
from dpkfc.federated.plan import FederatedPlan
from dpkfc.gradients.clipped_sum import LossFn, Proof, clipped_sum
from dpkfc.gradients.clipping import Clip, clip_factors
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.state import make_stateless
from dpkfc.preconditioning import Coordinates
from dpkfc.rng_state import device_of, unknown_numbers
from dpkfc.verification import public_rows
from dpkfc.verification.examples import check_on_public_rows

Tensors = dict[str, Tensor]
_WIDEST = 4096  # parameters of a model whose Fisher matrix a client may form
_ROUNDING = 1 + 1e-6  # on a norm in float32 of a sum of squares in float64


class Records:
    """A client's own data.

    Args:
        dataset: a map-style dataset, or a tuple of tensors with a common first axis.
        collate_fn: list of examples to a batch.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.loader = MicroBatches(dataset, collate_fn=collate_fn)
        self.all = np.arange(len(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def micro_batches(self, drawn: NDArray[np.int64], bound: int | None) -> Iterable[tuple[Any, Part]]:
        """Micro-batches with their rows; records that are tensors, all of them at once, are copied and not looked up one by one.

        Args:
            drawn: record numbers, as of `data.layout.layout`; `all` itself for all of them.
            bound: most rows of a micro-batch.
        """
        tensors = tensors_of(self.dataset) if self.collate_fn is None else None
        if drawn is self.all and drawn.size and bound is None and tensors is not None:
            return [(tuple(x.clone() for x in tensors), Part(drawn, None, drawn.size))]
        parts = layout(drawn, bound)
        return zip(self.loader.load([part.records for part in parts]), parts, strict=True)

    def example(self) -> Any:
        """Return the first record that can be read, not collated, None without one; its types and shapes are public."""
        for index in self.all:
            with suppress(Exception):
                return self.loader.example(int(index))
        return None

    def batch(self, indices: NDArray[np.int64]) -> Any:
        """The records at these indices."""
        return collate(self.dataset, indices, self.collate_fn)


class LocalModel:
    """The model of one or several clients of one process, and its coordinates. The parameters are those of the last round.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; its trained parameters are overwritten by every round.
        loss_fn: maps (model, batch) to one loss an example.

    Raises:
        ValueError: FedNew with a model too large for its matrix; a model that the gradient engine does not cover.
    """

    def __init__(self, plan: FederatedPlan, model: nn.Module, loss_fn: LossFn) -> None:
        self.plan, self.model, self.loss_fn = plan, model, make_stateless(loss_fn)
        self.layers = find_layers(model)
        self.parameters: Tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.shapes = shapes_of(model)
        self.contract = contract_of(plan.hash, model)
        self.coordinates = Coordinates(plan.config.preconditioner, model, self.layers)
        self.digest = ""
        self._clip = Clip(plan.config.max_grad_norm)
        self._proof, self._verified = Proof(), False
        if isinstance(plan.config.local, FedNewStep) and self.numbers > _WIDEST:
            raise ValueError(
                f"FedNew forms a matrix of d² numbers and d = {self.numbers:,}; use a head of at most {_WIDEST:,}"
            )

    @property
    def numbers(self) -> int:
        """Trained numbers, d."""
        return sum(p.numel() for p in self.parameters.values())

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take parameters.

        Raises:
            ValueError: other names or shapes, or numbers that are not finite.
        """
        if {n: tuple(x.shape) for n, x in values.items()} != self.shapes:
            raise ValueError("the parameters of a round are not those of this model")
        with torch.no_grad():
            for name, x in values.items():
                if not bool(torch.isfinite(x).all()):
                    raise ValueError(f"the parameter '{name}' of a round is not finite")
                self.parameters[name].copy_(x)

    def take_metric(self, state: Mapping[str, Tensor]) -> None:
        """Use a preconditioner that the server built."""
        kind: type[Preconditioner] = getattr(self.plan.config.preconditioner, "result", Preconditioner)
        found = kind.from_state_dict(dict(state))
        found.check({layer.name: {r: layer.tensor(r).shape for r in layer.parameters} for layer in self.layers})
        self.coordinates.current, self.digest = found, found.digest

    def build_metric(self, step: int) -> None:
        """Build the preconditioner here, from synthetic probes and the parameters of the round."""
        self.coordinates.refresh(step)
        if self.coordinates.current is not None:
            self.digest = self.coordinates.current.digest

    def at_step(self, step: int) -> None:
        """The number of the round, for a metric that changes between refreshes."""
        current = self.coordinates.current
        self.coordinates.refresh(step)
        if self.coordinates.current is not current:
            raise ValueError("the metric of this round is older than its schedule says")

    def zeros(self) -> Tensors:
        """The sum over no records."""
        return {
            name: torch.zeros(p.shape, dtype=accumulated(p), device=p.device) for name, p in self.parameters.items()
        }

    def verify(self, records: Records, *, strict: bool = False) -> None:
        """Check model and loss once, on public rows with the types and shapes of a record; no value of a record is used.

        Where no record can be read nothing is checked: such records contribute zero. Where the loss takes no public rows a
        `UserWarning` says so, and the examples of every micro-batch that is not proved are differentiated one at a time.

        Args:
            records: of a client.
            strict: refuse an operation that the tracker does not know.

        Raises:
            ValueError: the loss mixes examples, by name of the operation.
            UnknownOperation: under `strict`, by name.
        """
        example = records.example()
        if self._verified or example is None:
            return
        config, collate = self.plan.config, records.loader.collate
        on_cpu = device_of(self.layers).type == "cpu"
        kinds = ("tokens", "bits", "ones") if on_cpu else ("bits", "ones")  # a wrong label ends a CUDA process
        verdict = check_on_public_rows(
            self.model,
            self.layers,
            self.loss_fn,
            [partial(public_rows, example, collate=collate, integers=kind) for kind in kinds],
            expected=max(1, round(config.expected_records * config.example_rate / config.clients)),
            bound=config.max_physical_batch_size,
            strict=strict,
        )
        verdict.warn(stacklevel=4)
        self._proof.operation, self._verified = verdict.operation, True

    def clipped_sum(self, records: Records, drawn: NDArray[np.int64], *, together: bool = False) -> Tensors:
        """PRIVATE: the sum of clipped gradients of the records drawn, in the coordinates in force.

        Args:
            records: of the client.
            drawn: indices `[n]`.
            together: all of them are one unit, whose mean gradient is clipped once.
        """
        table = drawn[None, :] if together and drawn.size else drawn
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
        """The records at these indices, on the model's device."""
        device = device_of(self.layers)
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, records.batch(indices))

    def mean_gradient(self, records: Records) -> Tensors:
        """PRIVATE and unclipped: the gradient of the mean loss over all records of a client."""
        with torch.enable_grad(), unknown_numbers(self.plan.test_mode):
            losses = self.loss_fn(self.model, self._batch(records, np.arange(len(records))))
            found = torch.autograd.grad(losses.mean(), list(self.parameters.values()), allow_unused=True)
        pairs = zip(self.parameters.items(), found, strict=True)
        return {name: torch.zeros_like(p) if g is None else g.detach() for (name, p), g in pairs}

    def fisher(self, records: Records) -> Tensor:
        """PRIVATE: the empirical Fisher matrix of a client's records over all trained numbers `[d, d]`, float64."""
        matrix = torch.zeros(self.numbers, self.numbers, dtype=torch.float64, device=device_of(self.layers))
        for index in range(len(records)):
            with torch.enable_grad(), unknown_numbers(self.plan.test_mode):
                loss = self.loss_fn(self.model, self._batch(records, np.array([index]))).sum()
                found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
            pairs = zip(self.parameters.values(), found, strict=True)
            g = torch.cat([(torch.zeros_like(p) if g is None else g).double().flatten() for p, g in pairs])
            matrix.addr_(g, g)
        return matrix / max(1, len(records))

    @contextmanager
    def moving(self) -> Iterator[Tensors]:
        """The parameters, free to move inside; afterwards they are those of the round again."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            yield before
        finally:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(before[name])


def accumulated(parameter: Tensor) -> torch.dtype:
    """Sums and releases are float32, or float64 where the parameter is."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """The norm over all tensors together, in float64."""
    return float(torch.stack([x.double().square().sum() for x in tensors.values()]).sum().sqrt())


def clipped_whole(tensors: Mapping[str, Tensor], max_grad_norm: float) -> Tensors:
    """All of a contribution clipped as one: norm at most C; zeros for one that is not finite."""
    factor = float(clip_factors(torch.tensor([norm_of(tensors) * _ROUNDING], dtype=torch.float64), max_grad_norm)[0])
    return {name: x * factor if factor else torch.zeros_like(x) for name, x in tensors.items()}
