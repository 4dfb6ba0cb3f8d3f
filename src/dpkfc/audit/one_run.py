"""Bound ε from below by one training run with canaries.

m canaries are each included by a coin (Steinke, Nasr and Jagielski 2023). A score ranks them. The
top is guessed "in", the bottom "out", and the number of right guesses bounds ε from below, for
every mechanism. That reaches about half of a small ε. Noise that is Gaussian, and independent
between steps and between the directions of the canaries, allows a closer bound. The auditor sees
which canaries take part in which step, measures the noise by that, and ε of the plan follows, with
its sampling, from the most noise that agrees. Canaries are chosen gradients in one layer.

The run is the user's: plan, model, optimizer, loss and the session that ships. The resulting model
was trained with canaries: audit a copy, not the model that is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, chi2
from torch import Tensor, nn

from dpkfc.audit.epsilon_bounds import Floats
from dpkfc.audit.findings import Finding
from dpkfc.audit.harness import Progress
from dpkfc.audit.membership import CONFIDENCE
from dpkfc.audit.one_run_bounds import gaussian_run_mu, most_run_mu, one_run_epsilon
from dpkfc.audit.planted_loss import LossFn, augment_with_ids
from dpkfc.audit.run_canaries import PlantedCanaries, Shares
from dpkfc.config import Plan
from dpkfc.distributed.context import DistributedContext
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.session import Session

# Fractions of the canaries that are guessed. They are fixed in advance and share α.
FRACTIONS = (0.1, 0.4, 0.8)
FEWEST = 20  # canaries
# The largest probabilities that an honest run fails: by its bound, and by the noise that is heard.
CONTRADICTED, MISSING = 1e-3, 1e-6
# The part of the noise that has to be heard, with room for norms that follow a changing metric.
LEAST_NOISE = 0.97
COPY, RELEASED = "in a copy that is not released", "in the released model"
# Canaries may add this much to the power of the noise in the released model.
HARM = 0.01


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """The result of one audited run.

    Attributes:
        canaries: m, all that had a coin.
        included: how many of them were in.
        guesses: number of guesses, of those tried, that gave the largest bound.
        correct: right guesses among them.
        epsilon_lower: lower bound on ε at δ, for every mechanism.
        gaussian_lower: the same for Gaussian noise that is independent between steps and between
            orthogonal gradients, which is far closer: ε of the plan with the most noise that agrees
            with the scores. None where no canary took part.
        ceiling: what `gaussian_lower` is on average if ε is the claimed one and every canary is
            heard perfectly: how often canaries took part sets it.
        noise: standard deviation of the scores of canaries that took no part, over the plan's.
        took_part: how often canaries took part in a step, of all steps together.
        confidence: of each bound, over all numbers of guesses that were tried.
        claimed_epsilon: ε that the run promises.
        delta: δ of both.
        steps: releases; fewer than planned where the run ended early.
        seconds: duration with the training, without the calibration of the plan.
        passed: whether no bound contradicts the claim (`gaussian_lower` at a confidence of 99.9 %),
            no noise is missing, and canaries were not sampled more often than planned.
        layer: with the planted gradients.
        where: which model held the canaries, `RELEASED` or `COPY`.
    """

    canaries: int
    included: int
    guesses: int
    correct: int
    epsilon_lower: float
    gaussian_lower: float | None
    ceiling: float | None
    noise: float | None
    took_part: int
    confidence: float = CONFIDENCE
    claimed_epsilon: float
    delta: float
    steps: int
    seconds: float
    passed: bool
    layer: str
    where: str = COPY

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def finding(self) -> Finding:
        """Return one line for the table of an audit."""
        bound = self.epsilon_lower if self.gaussian_lower is None else self.gaussian_lower
        heard = ""
        if self.gaussian_lower is not None:
            heard = (
                f"; canaries took part {self.took_part} times; without the assumption of Gaussian "
                f"noise ε >= {self.epsilon_lower:.3g}; so many show {self.ceiling:.3g} on average; "
                f"{self.noise:.1%} of the noise heard"
            )
        return Finding(
            check="one run, planted canaries",
            measured=f"ε >= {bound:.3g} ({100 * self.confidence:g} %)",
            bound=f"at most {self.claimed_epsilon:.3g}",
            passed=self.passed,
            detail=f"{self.canaries} canaries {self.where} in '{self.layer}', "
            f"{self.included} of them in; {self.correct} of {self.guesses} guesses right after "
            f"{self.steps} releases, in {self.seconds:.0f} s{heard}",
        )


def audit_one_run(  # noqa: PLR0913 - what a session takes, and options
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Sequence[Tensor],
    loss_fn: LossFn,
    *,
    canaries: int = 1000,
    layer: str | None = None,
    claimed_epsilon: float | None = None,
    augment: Callable[[Any], Any] | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> OneRunResult:
    """Train once with canaries and bound ε from below.

    Args:
        plan: of the run on `dataset`; `plan_for_canaries` adds one row for each canary.
        model: trained by this call.
        optimizer: over its parameters.
        dataset: tensors with a common first axis.
        loss_fn: maps (model, batch) to one loss an example; a batch is a tuple of tensors.
        canaries: m; a thousand reach about nine tenths of ε for Gaussian noise.
        layer: path of the layer with planted gradients; None takes the largest that allows it.
        claimed_epsilon: what is promised; None takes ε of the plan.
        augment: of the session.
        seed: of coins and canaries; None takes them from the operating system, as a valid audit
            must.
        progress: called with (steps done, of all).

    Guarantee:
        If the training is (ε, δ)-DP for examples added or removed (or replaced), `epsilon_lower`
        exceeds ε with a probability of at most 5 %, for every model and every score.
        `gaussian_lower` does so if the noise is Gaussian and independent between steps and
        directions, and examples are sampled as the plan says.

    Raises:
        ValueError: too few canaries, a plan that does not fit the dataset or protects a larger unit
            than an example, or no layer in which a gradient can be planted.

    Example:
        >>> copied = copy.deepcopy(model)
        >>> optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        >>> result = audit_one_run(plan, copied, optimizer, (x, y), loss_fn)
        >>> print(result.epsilon_lower, result.claimed_epsilon)
    """
    check_settings(plan, canaries)
    tensors = tuple(dataset)
    rng = np.random.default_rng(seed)
    plan = plan_for_canaries(plan, len(tensors[0]), canaries)
    started = time.perf_counter()
    coins = rng.random(canaries) < 0.5
    planted = PlantedCanaries(
        plan, model, tensors, loss_fn, coins, rng, layer, is_augmented=augment is not None
    )
    session = ObservedSession(
        plan,
        model,
        optimizer,
        planted.dataset,
        augment=augment_with_ids(augment),
        observer=planted,
    )
    with session:
        for batch in session.batches():
            planted.start_step(batch)
            session.step(batch, planted.loss)
            if progress is not None:
                progress(session.steps_done, plan.steps)
    claimed = plan.curve.epsilon(plan.steps) if claimed_epsilon is None else claimed_epsilon
    seconds = time.perf_counter() - started
    return judge_canaries(planted, plan, claimed, seconds)


def judge_canaries(  # noqa: PLR0917
    planted: PlantedCanaries,
    plan: Plan,
    claimed: float,
    seconds: float,
    where: str = COPY,
) -> OneRunResult:
    """Bound ε from below by the canaries of a run that has ended.

    Args:
        planted: canaries that have observed every release of the run.
        plan: of the run, canaries included.
        claimed: ε that is promised.
        seconds: duration of the run.
        where: which model held the canaries, `RELEASED` or `COPY`.
    """
    scores, coins = planted.scores(), planted.coins
    alpha = 1 - CONFIDENCE
    bound, guesses, correct = _guess(scores, coins, plan.delta, alpha)
    gaussian = ceiling = noise = None
    passed = bound <= claimed
    heard, shares = planted.pairs()
    took_part = int(shares.sum())
    chances = 2 * len(shares) * int(coins.sum())
    is_rare = bool(binom.sf(took_part - 1, chances, _sampling_rate(plan)) >= MISSING)
    quiet, shares = choose_quiet(heard, shares)
    if shares.any():
        gaussian = _epsilon_at(gaussian_run_mu(quiet, shares, alpha), plan)
        ceiling = _epsilon_at(most_run_mu(_heard_mu(plan), shares, alpha), plan)
        certain = _epsilon_at(gaussian_run_mu(quiet, shares, CONTRADICTED), plan)
        outside = quiet[shares == 0]
        noise = float(outside.std(ddof=1)) / (plan.stddev * math.sqrt(2) or math.inf)
        # The largest noise that agrees with what is heard.
        freedom = len(outside) - 1
        most = noise * math.sqrt(freedom / chi2.ppf(MISSING, freedom))
        passed = passed and certain <= claimed and most >= LEAST_NOISE and is_rare
    return OneRunResult(
        canaries=len(coins),
        included=int(coins.sum()),
        guesses=guesses,
        correct=correct,
        epsilon_lower=bound,
        gaussian_lower=gaussian,
        ceiling=ceiling,
        noise=noise,
        took_part=took_part,
        claimed_epsilon=claimed,
        delta=plan.delta,
        steps=planted.observed,
        seconds=seconds,
        passed=passed,
        layer=planted.layer,
        where=where,
    )


def choose_quiet(heard: NDArray[np.float32], shares: Shares) -> tuple[Floats, Shares]:
    """Return scores and shares of the half of the canaries that real examples disturb least `[n]`.

    Odd pairs choose for even ones, and even for odd: no noise decides whether it is looked at.

    Args:
        heard: scores of each pair of steps `[k, m]`.
        shares: of each pair of steps `[k, m]`.
    """
    chosen_heard, chosen_shares = [], []
    for judged, other in ((0, 1), (1, 0)):
        is_absent = shares[other::2] == 0
        squares = np.where(is_absent, heard[other::2].astype(float) ** 2, 0.0)
        energies = squares.sum(0) / np.maximum(is_absent.sum(0), 1)
        is_quiet = energies <= np.median(energies)
        chosen_heard.append(heard[judged::2, is_quiet].ravel())
        chosen_shares.append(shares[judged::2, is_quiet].ravel())
    return np.concatenate(chosen_heard).astype(float), np.concatenate(chosen_shares)


def _sampling_rate(plan: Plan) -> float:
    return min(1.0, plan.expected_batch_size / plan.dataset_size)


def _heard_mu(plan: Plan) -> float:
    """Return the share of a canary in a pair of steps, over the noise in their difference."""
    return plan.max_grad_norm / (math.sqrt(2) * plan.stddev) if plan.stddev else math.inf


def _epsilon_at(mu: float, plan: Plan) -> float:
    """Return ε of the plan with the noise at which canaries are heard as clearly as this."""
    if mu in (0, math.inf):
        return mu
    noise = plan.noise_multiplier * _heard_mu(plan) / mu
    curve = EpsilonCurve(
        plan.sampler.event(noise),
        plan.delta,
        plan.neighbouring_relation,
        plan.accountant,
        also=[(kind.event, kind.count) for kind in plan.extra_releases],
    )
    # dp-accounting would take longer for three noises than a short run for its steps.
    return curve.running_epsilon(plan.steps)


def is_harmless(plan: Plan, model: nn.Module, canaries: int) -> bool:
    """Return whether planted canaries change the released model by next to nothing.

    Half of them are in. Their directions are orthogonal, so their squared norms add up; they are
    compared with the expected squared norm of the noise in a step.

    Args:
        plan: of the run.
        model: whose trainable parameters get noise.
        canaries: m.
    """
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    power = canaries / 2 * _sampling_rate(plan) * plan.sensitivity**2
    return power <= HARM * entries * plan.stddev**2


def plan_for_canaries(plan: Plan, size: int, canaries: int) -> Plan:
    """Return the plan of the same settings for a dataset with canaries added.

    The plan is calibrated anew for the same ε, or has the same noise.

    Args:
        plan: of the run on `size` examples; one for `size + canaries` is returned unchanged.
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
            f"the plan is for {plan.dataset_size} examples, the dataset has {size}: make the plan "
            f"for {size}, or for {whole} with the canaries"
        )
    if plan.target_epsilon is None:
        return plan.config.with_noise(plan.noise_multiplier, plan.delta, whole)
    return plan.config.calibrate(plan.target_epsilon, plan.delta, whole)


