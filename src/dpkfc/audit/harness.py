"""The audited session: the session that ships, on a script of batches, with its releases recorded.

Canaries are examples with a chosen gradient, which a loss function puts among a user's own. Each
stays in its row of the batch. A canary changes its loss in one or both of two ways:

    factor  a number multiplies the loss; 0 removes the example, NaN makes it non-finite
    plant   one module sees a chosen input a, and the loss is ⟨u, output⟩ for a chosen u. The
            gradient is then u aᵀ (and u for the bias) in that module and zero everywhere else

There is still one loss an example, so the audited step is the step that trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc.audit.planted_loss import Augment, LossFn, augment_with_ids, collate_with_ids
from dpkfc.config import Plan
from dpkfc.curvature.second_moments import pack_symmetric, split_head
from dpkfc.data.loading import Collate
from dpkfc.data.sampling import Sampler
from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.layers import device_of_layers
from dpkfc.gradients.value_comparison import same_values
from dpkfc.linalg.metric import Metric
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Session
from dpkfc.step_record import Batch

if TYPE_CHECKING:
    import dp_accounting

# Examples with a common first axis, or one example without it.
TensorTuple = tuple[Tensor, ...]
Progress = Callable[[int, int], None]  # steps done, of all


def ignore_progress(done: int, total: int) -> None:
    """Take figures of progress that nobody watches."""


# -- the audited step ------------------------------------------------------------------------------

SHORT_STEP, LONG_STEP = 1e-3, 0.1  # of a random walk
Script = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training step to be audited.

    Attributes:
        plan: of the run.
        model: makes the model, with equal weights at every call.
        dataset: tensors with a common first axis: examples among which canaries are put. The audit
            releases nothing, so they may be private. Random ones of the right shapes do as well.
        loss_fn: maps model and batch (a tuple of tensors) to one loss an example.
        augment: of the session.
        units: one id a record, for a plan whose unit is larger than a record.
        collate_fn: of the session: list of examples (tuples of tensors) to a batch (a tuple of
            tensors), for instance if examples are cut to the longest of a batch.

    Example:
        >>> subject = Subject(
        ...     plan=PrivacyConfig(expected_batch_size=8, steps=100).with_noise(1.0, 1e-5, 40),
        ...     model=lambda: nn.Linear(6, 3),
        ...     dataset=(torch.randn(40, 6), torch.randint(3, (40,))),
        ...     loss_fn=lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="none"),
        ... )
    """

    plan: Plan
    model: Callable[[], nn.Module]
    dataset: TensorTuple
    loss_fn: LossFn
    augment: Augment | None = None
    units: Any = None
    collate_fn: Collate | None = None

    def example(self, index: int) -> TensorTuple:
        """Return one example."""
        return tuple(x[index] for x in self.dataset)

    @property
    def bare(self) -> Subject:
        """The step without post-processing."""
        config = replace(self.plan.config, postprocess=(), readout="whitened")
        return replace(self, plan=replace(self.plan, config=config))

    @property
    def unit_numbers(self) -> Tensor:
        """Number of every record's unit, in the order of a session `[records]`."""
        if self.units is None:
            return torch.arange(len(self.dataset[-1]))
        units = np.asarray(self.units)
        _, numbers = np.unique(units, return_inverse=True)
        return torch.from_numpy(numbers.reshape(-1))

    @property
    def size(self) -> int:
        """Number of examples, or of units."""
        return int(self.unit_numbers.max()) + 1

    @property
    def fewest_rows(self) -> int:
        """Smallest micro-batch that the plan allows, of two rows or more."""
        return max(2, self.plan.config.micro_batch.least)

    @property
    def records_of_a_unit(self) -> int:
        """Records of a canary's unit: as many as count in a step, three at most."""
        if self.units is None:
            return 1
        return min(3, self.plan.config.max_records_per_unit or 1)


