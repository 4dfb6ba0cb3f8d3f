"""What is audited: the session that ships, on a script of batches instead of a sampler, with its releases kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc.config import Plan
from dpkfc.curvature.base import Preconditioner, PreconditionerState
from dpkfc.curvature.probe_pass import ProbeSpec
from dpkfc.curvature.probes import Probe
from dpkfc.data.sampling import Sampler
from dpkfc.linalg.metric import Metric
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Batch, Session

if TYPE_CHECKING:
    import dp_accounting

# --------------------------------------------------------------------------------------------------
# Canaries: examples whose gradient is chosen, put among a user's own examples by a loss function.
#
# A row that carries a canary keeps its place in the batch. What it counts is changed in two ways,
# of which it may have both:
#
#     factor   its loss is multiplied by a number; 0 takes it out, NaN makes it a broken example
#     plant    one module sees a chosen input a instead of its own, and the loss is ⟨u, output⟩ for a chosen u, so that the
#              gradient is u aᵀ (and u for the bias) in that module and zero everywhere else
#
# The loss stays one number an example, so the step that is audited is the step that trains.

LossFn = Callable[[nn.Module, Any], Tensor]
NOBODY = -1  # the id of a row without a canary


@dataclass(frozen=True, eq=False)
class Plant:
    """Chosen gradients in one module.

    Attributes:
        layer: path of the module.
        ids: which canaries `[k]`.
        inputs: what the module sees for each of them `[k, ...]`.
        outputs: u for each of them, in the shape of an output `[k, ...]`.
    """

    layer: str
    ids: Tensor
    inputs: Tensor
    outputs: Tensor


class PlantedLoss:
    """The user's loss function with canaries in it; a batch is the user's own with the ids of canaries `[n]` behind it.

    Args:
        loss_fn: of the user: maps model and batch to one loss an example.
        factors: what the loss of every canary is multiplied by `[m]`.
        plants: chosen gradients; a canary is in at most one of them.
    """

    def __init__(self, loss_fn: LossFn, factors: Tensor, plants: Sequence[Plant] = ()) -> None:
        self._loss_fn, self._factors, self._plants = loss_fn, factors, tuple(plants)
        self._rows = [_row_of(plant.ids, len(factors)) for plant in plants]

    def __call__(self, model: nn.Module, batch: Sequence[Any]) -> Tensor:
        """One loss a row `[n]`."""
        *own, ids = batch
        found: dict[int, Tensor] = {}
        # No value of the batch is read: a pass whose values Python reads is not proved, and another one would be audited.
        rows = [torch.where(ids >= 0, row_of.to(ids.device)[ids.clamp(min=0)], NOBODY) for row_of in self._rows]
        with ExitStack() as hooks:
            for i, plant in enumerate(self._plants):
                hooks.enter_context(_planted(model.get_submodule(plant.layer), plant.inputs, rows[i], found, i))
            losses = self._loss_fn(model, tuple(own))
        for i, plant in enumerate(self._plants):
            directions = plant.outputs.to(found[i].device)[rows[i].clamp(min=0)]
            value = (found[i].to(directions.dtype) * directions).flatten(1).sum(1)
            losses = torch.where(rows[i] >= 0, value.to(losses.dtype), losses)
        factors = self._factors.to(losses)[ids.clamp(min=0)].where(ids >= 0, 1.0)
        return torch.where(factors == 0, torch.zeros_like(losses), losses * factors)


def _row_of(ids: Tensor, count: int) -> Tensor:
    rows = torch.full((max(1, count),), NOBODY)
    rows[ids] = torch.arange(len(ids))
    return rows


@contextmanager
def _planted(module: nn.Module, inputs: Tensor, rows: Tensor, found: dict[int, Tensor], key: int) -> Iterator[None]:
    """The chosen rows of the module's first argument replaced, and its output noted."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        there = (rows >= 0).view(-1, *[1] * (x.ndim - 1))
        return (torch.where(there, inputs.to(x)[rows.clamp(min=0)], x), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        found[key] = output

    # In front of the hooks of a tape, which then notes the input that the module sees.
    handles = [module.register_forward_pre_hook(before, prepend=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def on_examples(augment: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """A user's augmentation for batches that carry ids."""
    if augment is None:
        return None

    def both(batch: Sequence[Any]) -> tuple[Any, ...]:
        *own, ids = batch
        return (*augment(tuple(own)), ids)

    return both


def together(collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
    """A user's `collate_fn` for examples that carry ids."""
    if collate_fn is None:
        return None

    def both(examples: list[Any]) -> tuple[Any, ...]:
        return (*collate_fn([example[:-1] for example in examples]), torch.stack([example[-1] for example in examples]))

    return both


@torch.no_grad()
def plantable(model: nn.Module, loss_fn: LossFn, batch: tuple[Any, ...]) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Modules with trainable parameters of their own in which gradients can be planted, with the shapes of one input and output.

    A module is left out that is called more or less than once, or with anything but one tensor of floating point numbers
    with the batch in front.

    Args:
        model: of the user.
        loss_fn: of the user.
        batch: the user's own batch of at least two examples.
    """
    seen: dict[str, list[tuple[torch.Size, torch.Size] | None]] = {}
    count = len(batch[-1])

    def note(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            fits = len(args) == 1 and all(
                isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x) == count for x in (args[0], output)
            )
            seen.setdefault(name, []).append((args[0].shape[1:], output.shape[1:]) if fits else None)

        return after

    handles = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False)) and not list(module.children())
    ]
    try:
        loss_fn(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: calls[0] for name, calls in seen.items() if len(calls) == 1 and calls[0] is not None}


# --------------------------------------------------------------------------------------------------

SHORT, LONG = 1e-3, 0.1  # steps of a walk
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
        sampler=Scripted(plan.sampler, rows, dataset_size),
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        steps=steps,
    )


def unmoved(plan: Plan) -> Plan:
    """The plan with a preconditioner that is not refreshed after the first step, so that all releases share coordinates."""
    made = plan.config.preconditioner
    return plan if made is None else replace(plan, config=replace(plan.config, preconditioner=_Once(made)))


class _Once(Preconditioner):
    """Stands for a preconditioner, and builds it once, for the first step. Its micro-batch stays as it is."""

    def __init__(self, inner: Preconditioner) -> None:
        self._inner = inner

    def is_due(self, step: int) -> bool:
        return step == 0

    def describe(self) -> dict[str, Any]:
        return self._inner.describe()

    def build(self, *args: Any, **more: Any) -> PreconditionerState:
        return self._inner.build(*args, **more)

    def metric_at(self, state: PreconditionerState, step: int) -> Metric:
        return self._inner.metric_at(state, 0)

    def observe(self, released: Any, past: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.observe(released, past)

    def check_plan(self, steps: int, readout: str) -> None:
        self._inner.check_plan(steps, readout)

    def restore_state(self, tensors: Mapping[str, Tensor]) -> PreconditionerState:
        return self._inner.restore_state(tensors)

    def learning_rate_factor(self, step: int) -> float:
        return self._inner.learning_rate_factor(step)

    def probe_specs(self, step: int) -> Sequence[ProbeSpec]:
        return self._inner.probe_specs(step)

    @property
    def probes(self) -> dict[str, Probe]:
        return self._inner.probes

    @property
    def required_clipping(self) -> str | None:
        return self._inner.required_clipping

    @property
    def supports_distributed_build(self) -> bool:
        return self._inner.supports_distributed_build

    @property
    def uses_previous_state(self) -> bool:
        return self._inner.uses_previous_state

    @property
    def uses_past_releases(self) -> bool:
        return self._inner.uses_past_releases


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
        script, found = len(self.plan.sampler.rows), super().batches()  # type: ignore[attr-defined]
        while max(self._step, self.ledger.count) < script and (batch := next(found, None)) is not None:
            yield batch

    @property
    def device(self) -> torch.device:
        """The device of the trained parameters."""
        return self._device

    @property
    def metric(self) -> Metric:
        """The metric in force."""
        return self._pipeline.metric

    @property
    def digest(self) -> str:
        """Of the preconditioner in force."""
        return "" if self.preconditioner is None else self.preconditioner.digest

    @property
    def noise_draws(self) -> int:
        """How often noise was drawn."""
        return self._pipeline.noise._draws

    @property
    def past(self) -> Mapping[str, Tensor]:
        """What a preconditioner that is made from past releases keeps of them."""
        return self._pipeline.preconditioning.past

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
    length = LONG if any(step.evaluations is not None for step in plan.config.postprocess) else SHORT
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    walk = Walk(trained, length=0.0 if still else length)
    options |= {"augment": on_examples(subject.augment), "collate_fn": together(subject.collate_fn)}
    return Watched(plan, model, walk, dataset, **options), walk


# --------------------------------------------------------------------------------------------------
# What an audit found: one line a check, with the figure, what it may be, and whether it held.


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check.

    Attributes:
        check: its name.
        measured: the figure.
        bound: what the figure may be, in words.
        passed: whether it held.
        detail: what was done, and where it was worst.
    """

    check: str
    measured: str
    bound: str
    passed: bool
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", bool(self.passed))  # numpy's is no value of JSON

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def failed(findings: Sequence[Finding]) -> list[Finding]:
    """Those that did not hold."""
    return [finding for finding in findings if not finding.passed]


def to_rows(findings: Sequence[Finding]) -> list[list[str]]:
    """Cells of a table: check, measured, bound, verdict, detail."""
    return [[f.check, f.measured, f.bound, "held" if f.passed else "FAILED", f.detail] for f in findings]


# --------------------------------------------------------------------------------------------------
# What is accounted for, against what is done: the event, the accountants, the ε that is reported.


def accounted_noise(event: dp_accounting.DpEvent) -> float | None:
    """Noise over sensitivity of the one Gaussian release that an event is about; None for an event of another form."""
    import dp_accounting

    if isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return float(event.noise_multiplier)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent | dp_accounting.SampledWithoutReplacementDpEvent):
        return accounted_noise(event.event)
    return None


def accounting(plan: Plan) -> Iterator[Finding]:
    """Whether the plan claims a guarantee, its event, ε by every accountant that knows it, the reported ε, and the budget."""
    import dp_accounting

    yield Finding(
        check="guarantee", measured="claimed" if plan.certified else "none", bound="claimed", passed=plan.certified,
        detail="; ".join(plan.caveats) or "the plan has no caveat",
    )  # fmt: skip
    noise, planned = accounted_noise(plan.event), plan.stddev / plan.sensitivity
    yield Finding(
        check="event",
        measured="not one Gaussian release" if noise is None else f"noise multiplier {noise:.6g}",
        bound=f"one release with {planned:.6g} × sensitivity",
        passed=noise is not None and math.isclose(noise, planned, rel_tol=1e-9),
        detail=f"{plan.event}",
    )
    try:
        checked = plan.cross_check()
    except (ValueError, dp_accounting.UnsupportedEventError) as error:
        yield Finding(check="accountants", measured="they contradict each other", bound="agree", passed=False, detail=str(error))
        return
    known = {name: value for name, value in checked.items() if value is not None}
    yield Finding(
        check="accountants",
        measured=", ".join(f"{name} {value:.4g}" for name, value in known.items()),
        bound="agree within what is known of them",
        passed=True,
        detail=f"ε of {plan.steps:,} releases at δ = {plan.delta:g}",
    )
    yield from _reported(plan, known)


def _reported(plan: Plan, known: dict[str, float]) -> Iterator[Finding]:
    reported, least = plan.epsilon(), min(known.values())
    yield Finding(
        check="reported ε", measured=f"{reported:.4g}", bound=f"at least {least:.4g}", passed=reported >= least * (1 - 1e-6),
        detail=f"by {plan.accountant}, of all planned releases",
    )  # fmt: skip
    if plan.target_epsilon is not None:
        yield Finding(
            check="budget", measured=f"ε = {reported:.4g}", bound=f"at most {plan.target_epsilon:g}",
            passed=reported <= plan.target_epsilon, detail="of all planned releases",
        )  # fmt: skip
