"""Replace a function in every module of the package that has imported it."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def patch_linalg(m: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replace a name in all modules of `dpkfc.linalg`."""
    for path, module in list(sys.modules.items()):
        if path.startswith("dpkfc.linalg.") and hasattr(module, name):
            m.setattr(module, name, value)
