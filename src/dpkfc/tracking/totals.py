"""Rules for totals: scalars that are sums over examples."""

from __future__ import annotations

import math
from dataclasses import replace

from dpkfc.tracking.batch_rules import TOTAL_RULES, Answer, Operation, rule_for
from dpkfc.tracking.states import Total


@rule_for(
    "neg positive view reshape squeeze unsqueeze expand clone detach alias _to_copy "
    "contiguous lift_fresh sum mean select _unsafe_view _reshape_alias",
    table=TOTAL_RULES,
)
def _keep_total(operation: Operation) -> Answer:
    total = operation.state(operation.args[0])
    is_kept = operation.result.numel() == 1 and isinstance(total, Total)
    operation.require(is_kept, "a sum over the examples is spread again")
    return total


@rule_for("add sub rsub", table=TOTAL_RULES)
def _add_totals(operation: Operation) -> Answer:
    """Return the total of two with one divisor; a public number changes no gradient."""
    why = "a sum over the examples meets something else than a public number"
    operation.require(operation.result.numel() == 1, why)
    states = list(map(operation.state, operation.args[:2]))
    totals = [state for state in states if isinstance(state, Total)]
    operation.require(len(totals) + states.count(None) == len(states), why)
    first = totals[0]
    have_one_divisor = all(total.is_mean == first.is_mean for total in totals)
    operation.require(have_one_divisor, "a mean and a sum over the examples are added")
    # A change of one factor may not be made up for by another.
    factor = math.hypot(*(total.factor for total in totals))
    entries = first.number / factor if factor else 1.0
    is_quotient = any(total.is_quotient for total in totals)
    return replace(first, entries=entries, is_quotient=is_quotient)


@rule_for("mul div true_divide", table=TOTAL_RULES)
def _scale_total(operation: Operation) -> Answer:
    """Return the total times a public number; a division by N makes a sum a mean."""
    is_division = operation.name != "mul"
    first, factor = operation.args[:2]
    total = operation.state(first)
    if not isinstance(total, Total):
        operation.require(not is_division, "something is divided by a sum over the examples")
        total = operation.state(factor)
        factor = first
    why = "a sum over the examples is multiplied with private or trained numbers"
    operation.require(operation.state(factor) is None, why)
    assert isinstance(total, Total)
    operation.require(operation.result.numel() == 1, "a sum over the examples is spread again")
    is_exact = operation.argument("rounding_mode") is None
    operation.require(is_exact, "a sum over the examples is rounded")
    number = float(factor)
    if is_division:
        is_multiple = number >= operation.size and number % operation.size == 0
        if not total.is_mean and is_multiple:
            new_number = total.number * operation.size / number
            return replace(total, is_mean=True, number=new_number, is_quotient=True)
        number = 1 / number if number else 0.0
    return replace(total, number=total.number * number)
