"""Many private runs: cells, stored results, worker processes, searches."""

from __future__ import annotations
