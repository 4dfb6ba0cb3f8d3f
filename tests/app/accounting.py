"""Accounting that is asked the same question in many tests is answered once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dpkfc.privacy import accounting, calibration

calibrated = functools.cache(calibration.calibrate_noise_multiplier)
checked = functools.cache(accounting.cross_check)


@contextmanager
def remembered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dpkfc.config.calibrate_noise_multiplier", calibrated)
        patched.setattr("dpkfc.privacy.accounting.cross_check", checked)
        yield
