"""Everything a guarantee rests on: events, calibration, the random streams, the mechanism, the ledger and the budget."""

from __future__ import annotations

from dpkfc.privacy.budget import Budget, BudgetError

__all__ = ["Budget", "BudgetError"]
