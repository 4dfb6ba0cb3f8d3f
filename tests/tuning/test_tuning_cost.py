"""ε of a random search is computed without noise on the terminal; what says that something is wrong
is still heard.
"""

import logging

import dp_accounting
import pytest

from dpkfc.app.tuning.cost import bound_selection, trial_law
from dpkfc.privacy import dp_accountants


@pytest.fixture
def heard(monkeypatch):
    """What reaches the handler of absl's logger, which writes to standard error."""
    monkeypatch.setattr(dp_accountants, "_forwarded", set())
    lines = []

    class Ear(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    ear, absl = Ear(), logging.getLogger("absl")
    absl.addHandler(ear)
    yield lines
    absl.removeHandler(ear)


def test_orders_that_are_left_out_are_not_told_one_by_one(heard):
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(0.6))
    assert (
        bound_selection(
            event, 1, 1e-5, trial_law("geometric", 20), "add_or_remove_one", then=(event, 1)
        )
        > 0
    )
    assert heard == [] and not logging.getLogger("absl").filters


def test_another_warning_passes(heard):
    with dp_accountants.quiet_accountants():
        logging.getLogger("absl").warning("Negative Renyi divergence of %s", -1)
        logging.getLogger("absl").warning(
            "of %d. Excluding this order from the epsilon computation.", 3
        )
    assert heard == ["Negative Renyi divergence of -1"]
