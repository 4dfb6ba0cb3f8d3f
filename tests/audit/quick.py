"""The audit of a step with few canaries and little noise, for tests of what is around it."""

from __future__ import annotations

from functools import partial

import pytest

from dpkfc.audit import audit, statistics
from tests.injected_bugs.subjects import select

CANARIES = ("as it is", "loss × 1e4", "loss × -1e4", "NaN", "stretched")


def make_audit_quick(patched: pytest.MonkeyPatch) -> None:
    """Leave every check in place, with a few canaries, batches and releases each."""
    make_statistics_quick(patched)
    prepare = audit.prepare_canaries
    patched.setattr(audit, "SIZES", (0, 2))
    patched.setattr(audit, "prepare_canaries", lambda subject: select(prepare(subject), *CANARIES))


def make_statistics_quick(patched: pytest.MonkeyPatch) -> None:
    """Leave every check and canary in place, and sample less noise and fewer batches."""
    noise, run, sizes = audit.check_noise, audit.check_run_noise, audit.check_batch_sizes
    patched.setattr(statistics, "NUMBERS", 100_000)
    patched.setattr(statistics, "INCLUSIONS", 1e6)
    patched.setattr(audit, "check_noise", partial(noise, steps=24))
    patched.setattr(audit, "check_run_noise", partial(run, numbers=60_000))
    patched.setattr(audit, "check_batch_sizes", partial(sizes, sizes=(12, 130)))
