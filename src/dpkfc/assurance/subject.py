"""What is audited: the session that ships, on a script of batches instead of a sampler, with its releases kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc.assurance.planted import on_examples, together
from dpkfc.data.sampling import Sampler
from dpkfc.metric import Metric
from dpkfc.plan import Plan
from dpkfc.postprocess.base import LookAhead
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Session
from dpkfc.steps import Batch

__all__ = ["Scripted", "Subject", "Walk", "Watched", "scripted", "unmoved", "watched"]

SHORT, LONG = 1e-3, 0.1  # steps of a walk
LossFn = Callable[[nn.Module, Any], Tensor]
Script = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training step to be audited.

    Attributes:
        plan: of the run.
        model: makes the model, with equal weights at every call.
        dataset: tensors with a common first axis: examples among which canaries are put. The audit releases nothing, so they
            may be private; random ones of the right shapes do as well.
        loss_fn: maps model and batch (a tuple of tensors) to one loss an example.
        augment: of the session.
        units: one id a record, for a plan whose unit is larger than a record.
        collate_fn: of the session: list of examples (tuples of tensors) to a batch (a tuple of tensors), as where examples are
            cut to the longest of a batch.
    """

    plan: Plan
    model: Callable[[], nn.Module]
    dataset: tuple[Tensor, ...]
    loss_fn: LossFn
    augment: Callable[[Any], Any] | None = None
    units: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    def batch(self, count: int) -> tuple[Any, ...]:
        """The first examples as loss_fn is handed them, the augmentation aside."""
        if self.collate_fn is None:
            return tuple(x[:count] for x in self.dataset)
        return tuple(self.collate_fn([tuple(x[i] for x in self.dataset) for i in range(count)]))

    @property
    def unit_numbers(self) -> Tensor:
        """The number of every record's unit, in the order in which a session counts them `[records]`."""
        if self.units is None:
            return torch.arange(len(self.dataset[-1]))
        return torch.from_numpy(np.unique(np.asarray(self.units), return_inverse=True)[1].reshape(-1))

    @property
    def size(self) -> int:
        """Examples, or units."""
        return int(self.unit_numbers.max()) + 1

    @property
    def fewest_rows(self) -> int:
        """The smallest micro-batch that the plan allows, of two rows or more."""
        return max(2, self.plan.config.micro_batch[2])

    @property
    def records_of_a_unit(self) -> int:
        """Records of a canary's unit: as many as count in a step, three at most."""
        return 1 if self.units is None else min(3, self.plan.config.max_records_per_unit or 1)


