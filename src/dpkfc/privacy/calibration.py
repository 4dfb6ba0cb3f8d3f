"""The base of all plans, and the smallest noise multiplier whose ε stays at or below a target."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dpkfc._checks import check_in_range, check_not_negative, check_positive, is_number
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.events import NEGLIGIBLE_NOISE
from dpkfc.privacy.quick_epsilon import quick_epsilon

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from dpkfc.privacy.events import Charges
    from dpkfc.privacy.extra_releases import ExtraRelease

SMALLEST = 0.1
LARGEST = 1e6
_LOG_SMALLEST = math.log(SMALLEST)
_LOG_LARGEST = math.log(LARGEST)
_TOLERANCE = math.log(1.0005)  # of the bracket, in log(noise_multiplier)
# Of a first search and of a second one: accuracy of ε, and width of the bracket.
_COARSE = 1e-3, 5e-3
_FINE = 1e-4, 1e-4


class CalibrationError(ValueError):
    """An invalid target (ε, δ), or one that no noise multiplier in range reaches."""


def check_target(
    epsilon: float | None,
    delta: float,
    dataset_size: int | None = None,
    *,
    uncertified: bool = False,
) -> None:
    """Refuse an impossible target and a meaningless δ.

    Args:
        epsilon: target ε, or None where only δ is to be checked.
        delta: target δ.
        dataset_size: number of examples N; δ >= 1 / N protects nobody.
        uncertified: only warn of such a δ.

    Raises:
        CalibrationError: ε not positive and finite, δ outside (0, 1) or not below 1 / N.
    """
    if epsilon is not None:
        try:
            check_positive("epsilon", epsilon)
        except ValueError as error:
            raise CalibrationError(str(error)) from None
    if not (is_number(delta) and 0 < delta < 1):
        raise CalibrationError(
            f"delta must be in (0, 1), got {delta!r:.20}; a common choice is 1 / N^1.1"
        )
    if dataset_size is not None and (reason := vacuous(delta, dataset_size)):
        advice = f"take for example delta = {dataset_size**-1.1:.1e}"
        if not uncertified:
            raise CalibrationError(f"{reason}; {advice}, or uncertified=True")
        warnings.warn(f"{reason}; {advice}", stacklevel=3)


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Refuse a given noise that no calibration would return, but for none at all.

    Raises:
        ValueError: it is not in [0, 1e6].
    """
    check_not_negative("noise_multiplier", noise_multiplier)
    check_in_range("noise_multiplier", noise_multiplier, f"[0, {LARGEST:g}]")


def vacuous(delta: float, dataset_size: int) -> str:
    """Return why a δ is meaningless for N examples (or units), empty where it is below 1 / N."""
    if delta < 1 / dataset_size:
        return ""
    return (
        f"delta = {delta:g} is not below 1 / N = {1 / dataset_size:.3g}: publishing one whole"
        " example at random would satisfy it"
    )


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    make_event: Callable[[float], DpEvent],
    count: int,
    accountant: str = "pld",
    *,
    relation: str = "add_or_remove_one",
    also: Charges = (),
) -> float:
    """Return the safe, upper end of a bracket around the noise multiplier that costs exactly ε.

    Args:
        epsilon: target ε > 0.
        delta: target δ in (0, 1).
        make_event: noise_multiplier to the event of one release.
        count: number of releases, >= 1.
        accountant: "pld" or "rdp".
        relation: "add_or_remove_one" or "replace_one".
        also: other releases on the same people, which are part of ε.

    Returns:
        A noise multiplier s with ε(s) <= target, such that ε(s / 1.0005) > target.

    Raises:
        CalibrationError: as `check_target`; a count below 1; a target outside the reach of [0.1,
            1e6].
        ValueError: an accountant that cannot treat the event under this relation.
    """
    check_target(epsilon, delta)
    if count < 1:
        raise CalibrationError(f"the number of releases must be >= 1, got {count}")

    @functools.cache
    def compute_epsilon(log_noise: float) -> float:
        event = make_event(math.exp(log_noise))
        return EpsilonCurve(event, delta, relation, accountant, also=also).epsilon(count)

    def excess(log_noise: float) -> float:
        return _log_ratio(compute_epsilon(log_noise), epsilon)

    def is_near(log_noise: float) -> bool:
        """Return whether a noise keeps the target, and by our own distribution less does not."""
        spent = compute_epsilon(log_noise)
        noises = math.exp(log_noise), math.exp(log_noise - _TOLERANCE)
        own = [quick_epsilon([(make_event(noise), count), *also], delta) for noise in noises]
        if own[0] is None or own[1] is None or not 0 < own[0].value:
            return False
        return spent <= epsilon < spent * own[1].value / own[0].value

    start = None
    if accountant != "rdp":
        start = _search(epsilon, delta, lambda noise: [(make_event(noise), count), *also])
    if start is not None and is_near(start):
        return math.exp(start)
    bracket = _bracket(excess, start or 0.0, 0.1 if start is None else _TOLERANCE / 2)
    if bracket is None:
        way = _way_out(epsilon, compute_epsilon)
        raise CalibrationError(
            f"no noise in [{SMALLEST:g}, {LARGEST:g}] spends epsilon = {epsilon:g} at delta ="
            f" {delta:g} in {count:,} release{'s' * (count != 1)}, {way}"
        )
    log_noise = _narrow(excess, bracket)
    total = compute_epsilon(log_noise)
    if not total <= epsilon:
        raise CalibrationError(
            f"the noise multiplier {math.exp(log_noise)} spends {total}, above epsilon ="
            f" {epsilon}; please report this"
        )
    return math.exp(log_noise)