@dataclass(frozen=True)
class ScriptedSampler(Sampler):
    """A sampler with fixed batches, and the event, relation and sensitivity of another sampler.

    Attributes:
        base: the sampler of the plan.
        rows: indices of every step.
        dataset_size: number of examples (units), canaries included.
    """

    base: Sampler
    rows: tuple[tuple[int, ...], ...]
    dataset_size: int

    certified = True

    @property
    def neighbouring_relation(self) -> str:
        """Neighbouring relation of the base."""
        return self.base.neighbouring_relation

    @property
    def expected_batch_size(self) -> float:
        """Expected batch size of the base."""
        return self.base.expected_batch_size

    def sensitivity(self, max_grad_norm: float) -> float:
        """Return the sensitivity of the base."""
        return self.base.sensitivity(max_grad_norm)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return the event of the base."""
        return self.base.event(noise_multiplier)

    def indices(self, step: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return the batch of the script for a step."""
        return np.asarray(self.rows[step], dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the hash of the plan."""
        return {
            "name": "scripted",
            "base": self.base.describe(),
            "steps": len(self.rows),
            "size": self.dataset_size,
        }


def script_plan(
    plan: Plan,
    script: Script,
    dataset_size: int,
    *,
    seed: int | None = None,
    micro: int | None = None,
) -> Plan:
    """Return a plan that runs a script, with the mechanism, noise and preconditioner of a plan.

    Args:
        plan: of the run.
        script: rows of every step.
        dataset_size: number of rows.
        seed: of repeatable noise; None leaves the noise secret.
        micro: rows of a micro-batch; None leaves the plan's own.
    """
    # A schedule of the preconditioner must fit the run. The session stops at the script's end.
    steps = max(plan.steps, len(script))
    config = replace(plan.config, steps=steps, epochs=None, test_mode_seed=seed)
    if micro is not None:
        config = replace(config, max_physical_batch_size=micro)
    rows = tuple(tuple(int(i) for i in batch) for batch in script)
    return Plan(
        config=config,
        dataset_size=dataset_size,
        sampler=ScriptedSampler(plan.sampler, rows, dataset_size),
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        steps=steps,
    )


class _FirstMetric(PreconditionerManager):
    """Builds the preconditioner at the first step alone, so that all steps share a metric."""

    def refresh(self, step: int) -> None:
        super().refresh(0)


class WatchedSession(Session):
    """A session that records its releases for an audit, and changes nothing about the step.

    Args:
        keep_metric: build the preconditioner at the first step alone.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, *args: Any, keep_metric: bool, **more: Any
    ) -> None:
        super().__init__(plan, model, *args, **more)
        self.released: list[Released] = []
        if keep_metric:
            config = plan.config
            self._pipeline.preconditioning = _FirstMetric(
                config.preconditioner, model, self.layers, probe_limit=config.refresh_rows(1)
            )

    def release_curvature(self) -> None:
        """Take moments that are equal in all directions, and release nothing.

        A replay is about the steps: their metric is public, whatever it is.
        """
        config = self.plan.config.preconditioner
        if config is None or not config.purpose or self.preconditioner is not None:
            return
        _, head = split_head(self.model)
        equal = pack_symmetric(torch.eye(head.in_features, dtype=torch.float64))
        count = self.plan.dataset_size
        vector = equal.numpy() * count / head.in_features
        stddev = self.plan.extra_release(config.purpose).stddev
        self._pipeline.preconditioning.set_state(
            config.build_from_release(self.model, vector, stddev, count, 0)
        )

    def take(self) -> Released:
        """Remove and return the last release.

        Raises:
            RuntimeError: the last step made no release.
        """
        if not self.released:
            raise RuntimeError("a step made no release; neighbour replay says which")
        return self.released.pop()

    def release_sum(self, tensor: Tensor) -> Tensor:
        """Charge and release a tensor in the place of a clipped sum, as one step.

        The noise stream, the ledger and the mechanism belong to the run. Weights and metric do not
        change.
        """
        clip = self._clip
        self._release(ClippedSum({"": tensor.clone()}, clip.max_grad_norm, clip.clipping))
        self._step += 1
        return self.take().gradients[""]

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the script."""
        length = len(self.plan.sampler.rows)  # type: ignore[attr-defined]
        batches = super().batches()
        while max(self._step, self.ledger.count) < length:
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @property
    def device(self) -> torch.device:
        """Device of the trained parameters."""
        return device_of_layers(self.layers)

    @property
    def metric(self) -> Metric:
        """Metric in force."""
        return self._pipeline.preconditioning.metric

    @property
    def digest(self) -> str:
        """Digest of the preconditioner in force, "" without one."""
        if self.preconditioner is None:
            return ""
        return self.preconditioner.digest

    @property
    def noise_draws(self) -> int:
        """Number of times that noise was drawn."""
        return self._pipeline.noise._draws

    def differs_from(self, other: WatchedSession) -> str:
        """Return the first parameter or buffer that differs between two sessions, "" if none."""
        where = first_difference(self._model_tensors(), other._model_tensors())
        return where.removeprefix("/")

    def _model_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        tensors.update(self.model.named_buffers())
        return tensors

    @property
    def remaining_gradient(self) -> str:
        """First parameter that still has a gradient, "" if none has."""
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                return name
        return ""

    def _release(self, clipped: ClippedSum) -> Released:
        released = super()._release(clipped)
        self.released.append(released)
        return released


def first_difference(one: Any, other: Any, where: str = "") -> str:
    """Return the path of the first value that differs, "" if none does; NaN equals NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{where}/{min(map(str, one.keys() ^ other.keys()))}"
        for name in one:
            difference = first_difference(one[name], other[name], f"{where}/{name}")
            if difference:
                return difference
        return ""
    is_equal = type(one) is type(other) and same_values(one, other)
    return "" if is_equal else where


