"""One HTML page of run folders and tuning studies."""

from __future__ import annotations