def estimate_noise_multiplier(
    epsilon: float,
    delta: float,
    make_event: Callable[[float], DpEvent],
    count: int,
    also: Charges = (),
) -> float:
    """Return `calibrate_noise_multiplier` by our own distribution of the loss alone.

    It is for comparisons: nothing is checked, and the noise of a run needs the other function.

    Raises:
        CalibrationError: events that this distribution does not cover.
    """
    check_target(epsilon, delta)
    log_noise = _search(epsilon, delta, lambda noise: [(make_event(noise), count), *also])
    if log_noise is None:
        raise CalibrationError(
            "the noises of this sampler cannot be compared; give one by name instead of 'auto'"
        )
    return math.exp(log_noise)


Excess = Callable[[float], float]
Bracket = tuple[float, float, float, float]


def _way_out(epsilon: float, compute_epsilon: Callable[[float], float]) -> str:
    """Return which targets can be reached, where the given one cannot."""
    most = compute_epsilon(_LOG_SMALLEST)
    if most > epsilon:
        least = compute_epsilon(_LOG_LARGEST)
        return f"all spend more; choose a larger epsilon, from {1.01 * least:.3g}, or larger delta"
    if most < 1e-6:
        return "all spend about 0; choose a smaller delta, or give the noise"
    return f"all spend less; choose a smaller epsilon, up to {0.99 * most:.3g}, or give the noise"


def _log_ratio(value: float, target: float) -> float:
    """Return log(value / target), positive exactly where the value exceeds the target."""
    ratio = 1e9
    if value < math.inf:
        ratio = math.log(max(value, 1e-300) / target)
    return max(ratio, 1e-16) if value > target else min(ratio, 0.0)


def _search(epsilon: float, delta: float, charges: Callable[[float], Charges]) -> float | None:
    """Return log(noise_multiplier) at which our own distribution of the loss spends ε.

    An end of the range where no noise in it does, and None where the events are not known.
    """
    start, step = 0.0, 0.1
    for accuracy, width in (_COARSE, _FINE):

        def excess(log_noise: float, accuracy: float = accuracy) -> float:
            noise = math.exp(log_noise)
            own = quick_epsilon(charges(noise), delta, accuracy=accuracy)
            return math.nan if own is None else _log_ratio(own.value, epsilon)

        bracket = _bracket(excess, start, step)
        if bracket is None:
            least = excess(_LOG_SMALLEST)
            if math.isnan(least):
                return None
            return _LOG_LARGEST if least > 0 else _LOG_SMALLEST
        start = _narrow(excess, bracket, width)
        step = width
    return start


def _bracket(excess: Excess, start: float, step: float = 0.1) -> Bracket | None:
    """Search a bracket by growing steps from a start.

    Returns:
        (low, high, excess at low > 0, excess at high <= 0), or None without a bracket.
    """
    point = min(max(start, _LOG_SMALLEST), _LOG_LARGEST)
    value = excess(point)
    direction = 1.0 if value > 0 else -1.0
    limit = _LOG_LARGEST if direction > 0 else _LOG_SMALLEST
    while point != limit:
        next_point = min(max(point + direction * step, _LOG_SMALLEST), _LOG_LARGEST)
        next_value = excess(next_point)
        if (next_value > 0) != (value > 0):
            if direction > 0:
                return point, next_point, value, next_value
            return next_point, point, next_value, value
        point = next_point
        value = next_value
        step *= 2
    return None


def _narrow(excess: Excess, bracket: Bracket, tolerance: float = _TOLERANCE) -> float:
    """Return the safe end of a bracket narrower than the tolerance, by false position."""
    low, high, low_excess, high_excess = bracket
    widths = [high - low]
    while high - low > tolerance:
        guess = low + (high - low) * low_excess / (low_excess - high_excess)
        if len(widths) > 2 and widths[-1] > 0.5 * widths[-3]:
            guess = 0.5 * (low + high)
        margin = min(0.45 * tolerance, 0.25 * (high - low))
        guess = min(max(guess, low + margin), high - margin)
        # A point a little beyond the estimate, in the wider part, closes the bracket from both
        # sides.
        guess += margin if guess - low < high - guess else -margin
        value = excess(guess)
        if value > 0:
            low = guess
            low_excess = value
        else:
            high = guess
            high_excess = value
        widths.append(high - low)
    return high


