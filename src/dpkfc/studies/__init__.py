"""Comparisons of many private runs: cells, their results, side-by-side execution, tuning and published tables."""

from __future__ import annotations
