"""Data sets of the recipes: where they come from and how their files are read."""

from __future__ import annotations
