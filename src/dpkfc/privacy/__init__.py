"""Everything a guarantee rests on: events, calibration, the random streams, the mechanism and the ledger."""

from __future__ import annotations
