"""Blocks of per-example gradients, preconditioner maps on them, and bounds on their norms."""

from __future__ import annotations
