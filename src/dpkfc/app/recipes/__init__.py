"""Recipes: a task, its public constants and its defaults, in Python and TOML."""

from __future__ import annotations
