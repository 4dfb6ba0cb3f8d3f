"""Hold all that a guarantee rests on: accounting, streams, mechanism, ledger, budget."""

from __future__ import annotations

from dpkfc.privacy.budget import Budget, BudgetError

__all__ = ["Budget", "BudgetError"]
