"""Hold all that a guarantee rests on: accounting, random streams, mechanism and ledger."""

from __future__ import annotations