@dataclass(frozen=True)
class Scripted:
    """Stands for a sampler: its event, relation and sensitivity, and batches that are written down.

    Attributes:
        base: the sampler of the plan.
        rows: indices of every step.
        dataset_size: number of examples (units), canaries included.
    """

    base: Sampler
    rows: tuple[tuple[int, ...], ...]
    dataset_size: int

    certified = True
    steps_per_draw = 1

    @property
    def neighbouring_relation(self) -> str:
        """That of the base."""
        return self.base.neighbouring_relation

    @property
    def expected_batch_size(self) -> float:
        """That of the base."""
        return self.base.expected_batch_size

    def sensitivity(self, max_grad_norm: float) -> float:
        """That of the base."""
        return self.base.sensitivity(max_grad_norm)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """That of the base."""
        return self.base.event(noise_multiplier)

    def indices(self, step: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """The batch that is written down for this step."""
        return np.asarray(self.rows[step], dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """For the hash of the plan."""
        return {"name": "scripted", "base": self.base.describe(), "steps": len(self.rows), "size": self.dataset_size}


def scripted(plan: Plan, script: Script, dataset_size: int, *, seed: int | None = None, micro: int | None = None) -> Plan:
    """A plan that runs a script.

    Args:
        plan: of the run: mechanism, noise and preconditioner stay as they are.
        script: rows of every step.
        dataset_size: rows there are.
        seed: for repeatable noise; None leaves it secret.
        micro: rows of a micro-batch; None leaves the plan's own.
    """
    steps = max(plan.steps, len(script))  # a schedule of the preconditioner must fit the run; a session stops with its script
    config = replace(plan.config, steps=steps, epochs=None, test_mode_seed=seed)
    if micro is not None:
        config = replace(config, max_physical_batch_size=micro)
    rows = tuple(tuple(int(i) for i in batch) for batch in script)
    return Plan(
        config=config,
        dataset_size=dataset_size,
        sampler=Scripted(plan.sampler, rows, dataset_size),  # type: ignore[arg-type]
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        steps=steps,
    )


def unmoved(plan: Plan) -> Plan:
    """The plan with a preconditioner that is not refreshed after the first step, so that all releases share coordinates."""
    made = plan.config.preconditioner
    return plan if made is None else replace(plan, config=replace(plan.config, preconditioner=_Once(made)))


class _Once:
    """Stands for a preconditioner; everything but when it is built, and for which step, is its own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def due(self, step: int) -> bool:
        return step == 0

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = self._inner.describe()
        return described

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (lambda preconditioner, _: found(preconditioner, 0)) if name == "metric_at" else found


class Watched(Session):
    """A session that keeps what it releases, for an audit. Nothing of the step is changed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.released: list[Released] = []

    def take(self) -> Released:
        """The release of the last step.

        Raises:
            RuntimeError: it made none.
        """
        if not self.released:
            raise RuntimeError("a step made no release; neighbour replay says which")
        return self.released.pop()

    def release_sum(self, tensor: Tensor) -> Tensor:
        """Charge and release a tensor in the place of a clipped sum, as one step.

        The stream of the noise, the ledger and the mechanism are those of the run. Weights and metric stay as they are.
        """
        self._release(ClippedSum({"": tensor}, self._clip.max_grad_norm, self._clip.clipping))
        self._step += 1
        return self.take().gradients[""]

    def batches(self) -> Iterator[Batch]:
        """Those of the script."""
        script, found = len(self.plan.sampler.rows), super().batches()  # type: ignore[union-attr]
        while max(self._step, self._ledger.count) < script and (batch := next(found, None)) is not None:
            yield batch

    @property
    def device(self) -> torch.device:
        """The device of the trained parameters."""
        return self._device

    @property
    def metric(self) -> Metric:
        """The metric in force."""
        return self._coordinates.metric

    @property
    def digest(self) -> str:
        """Of the preconditioner in force."""
        return "" if self.preconditioner is None else self.preconditioner.digest

    @property
    def noise_draws(self) -> int:
        """How often noise was drawn."""
        return self._noise._draws

    @property
    def past(self) -> Mapping[str, Tensor]:
        """What a preconditioner that is made from past releases keeps of them."""
        return self._coordinates.past

    def differs_from(self, other: Watched) -> str:
        """The first parameter or buffer whose values differ between two sessions, "" where none does."""
        held = [dict([*s.model.named_parameters(), *s.model.named_buffers()]) for s in (self, other)]
        if held[0].keys() != held[1].keys():
            return sorted(held[0].keys() ^ held[1].keys())[0]
        return next((name for name, x in held[0].items() if not _same(x, held[1][name])), "")

    @property
    def left_behind(self) -> str:
        """The first parameter that still has a gradient, "" where none has."""
        return next((name for name, p in self.model.named_parameters() if p.grad is not None), "")

    def _release(self, clipped: ClippedSum) -> Released:
        released = super()._release(clipped)
        self.released.append(released)
        return released


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


class Walk(torch.optim.Optimizer):
    """Moves the parameters along a path that no gradient decides, and keeps what it was handed last.

    Two runs over neighbouring data then see the same weights at every step, so that all that differs between their releases
    is the data. On its way the size of a parameter stays about what it is.

    Args:
        parameters: name to parameter.
        length: of a step, relative to the root mean square of a parameter.
        seed: of the path.
    """

    def __init__(self, parameters: dict[str, Tensor], length: float = SHORT, seed: int = 0) -> None:
        super().__init__(list(parameters.values()), {"lr": 1.0})
        self._names, self._length = {p: name for name, p in parameters.items()}, length
        self._generator = torch.Generator().manual_seed(seed)
        self.handed: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Note the gradients, take one step of the path."""
        self.handed = {}
        for p, name in self._names.items():
            if p.grad is not None:
                self.handed[name] = p.grad.clone()
            scale = self._length * float(p.float().square().mean().sqrt().clamp(min=1e-3))
            p.add_(torch.randn(p.shape, generator=self._generator).to(p), alpha=scale).div_(math.hypot(1, self._length))


def watched(
    subject: Subject, plan: Plan, dataset: tuple[Tensor, ...], *, still: bool = False, **options: Any
) -> tuple[Watched, Walk]:
    """A session on a script over examples and canaries, and the optimizer that walks (or stands still)."""
    model = subject.model()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # two runs would drop other units of the examples that they share
    # Where gradients are also taken ahead, those of far points differ most, and show whether they are clipped together.
    length = LONG if any(isinstance(step, LookAhead) for step in plan.config.postprocess) else SHORT
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    walk = Walk(trained, length=0.0 if still else length)
    options |= {"augment": on_examples(subject.augment), "collate_fn": together(subject.collate_fn)}
    return Watched(plan, model, walk, dataset, **options), walk