def coarsest_spacing(tensors: Iterable[Tensor]) -> float:
    """Return the largest relative spacing of the numbers of floating-point tensors."""
    return max(torch.finfo(x.dtype).eps for x in tensors)


class RandomWalk(torch.optim.Optimizer):
    """Moves the parameters along a path that no gradient decides, and records gradients.

    Two runs over neighbouring data then have the same weights at every step. All that differs
    between their releases is the data. The size of a parameter stays about constant.

    Args:
        parameters: name to parameter.
        length: of a step, relative to the root mean square of a parameter.

    Attributes:
        gradients: what the optimizer got at the last step, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], length: float) -> None:
        super().__init__(list(parameters.values()), {"lr": 1.0})
        self._names = {p: name for name, p in parameters.items()}
        self._length = length
        self._generator = torch.Generator().manual_seed(0)
        self.gradients: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Record the gradients, and take one step of the path."""
        self.gradients = {}
        shrinkage = math.hypot(1, self._length)
        for p, name in self._names.items():
            if p.grad is not None:
                self.gradients[name] = p.grad.clone()
            mean_square = p.float().square().mean()
            root = mean_square.sqrt().clamp(min=1e-3)
            scale = self._length * float(root)
            direction = torch.randn(p.shape, generator=self._generator)
            p.add_(direction.to(p), alpha=scale)
            p.div_(shrinkage)


def open_session(
    subject: Subject,
    plan: Plan,
    dataset: TensorTuple,
    *,
    still: bool = False,
    **options: Any,
) -> tuple[WatchedSession, RandomWalk]:
    """Open a session on a script over examples and canaries.

    Args:
        subject: what is audited.
        plan: of `script_plan`.
        dataset: the examples with canaries, and the ids of canaries as the last tensor.
        still: keep the weights and the metric of the first step.
        options: of the session.

    Returns:
        The session and its optimizer.
    """
    model = subject.model()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            # Two runs would drop different units of the examples that they share.
            module.p = 0.0
    # Gradients at look-ahead points differ most if these points are far away. Long steps then show
    # whether the gradients are clipped together.
    length = SHORT_STEP
    if still:
        length = 0.0
    elif any(step.evaluations is not None for step in plan.config.postprocess):
        length = LONG_STEP
    walk = RandomWalk(trainable_tensors(model), length)
    options["augment"] = augment_with_ids(subject.augment)
    options["collate_fn"] = collate_with_ids(subject.collate_fn)
    return WatchedSession(plan, model, walk, dataset, keep_metric=still, **options), walk
