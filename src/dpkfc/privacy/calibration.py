"""The smallest noise multiplier, up to half a thousandth, whose ε stays at or below a target."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.integration import integrated_epsilon

if TYPE_CHECKING:
    import dp_accounting

__all__ = ["CalibrationError", "calibrate_noise_multiplier", "check_target", "vacuous"]

SMALLEST, LARGEST = 0.1, 1e6
_TOLERANCE = math.log(1.0005)  # of the bracket, in log(noise_multiplier)


class CalibrationError(ValueError):
    """A target (ε, δ) that is not one, or that no noise multiplier in range reaches."""


def check_target(epsilon: float | None, delta: float, dataset_size: int | None = None) -> None:
    """Refuse an impossible target; warn of a δ that says nothing.

    Args:
        epsilon: target ε, or None where only δ is to be checked.
        delta: target δ.
        dataset_size: number of examples N; δ >= 1 / N is warned of.

    Raises:
        CalibrationError: ε not positive and finite, or δ outside (0, 1).
    """
    if epsilon is not None and not (epsilon > 0 and math.isfinite(epsilon)):
        raise CalibrationError(f"epsilon must be positive and finite, got {epsilon}")
    if not 0 < delta < 1:
        raise CalibrationError(f"delta must be in (0, 1), got {delta}; a common choice is 1 / N^1.1")
    if dataset_size is not None and (told := vacuous(delta, dataset_size)):
        warnings.warn(f"{told}; choose a smaller delta, for example {dataset_size**-1.1:.1e}", stacklevel=3)


def vacuous(delta: float, dataset_size: int) -> str:
    """Why a δ promises nothing among N examples (or units): one sentence; empty where it is below 1 / N."""
    if delta < 1 / dataset_size:
        return ""
    return (
        f"delta = {delta:g} is not below 1 / N = {1 / dataset_size:.3g}: publishing one whole example at random would satisfy it"
    )


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    make_event: Callable[[float], dp_accounting.DpEvent],
    count: int,
    accountant: str = "pld",
    *,
    relation: str = "add_or_remove_one",
    dataset_size: int | None = None,
) -> float:
    """The upper, safe end of a bracket around the noise multiplier that spends exactly ε.

    Args:
        epsilon: target ε > 0.
        delta: target δ in (0, 1).
        make_event: noise_multiplier to the event of one release.
        count: number of releases, >= 1.
        accountant: "pld" or "rdp".
        relation: "add_or_remove_one" or "replace_one".
        dataset_size: number of examples; only for the warning of `check_target`.

    Returns:
        A noise multiplier s with ε(s) <= target, such that ε(s / 1.0005) > target.

    Raises:
        CalibrationError: as `check_target`; a count below 1; a target outside the reach of [0.1, 1e6].
        ValueError: an accountant that cannot treat the event under this relation.
    """
    check_target(epsilon, delta, dataset_size)
    if count < 1:
        raise CalibrationError(f"the number of releases must be >= 1, got {count}")

    @functools.cache
    def spent(noise_multiplier: float, by: str) -> float:
        return EpsilonCurve(make_event(noise_multiplier), delta, relation, by).at(count)

    def excess(log_noise: float, by: str = accountant) -> float:
        return _log_ratio(spent(math.exp(log_noise), by), epsilon)

    def by_rdp(log_noise: float) -> float:
        return excess(log_noise, "rdp")

    def by_integral(log_noise: float) -> float:
        found = integrated_epsilon(make_event(math.exp(log_noise)), count, delta)
        return by_rdp(log_noise) if found is None else _log_ratio(found, epsilon)

    reach = (
        f"no noise multiplier in [{SMALLEST:g}, {LARGEST:g}] gives epsilon = {epsilon} at delta = {delta} in {count}"
    )
    bracket = _bracket(by_rdp, 0.0)
    if bracket is None and by_rdp(math.log(SMALLEST)) <= 0:
        raise CalibrationError(f"{reach} releases, all spend less; choose a smaller epsilon, or give the noise itself")
    if accountant != "rdp":  # RDP is fast and a little too large, the integral slower and about right; PLD is slowest of all
        bracket = _bracket(excess, _start(bracket, by_rdp, by_integral), _TOLERANCE / 2)
    if bracket is None:
        raise CalibrationError(f"{reach} releases by {accountant!r}, all spend more; choose a larger epsilon or delta")
    noise_multiplier = math.exp(_close(excess, bracket))
    if not (total := spent(noise_multiplier, accountant)) <= epsilon:
        raise CalibrationError(
            f"the noise multiplier {noise_multiplier} spends {total}, above epsilon = {epsilon}; please report this"
        )
    return noise_multiplier


Excess = Callable[[float], float]
Bracket = tuple[float, float, float, float]


def _log_ratio(spent: float, target: float) -> float:
    """log(spent / target), whose sign is right to the last bit: positive exactly where the target is exceeded."""
    ratio = math.log(max(spent, 1e-300) / target) if spent < math.inf else 1e9
    return max(ratio, 1e-16) if spent > target else min(ratio, 0.0)


def _start(bracket: Bracket | None, by_rdp: Excess, by_integral: Excess) -> float:
    """log(noise_multiplier) by integration, looked for a little below that by RDP; the largest where none reaches the target."""
    near = math.log(LARGEST) if bracket is None else _close(by_rdp, bracket, 0.02) - 0.05
    bracket = _bracket(by_integral, near, 0.05)
    return near if bracket is None else _close(by_integral, bracket, 1e-4)


def _bracket(excess: Excess, start: float, step: float = 0.1) -> Bracket | None:
    """(low, high, excess at low > 0, excess at high <= 0) by growing steps from a start; None where there is none."""
    smallest, largest = math.log(SMALLEST), math.log(LARGEST)
    known = min(max(start, smallest), largest)
    value = excess(known)
    direction = 1.0 if value > 0 else -1.0
    while True:
        if known == (largest if direction > 0 else smallest):
            return None
        following = min(max(known + direction * step, smallest), largest)
        following_value = excess(following)
        if (following_value > 0) != (value > 0):
            ends = sorted([(known, value), (following, following_value)])
            return ends[0][0], ends[1][0], ends[0][1], ends[1][1]
        known, value, step = following, following_value, 2 * step


def _close(excess: Excess, bracket: Bracket, tolerance: float = _TOLERANCE) -> float:
    """The safe end of the bracket once it is narrower than the tolerance: false position, kept off the ends."""
    low, high, at_low, at_high = bracket
    widths = [high - low]
    while high - low > tolerance:
        guess = low + (high - low) * at_low / (at_low - at_high)
        if len(widths) > 2 and widths[-1] > 0.5 * widths[-3]:
            guess = 0.5 * (low + high)
        margin = min(0.45 * tolerance, 0.25 * (high - low))
        guess = min(max(guess, low + margin), high - margin)
        # Look a little beyond the estimate on the side of the wider part, so that the bracket closes from both sides.
        guess += margin if guess - low < high - guess else -margin
        value = excess(guess)
        low, at_low, high, at_high = (guess, value, high, at_high) if value > 0 else (low, at_low, guess, value)
        widths.append(high - low)
    return high
