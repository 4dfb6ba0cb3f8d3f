"""Audits: checks of the step that runs, and statistics that bound ε from below."""

from __future__ import annotations
