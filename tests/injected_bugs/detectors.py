"""Who notices a leak: the checks of the audit, and an invariant or two of the suite, from cheap to
dear.
"""

import os
import tempfile
from pathlib import Path

import pytest

from dpkfc.audit.batch_sizes import check_batch_sizes
from dpkfc.audit.charges import check_accounting, check_charges
from dpkfc.audit.checkpoints import check_checkpoints
from dpkfc.audit.contributions import check_contributions
from dpkfc.audit.distinguishing import distinguish_neighbors
from dpkfc.audit.findings import Finding, select_failed
from dpkfc.audit.harness import open_session, script_plan
from dpkfc.audit.low_bits import check_low_bits
from dpkfc.audit.noise_tests import check_noise, check_run_noise
from dpkfc.audit.replay import replay
from dpkfc.audit.sampler_tests import check_sampler
from tests.audit.sizes import size
from tests.injected_bugs.subjects import select

# of a patch, not of a detector
FAULTS = (
    "TypeError",
    "AttributeError",
    "KeyError",
    "NameError",
    "IndexError",
)


def check_syncs(subject, canaries):
    """Every charge is on the disk before its release exists: the ledger is synced between the
    two.
    """
    some = select(canaries, "as it is")
    plan = script_plan(subject.plan, [[0], [], [0]], subject.size + len(some.names))
    events = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as m:
        path = Path(folder) / "ledger.jsonl"
        session, _ = open_session(
            subject,
            plan,
            some.dataset(subject),
            units=some.units(subject),
            ledger_path=path,
            verify=False,
        )
        sync, normal = os.fsync, session._pipeline.noise.normal

        def fsync(descriptor):
            events.append("sync" if os.path.samestat(os.fstat(descriptor), path.stat()) else "")
            sync(descriptor)

        m.setattr(os, "fsync", fsync)
        m.setattr(
            session._pipeline.noise,
            "normal",
            lambda *args: (events.append("noise"), normal(*args))[1],
        )
        with session:
            for batch in session.batches():
                session.step(batch, some.loss(subject))
    order = [event for event in events if event]
    return [
        Finding(
            check="sync",
            measured=", ".join(order),
            bound="sync, noise at every step",
            passed=order == ["sync", "noise"] * 3,
            detail="of the ledger's file",
        )
    ]


DETECTORS = {
    "accounting": lambda subject, _: list(check_accounting(subject.plan)),
    "sync": check_syncs,
    "checkpoint": lambda subject, _: [check_checkpoints(subject)],
    "charges": lambda subject, _: check_charges(subject),
    "sampler": lambda subject, _: check_sampler(subject.plan, steps=size(400, 2000)),
    "noise run": lambda subject, _: check_run_noise(subject, numbers=size(300_000, 2_000_000)),
    "batch sizes": lambda subject, _: check_batch_sizes(subject),
    "low bits": lambda subject, _: [check_low_bits(subject)],
    "noise law": lambda subject, _: check_noise(subject, steps=size(64, 80)),
    "shares": lambda subject, canaries: [check_contributions(subject, canaries)],
    "replay": lambda subject, canaries: replay(
        subject, canaries, sizes=(0, 2), until_failed=True
    ).findings(),
    "two worlds": lambda subject, canaries: [
        distinguish_neighbors(subject, canaries, runs=200, alpha=1e-9).finding()
    ],
}

# Of steps without a leak: fewer releases and sizes, which cost power and not a false alarm.
SMALL = {
    "noise law": lambda subject, _: check_noise(subject, steps=size(24, 80)),
    "batch sizes": lambda subject, _: check_batch_sizes(subject, sizes=size((12, 130), None)),
}


def find_leak(
    detector,
    subject,
    canaries,
    detectors=DETECTORS,
):
    """What a detector finds wrong; a step that it cannot run at all is refused, which is noticed
    too.

    Raises:
        Exception: of a kind that a faulty patch raises.
    """
    try:
        found = select_failed(detectors[detector](subject, canaries))
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return [Finding(check=detector, measured=f"refused: {error}", bound="", passed=False)]
    for finding in found:
        assert not any(fault in finding.detail for fault in FAULTS), finding
    return found
