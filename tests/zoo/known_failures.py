"""Architectures that the library does not yet treat as their kind asks."""

from __future__ import annotations

KNOWN_FAILURES: frozenset[str] = frozenset()
