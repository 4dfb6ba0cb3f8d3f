"""Accounting and figures at little cost, for tests of anything else."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest

from dpkfc.privacy import accounting

INTERVAL = 1e-3
ORDERS = (1.25, 1.5, 1.75, 2, 2.25, 2.5, *range(3, 17), 20, 24, 28, 32, 40, 48, 64, 128, 256, 512)
VALUES: dict[tuple[Any, ...], float] = {}
DIVERGENCES: dict[tuple[Any, ...], Any] = {}
# Caches of their own, since tests of accounting share the process.
PROFILE = functools.lru_cache(maxsize=64)(accounting._profile.__wrapped__)
GROUP_EPSILON = functools.lru_cache(maxsize=256)(accounting._group_epsilon.__wrapped__)


def make_accounting_quick(patched: pytest.MonkeyPatch) -> None:
    """Take a grid of losses ten times wider, and few orders: ε costs a tenth of the time.

    It is an upper bound as before. PLD moves in the fifth digit, RDP by a few per cent.
    """
    accountant_of = accounting._accountant

    def make_accountant(name: str, relation: str) -> dp_accounting.PrivacyAccountant:
        if name != "rdp":
            return accountant_of(name, relation)
        neighbours = dp_accounting.NeighboringRelation[relation.upper()]
        return dp_accounting.rdp.RdpAccountant(ORDERS, neighbours)

    patched.setattr(accounting, "_INTERVAL", INTERVAL)
    patched.setattr(accounting, "_accountant", make_accountant)
    patched.setattr(accounting, "_values", VALUES)
    patched.setattr(accounting, "_divergences", DIVERGENCES)
    patched.setattr(accounting, "_profile", PROFILE)
    patched.setattr(accounting, "_group_epsilon", GROUP_EPSILON)


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
