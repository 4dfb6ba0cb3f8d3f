"""Checks on public rows, before the first private row is read."""

from __future__ import annotations

from dpkfc.verification.examples import (
    Verdict,
    check_on_public_rows,
    check_verify_setting,
    identify_program,
)
from dpkfc.verification.public_rows import PublicRows, draw_public_rows

__all__ = [
    "PublicRows",
    "Verdict",
    "check_on_public_rows",
    "check_verify_setting",
    "draw_public_rows",
    "identify_program",
]
