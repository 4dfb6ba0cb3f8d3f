"""What the rule of an operation says of its outputs, in a pass or in a captured graph."""

from __future__ import annotations

import torch

from dpkfc.tracking.batch_rules import (
    RULES,
    TOTAL_RULES,
    Answer,
    LostExamples,
    Operation,
    has_tag,
)
from dpkfc.tracking.elementwise import pointwise
from dpkfc.tracking.states import Unknown


def apply_rule(operation: Operation, *, has_total: bool) -> Answer:
    """Return the states of the outputs, unknown where no rule can follow the examples.

    Args:
        operation: with operands that have a batch axis or are totals.
        has_total: whether one is a total.
    """
    if has_total:
        rule = TOTAL_RULES.get(operation.name)
        why = "a sum over the examples is used here"
    else:
        is_pointwise = has_tag(operation.function, torch.Tag.pointwise)
        rule = pointwise if is_pointwise else RULES.get(operation.name)
        why = "no batch rule is registered for it"
    if operation.kwargs.get("generator") is not None:
        # Numbers of a known seed belong to places. The system seeds the generators of torch.
        return operation.lose_examples(
            "it draws from a generator of the program, whose numbers may be known"
        )
    if rule is None:
        return operation.lose_examples(why)
    try:
        answer = rule(operation)
    except LostExamples as error:
        return error.state
    # A run must not stop where a rule meets operands that it does not expect.
    except Exception as error:
        return operation.lose_examples(f"its batch rule failed: {error!r:.60}")
    if isinstance(answer, (list, tuple)) and len(answer) < len(operation.outputs):
        return Unknown(str(operation.function), "its batch rule gives too few states")
    return answer
