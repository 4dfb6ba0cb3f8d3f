"""How large a check is: small inside `make test`, whole in `make assurance` (DPKFC_ASSURANCE=1)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("DPKFC_ASSURANCE") == "1"


def size(quick: T, full: T) -> T:
    """The value for this run."""
    return full if FULL else quick
