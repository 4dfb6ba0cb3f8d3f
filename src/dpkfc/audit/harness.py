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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc.config import Plan
from dpkfc.data.loading import Collate, MicroBatches
from dpkfc.data.sampling import Sampler
from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.gradients.state import equal_or_nan
from dpkfc.linalg.metric import Metric
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.private_step import PreconditionerManager
from dpkfc.rng_state import device_of
from dpkfc.session import Batch, Session

if TYPE_CHECKING:
    import dp_accounting

# Examples with a common first axis, or one example without it.
Tensors = tuple[Tensor, ...]
LossFn = Callable[[nn.Module, Any], Tensor]
# Positional arguments of a module, or a batch of any parts.
Arguments = tuple[Any, ...]
Augment = Callable[[Any], Any]
Progress = Callable[[int, int], None]  # steps done, of all
NO_CANARY = -1  # the id of a row without a canary


def ignore_progress(done: int, total: int) -> None:
    """Take figures of progress that nobody watches."""


# -- canaries in a loss function -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plant:
    """Chosen gradients in one module.

    Attributes:
        layer: path of the module.
        ids: of the canaries `[k]`.
        inputs: what the module sees for each of them `[k, ...]`.
        outputs: u for each of them, in the shape of an output `[k, ...]`.
    """

    layer: str
    ids: Tensor
    inputs: Tensor
    outputs: Tensor


class PlantedLoss:
    """The user's loss function with canaries in it.

    A batch is the user's own, followed by the ids of its canaries `[n]`.

    Args:
        loss_fn: of the user: maps model and batch to one loss an example.
        factors: of the losses of the canaries `[m]`.
        plants: chosen gradients; a canary is in at most one of them.
    """

    def __init__(self, loss_fn: LossFn, factors: Tensor, plants: Sequence[Plant] = ()) -> None:
        self._loss_fn = loss_fn
        self._factors = factors
        self._plants = tuple(plants)
        self._plant_rows = []
        for plant in plants:
            size = max(1, len(factors))
            rows = torch.full((size,), NO_CANARY)
            rows[plant.ids] = torch.arange(len(plant.ids))
            self._plant_rows.append(rows)

    def __call__(self, model: nn.Module, batch: Sequence[Any]) -> Tensor:
        """Return one loss a row `[n]`."""
        *examples, ids = batch
        # Python reads no value of the batch. Otherwise the batch axis of the pass could not be
        # proved, and the audit would run another step than training does.
        id_or_first = ids.clamp(min=0)
        rows = []
        for plant_rows in self._plant_rows:
            planted = plant_rows.to(ids.device)[id_or_first]
            rows.append(torch.where(ids >= 0, planted, NO_CANARY))
        outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for i, plant in enumerate(self._plants):
                module = model.get_submodule(plant.layer)
                hooks.enter_context(_replace_inputs(module, plant.inputs, rows[i], outputs, i))
            losses = self._loss_fn(model, tuple(examples))
        for i, plant in enumerate(self._plants):
            row_or_first = rows[i].clamp(min=0)
            output = outputs[i]
            directions = plant.outputs.to(output.device)[row_or_first]
            products = output.to(directions.dtype) * directions
            planted_losses = products.flatten(1).sum(1)
            losses = torch.where(rows[i] >= 0, planted_losses.to(losses.dtype), losses)
        factors = self._factors.to(losses)[id_or_first]
        factors = factors.where(ids >= 0, 1.0)
        return torch.where(factors == 0, torch.zeros_like(losses), losses * factors)


