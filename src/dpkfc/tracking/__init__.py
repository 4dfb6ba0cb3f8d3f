"""Prove that every gradient belongs to one example, by following the batch axis."""

from __future__ import annotations

from dpkfc.tracking.batch_rules import (
    PARAMETRIC,
    BatchAxis,
    Operation,
    State,
    Total,
    Unknown,
    example_first,
    register_batch_rule,
)
from dpkfc.tracking.tracker import Tracker, UnknownOperation

__all__ = [
    "PARAMETRIC",
    "BatchAxis",
    "Operation",
    "State",
    "Total",
    "Tracker",
    "Unknown",
    "UnknownOperation",
    "example_first",
    "register_batch_rule",
]
