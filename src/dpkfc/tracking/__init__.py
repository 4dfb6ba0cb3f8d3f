"""Prove that every gradient belongs to one example: states, rules by family, and the tracker.

Importing any part of it fills the table of rules.
"""

from __future__ import annotations

from dpkfc.tracking import elementwise, layouts, lookups, losses, products, totals, trailing

__all__ = ["elementwise", "layouts", "lookups", "losses", "products", "totals", "trailing"]