@contextmanager
def _replace_inputs(
    module: nn.Module, inputs: Tensor, rows: Tensor, outputs: dict[int, Tensor], key: int
) -> Iterator[None]:
    """Replace rows of a module's first argument, and store its output under a key."""

    def replace_rows(module: nn.Module, args: Arguments) -> Arguments:
        x = args[0]
        shape = (-1, *[1] * (x.ndim - 1))
        is_planted = (rows >= 0).view(shape)
        planted = inputs.to(x)[rows.clamp(min=0)]
        replaced = torch.where(is_planted, planted, x)
        return (replaced, *args[1:])

    def store_output(module: nn.Module, args: Arguments, output: Tensor) -> None:
        outputs[key] = output

    # In front of the hooks of a tape, which then records the input that the module sees.
    input_handle = module.register_forward_pre_hook(replace_rows, prepend=True)
    output_handle = module.register_forward_hook(store_output)
    try:
        yield
    finally:
        input_handle.remove()
        output_handle.remove()


def augment_with_ids(augment: Augment | None) -> Augment | None:
    """Return a user's augmentation for batches that carry ids of canaries."""
    if augment is None:
        return None

    def augment_examples(batch: Sequence[Any]) -> Arguments:
        *examples, ids = batch
        return (*augment(tuple(examples)), ids)

    return augment_examples


def collate_with_ids(
    collate_fn: Collate | None,
) -> Collate | None:
    """Return a user's `collate_fn` for examples that carry ids of canaries."""
    if collate_fn is None:
        return None

    def collate_examples(examples: list[Any]) -> Arguments:
        batch = collate_fn([example[:-1] for example in examples])
        ids = [example[-1] for example in examples]
        return (*batch, torch.stack(ids))

    return collate_examples


Shapes = tuple[torch.Size, torch.Size]


@torch.no_grad()
def find_plantable(model: nn.Module, loss_fn: LossFn, batch: Arguments) -> dict[str, Shapes]:
    """Find the modules in which gradients can be planted.

    A module must have trainable parameters of its own and be called exactly once. Its input and
    output must be one floating-point tensor with the batch in front.

    Args:
        model: of the user.
        loss_fn: of the user.
        batch: the user's own batch of at least two examples.

    Returns:
        Path of a module to the shapes of the input and the output of one example.
    """
    calls: dict[str, list[Shapes | None]] = {}
    count = len(batch[-1])

    def record(name: str, module: nn.Module, args: Arguments, output: Any) -> None:
        shapes = _shapes_of_call(args, output, count)
        calls.setdefault(name, []).append(shapes)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            has_trainable = any(p.requires_grad for p in module.parameters(recurse=False))
            if has_trainable and not list(module.children()):
                handle = module.register_forward_hook(partial(record, name))
                hooks.callback(handle.remove)
        loss_fn(model, batch)
    plantable = {}
    for name, shapes in calls.items():
        if len(shapes) == 1 and shapes[0] is not None:
            plantable[name] = shapes[0]
    return plantable