def check_settings(plan: Plan, canaries: int) -> None:
    """Refuse an audit that could not be valid, with a ValueError."""
    if canaries < FEWEST:
        raise ValueError(f"an audit in one run needs at least {FEWEST} canaries, got {canaries}")
    if plan.steps < 2:
        raise ValueError("canaries are heard in pairs of steps; the plan has one: set steps=2")
    if plan.bands > 1:
        raise ValueError(
            f"canaries are heard through noise that is independent between steps, and bands="
            f"{plan.bands} correlates it: leave the audit out, or set bands=1"
        )
    if plan.config.max_records_per_unit is not None:
        raise ValueError(
            f"the plan protects one {plan.config.unit}, the canaries are single examples: leave "
            "--audit out and run dpkfc audit (audit_step) on the run"
        )
    if DistributedContext.current().world_size > 1:
        raise ValueError("each process would toss its own coins: audit in one process")


def _guess(
    scores: Floats, coins: NDArray[np.bool_], delta: float, alpha: float
) -> tuple[float, int, int]:
    """Return the best bound over the fixed numbers of guesses: (ε, guesses, right ones)."""
    order, m = np.argsort(scores, kind="stable"), len(coins)
    results = []
    for fraction in FRACTIONS:
        k = int(fraction * m) // 2
        right_in = coins[order[m - k :]].sum()
        right_out = k - coins[order[:k]].sum()
        correct = int(right_in + right_out)
        bound = one_run_epsilon(correct, 2 * k, m, delta, alpha / len(FRACTIONS))
        results.append((bound, 2 * k, correct))
    return max(results)


class ObservedSession(Session):
    """The session that ships, with an observer of its releases.

    Args:
        observer: is shown each release; None observes nothing.
    """

    def __init__(self, *words: Any, observer: PlantedCanaries | None, **options: Any) -> None:
        super().__init__(*words, **options)
        self._observer = observer

    def _release(self, clipped: ClippedSum) -> Released:
        released = super()._release(clipped)
        if self._observer is not None:
            self._observer.observe(released, self._pipeline.preconditioning.metric)
        return released
