"""Accounting that is asked the same question in many tests is answered once."""

import functools
from contextlib import contextmanager

import pytest

from dpkfc.privacy import calibration, cross_check, dp_accountants


def _answer_once(function):
    """The function with a memory: each grid of losses has answers of its own."""

    @functools.cache
    def answer(interval, *args, **named):
        return function(*args, **named)

    def ask(*args, **named):
        fixed = [_hashable(x) for x in args]
        by_name = {name: _hashable(x) for name, x in named.items()}
        return answer(dp_accountants._INTERVAL, *fixed, **by_name)

    return ask


def _hashable(x):
    return tuple(x) if isinstance(x, list) else x


calibrated = _answer_once(calibration.calibrate_noise_multiplier)
checked = _answer_once(cross_check.cross_check)


@contextmanager
def remember_accounting():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dpkfc.config.calibrate_noise_multiplier", calibrated)
        patched.setattr("dpkfc.privacy.cross_check.cross_check", checked)
        yield