def _shapes_of_call(args: Arguments, output: Any, count: int) -> Shapes | None:
    """Return the shapes of one example's input and output; None for any other call."""
    for x in (*args, output):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        if x.ndim < 2 or len(x) != count:
            return None
    if len(args) != 1:
        return None
    return args[0].shape[1:], output.shape[1:]


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
    dataset: Tensors
    loss_fn: LossFn
    augment: Augment | None = None
    units: Any = None
    collate_fn: Collate | None = None

    def example(self, index: int) -> Tensors:
        """Return one example."""
        return tuple(x[index] for x in self.dataset)

    def batch(self, count: int) -> Arguments:
        """Return the first examples as `loss_fn` gets them, without augmentation."""
        return tuple(MicroBatches(self.dataset, self.collate_fn).batch(np.arange(count)))

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

        The noise stream, the ledger and the mechanism are those of the run. Weights and metric do
        not change.
        """
        clip = self._clip
        self._release(ClippedSum({"": tensor}, clip.max_grad_norm, clip.clipping))
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
        return device_of(self.layers)

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
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_equal = one.shape == other.shape and bool(equal_or_nan(one, other).all())
    else:
        is_equal = type(one) is type(other) and one == other
    if is_equal:
        return ""
    return where


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
        seed: of the path.

    Attributes:
        gradients: what the optimizer got at the last step, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], length: float, seed: int = 0) -> None:
        super().__init__(list(parameters.values()), {"lr": 1.0})
        self._names = {p: name for name, p in parameters.items()}
        self._length = length
        self._generator = torch.Generator().manual_seed(seed)
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
    dataset: Tensors,
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


# -- findings --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name.
        measured: the figure.
        bound: what the figure may be, in words.
        passed: whether the check held.
        detail: what was done, and the worst case.
    """

    check: str
    measured: str
    bound: str
    passed: bool
    detail: str = ""

    def __post_init__(self) -> None:
        # JSON cannot hold a boolean of numpy.
        object.__setattr__(self, "passed", bool(self.passed))

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def select_failed(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that did not hold.

    Example:
        >>> audit = audit_step(subject)
        >>> [finding.check for finding in select_failed(audit.findings)]
        []
    """
    return [finding for finding in findings if not finding.passed]


def tabulate_findings(findings: Sequence[Finding]) -> list[list[str]]:
    """Return the cells of a table: check, measured, bound, verdict, detail."""
    rows = []
    for finding in findings:
        verdict = "held" if finding.passed else "FAILED"
        rows.append([finding.check, finding.measured, finding.bound, verdict, finding.detail])
    return rows


# -- what is accounted for, against what is done ---------------------------------------------------


def accounted_noise(event: dp_accounting.DpEvent) -> float | None:
    """Return noise over sensitivity of the one Gaussian release of an event, None without one."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent
    sampled = dp_accounting.PoissonSampledDpEvent, dp_accounting.SampledWithoutReplacementDpEvent
    if isinstance(event, gaussian):
        return float(event.noise_multiplier)
    if isinstance(event, sampled):
        return accounted_noise(event.event)
    return None


def check_accounting(plan: Plan) -> Iterator[Finding]:
    """Check the plan's claim, its event, ε by every accountant, the reported ε, and the budget."""
    import dp_accounting

    yield Finding(
        check="guarantee",
        measured="claimed" if plan.certified else "none",
        bound="claimed",
        passed=plan.certified,
        detail="; ".join(plan.caveats) or "the plan has no caveat",
    )
    noise = accounted_noise(plan.event)
    planned = plan.stddev / plan.sensitivity
    yield Finding(
        check="event",
        measured="not one Gaussian release" if noise is None else f"noise multiplier {noise:.6g}",
        bound=f"one release with {planned:.6g} × sensitivity",
        passed=noise is not None and math.isclose(noise, planned, rel_tol=1e-9),
        detail=f"{plan.event}",
    )
    try:
        epsilons = plan.cross_check()
    except (ValueError, dp_accounting.UnsupportedEventError) as error:
        yield Finding(
            check="accountants",
            measured="they contradict each other",
            bound="agree",
            passed=False,
            detail=str(error),
        )
        return
    known = {name: epsilon for name, epsilon in epsilons.items() if epsilon is not None}
    yield Finding(
        check="accountants",
        measured=", ".join(f"{name} {epsilon:.4g}" for name, epsilon in known.items()),
        bound="agree within what is known of them",
        passed=True,
        detail=f"ε of {plan.steps:,} releases at δ = {plan.delta:g}",
    )
    reported = plan.epsilon()
    least = min(known.values())
    yield Finding(
        check="reported ε",
        measured=f"{reported:.4g}",
        bound=f"at least {least:.4g}",
        passed=reported >= least * (1 - 1e-6),
        detail=f"by {plan.accountant}, of all planned releases",
    )
    if plan.target_epsilon is not None:
        yield Finding(
            check="budget",
            measured=f"ε = {reported:.4g}",
            bound=f"at most {plan.target_epsilon:g}",
            passed=reported <= plan.target_epsilon,
            detail="of all planned releases",
        )
