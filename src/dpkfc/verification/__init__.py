"""Checks on public rows, before the first private row is read."""

from __future__ import annotations

from dpkfc.verification.examples import check_on_public_rows, program_of
from dpkfc.verification.public_rows import PublicRows, public_rows

__all__ = ["PublicRows", "check_on_public_rows", "program_of", "public_rows"]
