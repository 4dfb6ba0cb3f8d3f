"""Compare the accountants with each other and with our own distribution of the loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpkfc.privacy.accounting import epsilon, suitable_accountant, total_epsilon
from dpkfc.privacy.dp_accountants import (
    MOST_BY_PLD,
    bound_pld_rounding,
    interval_of,
    pld_resolves,
)
from dpkfc.privacy.events import compose, has_no_noise, is_gaussian
from dpkfc.privacy.quick_epsilon import QuickEpsilon, quick_epsilon

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from dpkfc.privacy.events import Charges

PLD_RDP_TOLERANCE = 1e-3
RDP_TOLERANCE = 0.01  # absolute and relative, where PLD treats neither event nor δ
# An ε without any meaning. From 709.8 on dp-accounting, with e^ε beyond floats, adds about 0.95.
VOID = 700.0


def cross_check(
    event: DpEvent,
    count: int,
    delta: float,
    neighbouring_relation: str = "add_or_remove_one",
    also: Charges = (),
) -> dict[str, float | None]:
    """Return ε by PLD and by RDP, after a comparison with each other and with `quick_epsilon`.

    PLD may exceed RDP, the looser bound of the same loss, by 10⁻³ and the error of its grid of
    losses. It may differ from our own distribution by what the grids and the rounding of both
    change, and RDP may not fall below that. Where PLD treats neither the event nor δ, RDP may not
    fall below our own distribution by more than 1 % and 0.01: of batches of fixed size, below the
    cost of known neighbours.

    Args:
        event: of one release.
        count: number of releases.
        delta: δ.
        neighbouring_relation: as for `epsilon`.
        also: other releases on the same people, whose total is compared in the same way.

    Returns:
        ε under the keys "pld" and "rdp". The first is None where PLD cannot treat the event or
        resolve δ.

    Raises:
        ValueError: neither accountant treats the event under this relation, or the figures
            disagree.
    """
    by_rdp = epsilon(event, count, delta, "rdp", neighbouring_relation)
    by_pld = None
    if suitable_accountant(event, count, delta, neighbouring_relation) == "pld":
        by_pld = epsilon(event, count, delta, "pld", neighbouring_relation)
    is_comparable = not MOST_BY_PLD < by_rdp < math.inf
    if count > 0 and is_comparable and not has_no_noise(event):
        _compare(event, count, delta, by_pld, by_rdp)
    if not also:
        return {"pld": by_pld, "rdp": by_rdp}
    charges = [(event, count), *also]
    total_by_rdp = total_epsilon(charges, delta, "rdp")
    total_by_pld = None
    if by_pld is not None and pld_resolves(*compose(charges), delta):
        total_by_pld = total_epsilon(charges, delta, "pld")
        _compare_totals(charges, delta, by_pld, total_by_pld, total_by_rdp)
    return {"pld": total_by_pld, "rdp": total_by_rdp}


def _compare_totals(
    charges: Charges, delta: float, alone: float, by_pld: float, by_rdp: float
) -> None:
    """Refuse a total below one part's ε, above a looser bound, or different from our own ε."""
    event, _ = compose(charges)
    count = sum(n for _, n in charges)
    grid = _grid_error(event, count, delta)
    own = None if MOST_BY_PLD < by_rdp < math.inf else quick_epsilon(charges, delta)
    agrees = own is None or abs(by_pld - own.value) <= _agreement(own, event, count, delta)
    if agrees and alone - PLD_RDP_TOLERANCE - grid <= by_pld <= by_rdp + PLD_RDP_TOLERANCE + grid:
        return
    raise ValueError(
        f"the accountants disagree on a total: PLD says {by_pld:.8g}, RDP {by_rdp:.8g}, ours"
        f" {'nothing' if own is None else own.value}, a part {alone:.8g}; please report this"
    )


def _grid_error(event: DpEvent, count: int, delta: float) -> float:
    """Return about the error of ε that the grid of losses causes."""
    spread = math.sqrt(2 * count * math.log(1 / delta))
    return interval_of(event) / 2 * spread


def _compare(event: DpEvent, count: int, delta: float, by_pld: float | None, by_rdp: float) -> None:
    """Refuse figures that contradict each other."""
    problem = ""
    grid = _grid_error(event, count, delta)
    own = quick_epsilon([(_find_known_event(event), count)], delta)
    if by_pld is not None and by_pld > by_rdp + PLD_RDP_TOLERANCE + grid:
        problem = f"PLD gives epsilon {by_pld}, above the {by_rdp} of RDP, a looser bound"
    elif own is not None:
        slack = RDP_TOLERANCE * (1 + own.value)
        if by_pld is not None:
            slack = _agreement(own, event, count, delta)
        least = own.value - slack
        if by_pld is not None and not abs(by_pld - own.value) <= slack:
            problem = f"PLD gives epsilon {by_pld}, our own distribution of the loss {own.value}"
        elif not by_rdp >= least:
            problem = f"RDP gives epsilon {by_rdp}, below {least} by our own distribution"
    if problem:
        raise ValueError(
            f"the accountants disagree on {count} x {event} at delta = {delta}: {problem}; do not"
            " train, please report this"
        )


def _find_known_event(event: DpEvent) -> DpEvent:
    """Return an event that costs no more, and that our own distribution of the loss knows.

    Of batches of fixed size that is the cost of neighbours whose other examples pull the opposite
    way: their sum moves by two clips, and noise is counted in two clips.
    """
    import dp_accounting

    kind = dp_accounting.SampledWithoutReplacementDpEvent
    if isinstance(event, kind) and is_gaussian(event.event):
        rate = event.sample_size / event.source_dataset_size
        return dp_accounting.PoissonSampledDpEvent(rate, event.event)
    return event


def check_before_a_run(
    event: DpEvent,
    count: int,
    delta: float,
    neighbouring_relation: str,
    also: Charges = (),
) -> None:
    """Run `cross_check` unless ε is above `VOID`, where PLD is slow and too large.

    Raises:
        ValueError: as `cross_check`.
    """
    own = None
    if not has_no_noise(event):
        own = quick_epsilon([(_find_known_event(event), count)], delta)
    if own is None or own.value <= VOID:
        cross_check(event, count, delta, neighbouring_relation, also)


def _agreement(own: QuickEpsilon, event: DpEvent, count: int, delta: float) -> float:
    """Return how far dp-accounting and our own distribution may differ, by what both round."""
    rounding = 1e-6 * (1 + own.value)
    if own.grid is not None:
        grids = own.grid.error(own.value) + own.grid.error(own.value, interval_of(event))
        # dp-accounting leaves out tails of 1e-15.
        hidden = (bound_pld_rounding(event, count) + 1e-14) / (delta * own.grid.slope)
        # In a scan of rates, noises and counts the grids added up to 3.6 times this estimate. Both
        # programs add what their transforms round.
        rounding += 10 * grids + 2 * hidden
    return rounding
