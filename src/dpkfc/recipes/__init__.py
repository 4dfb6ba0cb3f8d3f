"""Recipes: one readable module and one TOML file of defaults per task, and the loop that trains any of them."""

from __future__ import annotations
