"""One HTML page of runs and results."""

from __future__ import annotations
