"""The audit of a step with few canaries and little noise, for tests of what is around it."""

from __future__ import annotations

import pytest

from dpkfc.audit import audit
from tests.injected_bugs.subjects import select

CANARIES = ("as it is", "loss × 1e4", "loss × -1e4", "NaN", "stretched")


def make_audit_quick(patched: pytest.MonkeyPatch) -> None:
    """Leave every check in place, with a few canaries, batches and releases each."""
    prepare, noise = audit.prepare_canaries, audit.check_noise
    run, sizes = audit.check_run_noise, audit.check_batch_sizes
    patched.setattr(audit, "SIZES", (0, 2))
    patched.setattr(audit, "prepare_canaries", lambda subject: select(prepare(subject), *CANARIES))
    patched.setattr(
        audit, "check_noise", lambda subject, **options: noise(subject, steps=24, **options)
    )
    patched.setattr(
        audit,
        "check_run_noise",
        lambda subject, **options: run(subject, numbers=60_000, **options),
    )
    patched.setattr(
        audit,
        "check_batch_sizes",
        lambda subject, **options: sizes(subject, sizes=(12, 130), **options),
    )
