"""An audit of a whole training in one run (Steinke, Nasr and Jagielski 2023): m canaries, each in or out by a coin of its own.

The run is the user's: plan, model, optimizer, loss and the session that ships. Afterwards the canaries are ranked by a
score, the top called "in" and the bottom "out", and the number of right guesses bounds ε from below. Two kinds:

    planted      chosen gradients in one layer, scored by what the releases hold of them: the strongest that one run allows
    mislabelled  examples with a random label, scored by how far their loss fell: the weakest, for an outsider's view

The model that comes out has been trained with canaries in it: audit with a copy, not with the model that is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpkfc.assurance.bounds import one_run_epsilon
from dpkfc.assurance.impulses import Impulses
from dpkfc.assurance.membership import losses_of
from dpkfc.assurance.planted import NOBODY, PlantedLoss, on_examples
from dpkfc.assurance.verdict import Finding
from dpkfc.metric import Metric
from dpkfc.plan import Plan
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Session

__all__ = ["KINDS", "OneRun", "audited_plan", "one_run"]

KINDS = ("planted", "mislabelled")
SHARES = (0.1, 0.4, 0.8)  # of the canaries that are guessed: fixed in advance, α divided among them
FEWEST = 20
LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """What one audited run showed.

    Attributes:
        kind: of canaries.
        canaries: m, all that had a coin.
        included: how many of them were in.
        guesses: number of guesses, of those tried, that gave the largest bound.
        correct: right ones among them.
        epsilon_lower: lower bound on ε at δ.
        confidence: of the bound, all numbers of guesses that were tried taken together.
        claimed_epsilon: ε that the run promises.
        delta: δ of both.
        steps: releases.
        seconds: time of the audit, the training in it included and the calibration of the plan left out.
        passed: whether the bound does not exceed the claim.
        layer: where gradients were planted, "" for the other kind.
    """

    kind: str
    canaries: int
    included: int
    guesses: int
    correct: int
    epsilon_lower: float
    confidence: float
    claimed_epsilon: float
    delta: float
    steps: int
    seconds: float
    passed: bool
    layer: str = ""

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def finding(self) -> Finding:
        """One line for the table of an audit."""
        where = f" in '{self.layer}'" if self.layer else ""
        return Finding(
            check=f"one run, {self.kind} canaries",
            measured=f"ε >= {self.epsilon_lower:.3g} ({100 * self.confidence:g} %)",
            bound=f"at most {self.claimed_epsilon:.3g}",
            passed=self.passed,
            detail=f"{self.canaries} canaries{where}, {self.included} of them in; {self.correct} of {self.guesses} guesses "
            f"right after {self.steps} releases, in {self.seconds:.0f} s",
        )


class _Canaries(Protocol):
    """What the run needs of either kind."""

    loss: PlantedLoss
    dataset: tuple[Tensor, ...]

    @property
    def layer(self) -> str: ...
    def before_step(self, step: int) -> None: ...
    def hear(self, released: Released, metric: Metric) -> None: ...
    def scores(self) -> NDArray[np.float64]: ...


def one_run(  # noqa: PLR0913 - what a session takes, and options
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Sequence[Tensor],
    loss_fn: LossFn,
    *,
    canaries: int = 1000,
    kind: str = "planted",
    layer: str | None = None,
    labels: int = -1,
    confidence: float = 0.95,
    claimed_epsilon: float | None = None,
    augment: Callable[[Any], Any] | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OneRun:
    """Train once with canaries and bound ε from below.

    Args:
        plan: of the run on `dataset`. For planted canaries one row a canary is added: see `audited_plan`, which is applied.
        model: trained by this call.
        optimizer: over its parameters.
        dataset: tensors with a common first axis.
        loss_fn: maps (model, batch) to one loss an example; a batch is a tuple of tensors.
        canaries: m; a thousand certify about half of a small ε.
        kind: "planted" or "mislabelled".
        layer: path of the layer in which gradients are planted; None takes the largest that allows it.
        labels: which tensor of the dataset holds the labels, for mislabelled canaries.
        confidence: of the bound.
        claimed_epsilon: what is promised; None takes ε of the plan.
        augment: of the session.
        seed: of coins and canaries; None takes them from the operating system, as an audit that counts must.
        progress: told the steps done and their number.

    Guarantee:
        If the training is (ε, δ)-DP for examples added or removed (or replaced), the bound exceeds ε with a probability of
        at most 1 − confidence, whatever the model and the scores are.

    Raises:
        ValueError: an unknown kind, too few canaries, a plan that does not fit the dataset or protects a larger unit than
            an example, labels that are none, no layer in which a gradient can be planted.
    """
    _check(plan, kind, canaries, confidence)
    tensors, rng = tuple(dataset), np.random.default_rng(seed)
    plan = audited_plan(plan, len(tensors[0]), canaries) if kind == "planted" else plan
    started, coins = time.perf_counter(), rng.random(canaries) < 0.5
    chosen: _Canaries = (
        Impulses(plan, model, tensors, loss_fn, coins, rng, layer)
        if kind == "planted"
        else _Mislabelled(model, tensors, loss_fn, coins, rng, labels)
    )
    _train(_Heard(plan, model, optimizer, chosen, augment=on_examples(augment)), chosen, progress)
    bound, guesses, correct = _guess(chosen.scores(), coins, plan.delta, 1 - confidence)
    seconds = time.perf_counter() - started
    claimed = plan.curve.at(plan.steps) if claimed_epsilon is None else claimed_epsilon
    return OneRun(
        kind=kind,
        canaries=canaries,
        included=int(coins.sum()),
        guesses=guesses,
        correct=correct,
        epsilon_lower=bound,
        confidence=confidence,
        claimed_epsilon=claimed,
        delta=plan.delta,
        steps=plan.steps,
        seconds=seconds,
        passed=bound <= claimed,
        layer=chosen.layer,
    )


def audited_plan(plan: Plan, size: int, canaries: int) -> Plan:
    """The plan of the same settings for a dataset with canaries added: calibrated anew for the same ε, or of the same noise.

    Args:
        plan: of the run on `size` examples; one for `size + canaries` is returned as it is.
        size: examples N.
        canaries: m.

    Raises:
        ValueError: a plan for another number of examples.
    """
    whole = size + canaries
    if plan.dataset_size == whole:
        return plan
    if plan.dataset_size != size:
        raise ValueError(
            f"the plan is for {plan.dataset_size} examples, the dataset has {size}; make it for {size}, or for {whole} with "
            "the canaries counted"
        )
    if plan.target_epsilon is None:
        return plan.config.with_noise(plan.noise_multiplier, plan.delta, whole)
    return plan.config.calibrate(plan.target_epsilon, plan.delta, whole)


def _check(plan: Plan, kind: str, canaries: int, confidence: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if canaries < FEWEST:
        raise ValueError(f"an audit in one run needs at least {FEWEST} canaries, a thousand to say much; got {canaries}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    if plan.config.max_records_per_unit is not None:
        raise ValueError(
            f"this plan protects one {plan.config.unit}; canaries of one run are single examples. Audit its step with replay, "
            "or the same settings with unit='example'"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError("audit in one process: each process would throw coins of its own")


def _guess(scores: NDArray[np.float64], coins: NDArray[np.bool_], delta: float, alpha: float) -> tuple[float, int, int]:
    """The best bound over the numbers of guesses fixed in advance: (ε, guesses, right ones)."""
    order, m = np.argsort(scores, kind="stable"), len(coins)
    found = []
    for share in SHARES:
        k = int(share * m) // 2
        correct = int(coins[order[m - k :]].sum() + (~coins[order[:k]]).sum())
        found.append((one_run_epsilon(correct, 2 * k, m, delta, alpha / len(SHARES)), 2 * k, correct))
    return max(found)


class _Heard(Session):
    """The session that ships, whose releases are heard."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Any, heard_by: _Canaries, **options: Any) -> None:
        super().__init__(plan, model, optimizer, heard_by.dataset, **options)
        self._hear = heard_by.hear

    def _release(self, clipped: ClippedSum) -> Released:
        released = super()._release(clipped)
        self._hear(released, self._coordinates.metric)
        return released


