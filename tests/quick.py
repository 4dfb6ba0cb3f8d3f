"""Figures and ε at little cost, for tests of anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from dpkfc.privacy import accounting, dp_accountants

# An ε of the coarse grid must not reach a test of the fine one.
_COARSE = 1e-3
_values: dict[Any, Any] = {}
_divergences: dict[Any, Any] = {}
_ORDERS = tuple(x for x in DEFAULT_RDP_ORDERS if x >= 2 and (2 * x) % 1 == 0)


def make_accounting_quick(patched: pytest.MonkeyPatch) -> None:
    """Take a coarser grid of losses for PLD, and half of the orders for RDP.

    Both figures stay upper bounds. That of PLD is larger by about 10⁻⁴. That of RDP is larger by
    less than a hundredth where it is small, and by a tenth where it is large and says little. They
    take a tenth and a third of the time.
    """
    patched.setattr(dp_accountants, "_INTERVAL", _COARSE)
    patched.setattr(accounting, "_values", _values)
    patched.setattr(dp_accountants, "_divergences", _divergences)
    patched.setattr(rdp_privacy_accountant, "DEFAULT_RDP_ORDERS", _ORDERS)


def make_figures_blank(patched: pytest.MonkeyPatch) -> None:
    """Leave the figures of runs blank, and measure them on 32 examples at most.

    Otherwise they take longer than a few steps. Two runs of tests/app/test_train.py and those of
    the documents measure and draw them in full.
    """
    from dpkfc.app import results
    from dpkfc.app.run_folder import write_atomically

    measure_figures = results._measure_figures

    def measure_few(prepared: Any, session: Any) -> Any:
        plan = prepared.plan
        kfac = plan.config.preconditioner
        if isinstance(kfac, results.KFAC):
            few = replace(kfac, probe_size=min(kfac.probe_size, 32), later_probe_size=None)
            plan = replace(plan, config=replace(plan.config, preconditioner=few))
        return measure_figures(replace(prepared, plan=plan), session)

    patched.setattr(
        "dpkfc.app.picture_style.save", lambda figure, path: write_atomically(path, Path.touch)
    )
    patched.setattr(results, "_measure_figures", measure_few)
