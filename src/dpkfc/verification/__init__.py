"""Checks on public rows, before the first private row is read."""

from __future__ import annotations

from dpkfc.verification.examples import Verdict, check_on_public_rows, checked_verify, program_of
from dpkfc.verification.public_rows import PublicRows, public_rows

__all__ = ["PublicRows", "Verdict", "check_on_public_rows", "checked_verify", "program_of", "public_rows"]