def _train(session: Session, chosen: _Canaries, progress: Callable[[int, int], None] | None) -> None:
    with session:
        for batch in session.batches():
            chosen.before_step(batch.step)
            session.step(batch, chosen.loss)
            if progress is not None:
                progress(session.steps_done, session.plan.steps)


class _Mislabelled:
    """Examples of the dataset whose label is drawn anew, uniformly; each counts or not by its coin.

    Args:
        model: before its first step.
        dataset: the examples `[N]`; m of them, chosen at random, become canaries in place.
        loss_fn: of the user.
        coins: which canaries are in `[m]`.
        rng: chooses canaries and labels.
        labels: which tensor holds the labels.

    Raises:
        ValueError: labels that are no class numbers, or fewer examples than canaries.
    """

    layer = ""

    def __init__(  # noqa: PLR0917
        self,
        model: nn.Module,
        dataset: tuple[Tensor, ...],
        loss_fn: LossFn,
        coins: NDArray[np.bool_],
        rng: np.random.Generator,
        labels: int,
    ) -> None:
        size, m = len(dataset[0]), len(coins)
        truth = dataset[labels]
        if truth.ndim != 1 or truth.is_floating_point() or truth.dtype == torch.bool:
            raise ValueError(
                f"mislabelled canaries need one class number an example; tensor {labels} of the dataset has the shape "
                f"{tuple(truth.shape)} and the type {truth.dtype}. Say which with `labels`, or use kind='planted'"
            )
        if m > size:
            raise ValueError(f"{m} canaries are more than the {size} examples; choose fewer, or kind='planted'")
        rows = torch.from_numpy(rng.choice(size, m, replace=False)).to(truth.device)
        classes = truth.unique()
        drawn = classes[torch.from_numpy(rng.integers(0, len(classes), m)).to(truth.device)]
        columns = list(dataset)
        columns[labels] = truth.index_put((rows,), drawn)
        ids = torch.full((size,), NOBODY, device=truth.device).index_put((rows,), torch.arange(m, device=truth.device))
        self.dataset = (*columns, ids)
        self.loss = PlantedLoss(loss_fn, torch.from_numpy(coins.astype(np.float64)))
        self._model, self._loss_fn = model, loss_fn
        self._examples = tuple(x[rows.to(x.device)] for x in columns)
        self._before = losses_of(model, loss_fn, self._examples)

    def before_step(self, step: int) -> None:
        """Nothing changes from step to step."""

    def hear(self, released: Released, metric: Metric) -> None:
        """Releases are not looked at: an outsider sees the model alone."""

    def scores(self) -> NDArray[np.float64]:
        """How far each canary's loss fell `[m]`."""
        return np.nan_to_num(self._before - losses_of(self._model, self._loss_fn, self._examples))