def share_noise(share: float, epsilon: float, delta: float, count: int = 1) -> float:
    """Return the noise multiplier at which `count` releases alone cost a share of ε at δ."""
    import dp_accounting

    return calibrate_noise_multiplier(share * epsilon, delta, dp_accounting.GaussianDpEvent, count)


# --------------------------------------------------------------------------------------------------
# What the plans of all runs have in common.


def hash_plan(description: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a plan describes; TypeError for what JSON cannot hold."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class PlanBase:
    """Holds what the plan of a session and the plan of a federated run have in common."""

    config: Any
    noise_multiplier: float
    delta: float
    target_epsilon: float | None

    def _check_noise_and_target(self) -> None:
        """Check the noise multiplier and the target."""
        check_not_negative("noise_multiplier", self.noise_multiplier)
        check_target(self.target_epsilon, self.delta)

    def _warn_of_caveats(self, stacklevel: int) -> None:
        """Warn that ε is not valid; without noise it is infinite and needs no warning.

        Args:
            stacklevel: as of `warnings.warn`, from the caller.
        """
        if self.caveats and self.noise_multiplier > 0:
            warnings.warn(
                f"epsilon is not a guarantee of this run. {'. '.join(self.caveats)}",
                stacklevel=stacklevel + 1,
            )

    @property
    def sensitivity(self) -> float:
        """Return the largest change of a clipped sum between neighbouring datasets."""
        raise NotImplementedError

    @property
    def units(self) -> int:
        """Return the number of privacy units, which is taken as public."""
        raise NotImplementedError

    @property
    def privacy_unit(self) -> str:
        """Return what is added, removed or replaced between neighbouring datasets."""
        raise NotImplementedError

    @property
    def neighbouring_relation(self) -> str:
        """Return which datasets count as neighbours: "add_or_remove_one" or "replace_one"."""
        raise NotImplementedError

    @property
    def event(self) -> DpEvent:
        """Return the event of one release."""
        raise NotImplementedError

    @property
    def extra_releases(self) -> tuple[ExtraRelease, ...]:
        """Return the kinds of releases beside the steps."""
        return ()

    def count_events(self, releases: int) -> int:
        """Return how many events so many steps cost a unit: fewer where it sits steps out."""
        return releases

    @functools.cached_property
    def stddev(self) -> float:
        """Return noise_multiplier · sensitivity, the standard deviation of the noise on a sum.

        Of correlated noise it is the standard deviation of the independent numbers it is made of.
        """
        return self.noise_multiplier * self.sensitivity

    @functools.cached_property
    def test_mode(self) -> bool:
        """Return whether the random streams are repeatable; such a run is not private."""
        return self.config.test_mode_seed is not None

    @property
    def certified(self) -> bool:
        """Return whether ε is a guarantee: noise exists and is secret, and the accounting fits."""
        return not self.caveats

    @property
    def caveats(self) -> tuple[str, ...]:
        """Return the reasons why this run has no certified guarantee, one sentence each."""
        reasons = []
        if self.noise_multiplier == 0:
            reasons.append("NOT PRIVATE: no noise is added, epsilon is infinite")
        elif self.noise_multiplier < NEGLIGIBLE_NOISE:
            reasons.append("NOT PRIVATE: the noise is below a thousandth of the sensitivity")
        if self.test_mode:
            reasons.append("NOT PRIVATE: test mode, the noise can be repeated from a seed")
        reasons.extend(self._further_caveats())
        vacuous_delta = vacuous(self.delta, self.units)
        if vacuous_delta:
            reasons.append(f"UNCERTIFIED: {vacuous_delta}")
        return tuple(reasons)

    def _further_caveats(self) -> Iterable[str]:
        """Return reasons that only this kind of plan has."""
        return ()

    @property
    def ledger_header(self) -> dict[str, Any]:
        """Return what a ledger says of its plan, so that the ledger can be read alone.

        The number of releases is left to the caller that opens the ledger: an engine may have no
        limit.
        """
        return {
            "certified": self.certified,
            "rng": "repeatable" if self.test_mode else "secure",
            "unit": self.privacy_unit,
            "neighbouring_relation": self.neighbouring_relation,
            "delta": self.delta,
            "dataset_size": int(self.units),
        }

    @functools.cached_property
    def hash(self) -> str:
        """Return the SHA-256 of the public description; equal hashes mean the same mechanism.

        Raises:
            ValueError: the description of the preconditioner holds something else than plain
                values.
        """
        try:
            return hash_plan(self.describe_mechanism())
        except TypeError as error:
            raise ValueError(
                f"preconditioner.describe() must return plain values that JSON can hold: {error}"
            ) from error

    def describe_mechanism(self) -> dict[str, Any]:
        """Return all that decides what is released, without settings for speed or memory alone."""
        raise NotImplementedError
