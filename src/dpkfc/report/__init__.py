"""Privacy cards, verification of ledgers, the doctor and the cost model."""

from __future__ import annotations
