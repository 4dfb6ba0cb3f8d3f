"""Figures at little cost, for tests of anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


def make_figures_blank(patched: pytest.MonkeyPatch) -> None:
    """Leave the figures of runs blank, and measure them on 32 examples at most.

    Otherwise they take longer than a few steps. Two runs of tests/app/test_train.py and those of
    the documents measure and draw them in full.
    """
    from dpkfc.app import results
    from dpkfc.app.run_folder import placed

    choose_factors = results._choose_factors

    def choose_few(prepared: Any) -> Any:
        factors, measured_on = choose_factors(prepared)
        return replace(factors, probe_size=min(factors.probe_size, 32)), measured_on

    patched.setattr("dpkfc.app.plots.save", lambda figure, path: placed(path, Path.touch))
    patched.setattr(results, "_choose_factors", choose_few)
