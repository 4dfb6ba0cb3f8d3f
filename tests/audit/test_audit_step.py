"""The audit of a step as a user runs it: every check by name, a verdict that is written down,
refusals that say why.
"""

import json

import pytest
import torch

from dpkfc.audit import step as module
from dpkfc.audit.charges import check_accounting, check_charges
from dpkfc.audit.checkpoints import check_checkpoints
from dpkfc.audit.findings import select_failed, tabulate_findings
from dpkfc.audit.harness import Subject
from dpkfc.audit.step import audit_step
from dpkfc.config import PrivacyConfig
from tests.audit.quick import make_audit_quick
from tests.audit.sizes import size
from tests.injected_bugs import in_clip, in_data
from tests.injected_bugs.subjects import B, N, kfac, subject_of, vectors

CHECKS = {
    "sensitivity",
    "metric",
    "weights",
    "hand-over",
    "one release and one charge a step",
    "shares",
    "noise mean",
    "noise scale",
    "noise everywhere",
    "noise shape",
    "no repetition inside a release",
    "no repetition between releases",
    "independence of following releases",
    "two worlds",
    "ledger",
    "charge before release",
    "checkpoint",
    "guarantee",
    "event",
    "accountants",
    "reported ε",
    "budget",
    "release of a zero sum",
    "sum of two halves",
    "sensitivity of large batches",
    "noise tails",
    "noise granularity",
    "noise fingerprints",
    "noise over the steps",
    "low bits",
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    if size(1, 0):
        make_audit_quick(monkeypatch)


def calibrate():
    config = PrivacyConfig(
        expected_batch_size=B, steps=100, max_grad_norm=0.7, accountant="rdp", preconditioner=kfac()
    )
    subject = vectors()
    return Subject(
        plan=config.calibrate(4.0, 1e-3, N),
        model=subject.model,
        dataset=subject.dataset,
        loss_fn=subject.loss_fn,
    )


@pytest.mark.slow
def test_an_honest_step_passes_every_check(evidence):
    progress = {}
    subject = calibrate()
    found = audit_step(
        subject,
        runs=size(12, 600),
        progress=lambda name, done, of: progress.setdefault(name, []).append((done, of)),
    )
    assert found.passed, select_failed(found.findings)
    assert {finding.check.partition(":")[0] for finding in found.findings} >= CHECKS
    assert len(progress) == 7 and all(done[-1][0] == done[-1][1] for done in progress.values())
    assert all(
        [done for done, _ in steps] == sorted(done for done, _ in steps)
        for steps in progress.values()
    )
    described = json.loads(json.dumps(found.describe()))
    assert (
        described["passed"]
        and described["plan_hash"] == subject.plan.hash
        and described["canaries"] > 10
    )
    rows = tabulate_findings(found.findings)
    assert len(rows) == len(found.findings) and {row[3] for row in rows} == {"held"}
    evidence(
        "audit",
        "DP-KFC",
        checks=len(rows),
        canaries=found.canaries,
        seconds=found.seconds,
        passed=found.passed,
    )


@pytest.mark.slow
def test_one_failed_check_fails_the_audit(monkeypatch):
    in_clip.clip_micro_batches(monkeypatch)
    for name in ("check_noise", "check_run_noise", "check_charges"):
        monkeypatch.setattr(module, name, lambda subject, **_: [])
    found = audit_step(vectors(), runs=size(8, 100))
    assert not found.passed and not found.describe()["passed"]
    assert "sensitivity" in [finding.check for finding in select_failed(found.findings)]
    assert "FAILED" in {row[3] for row in tabulate_findings(found.findings)}


@pytest.mark.slow
def test_a_check_that_cannot_be_ended_is_a_finding(monkeypatch):
    """Steps without a release leave nothing to judge."""
    in_data.skip_batch(False)(monkeypatch)
    monkeypatch.setattr(module, "distinguish_neighbors", broken)
    found = {finding.check: finding for finding in select_failed(audit_step(vectors()).findings)}
    assert "made no release" in found["noise distribution"].detail
    assert found["two worlds"].detail == "two steps disagree"
    assert "one release and one charge a step" in found


def broken(*_, **__):
    raise RuntimeError("two steps disagree")


@pytest.mark.parametrize(
    "settings, noise_multiplier, message",
    [({}, 0.0, "adds no noise"), ({"test_mode_seed": 3}, 1.0, "test mode")],
)
def test_a_plan_without_a_guarantee_is_refused(settings, noise_multiplier, message):
    plan = PrivacyConfig(expected_batch_size=B, steps=5, **settings).with_noise(
        noise_multiplier, 1e-3, N
    )
    subject = vectors()
    with pytest.raises(ValueError, match=message):
        audit_step(
            Subject(
                plan=plan, model=subject.model, dataset=subject.dataset, loss_fn=subject.loss_fn
            )
        )


def test_a_sampler_without_a_proved_event_fails_by_its_name():
    plan = vectors(sampler="shuffle", uncertified=True).plan
    found = list(module._summarize_sampler(plan))
    assert [finding.passed for finding in found] == [False]
    assert "Shuffle" in found[0].measured and "exceed" in found[0].detail
    with pytest.warns(UserWarning, match="not a guarantee of this run"):
        assert "guarantee" in [
            finding.check for finding in select_failed(list(check_accounting(plan)))
        ]


# -- accounting ------------------------------------------------------------------------------------


def test_a_budget_that_is_exceeded_is_a_finding(monkeypatch):
    plan = calibrate().plan
    assert not select_failed(list(check_accounting(plan)))
    object.__setattr__(plan, "target_epsilon", 3.0)
    assert [finding.check for finding in select_failed(list(check_accounting(plan)))] == ["budget"]


# -- the ledger and the checkpoint -----------------------------------------------------------------


@pytest.mark.parametrize("name", size(["DP-KFC"], ["DP-SGD", "DP-KFC", "patients"]))
def test_charges_and_checkpoints_of_honest_steps(name):
    subject = subject_of(name)
    assert not select_failed([*check_charges(subject), check_checkpoints(subject)])


def test_the_value_that_differs_in_a_checkpoint_is_named():
    from dpkfc.audit.harness import first_difference

    one = {"a": torch.zeros(2), "b": {"c": [1, 2.0], "d": None}}
    assert first_difference(one, {"a": torch.zeros(2), "b": {"c": [1, 2.0], "d": None}}) == ""
    assert first_difference(one, {"a": torch.ones(2), "b": one["b"]}) == "/a"
    assert first_difference(one, {"a": torch.zeros(2), "b": {"c": [1, 3.0], "d": None}}) == "/b/c"
    assert first_difference(one, {"a": torch.zeros(2), "b": {"c": [1, 2.0]}}) == "/b/d"
    assert first_difference(one, {"a": torch.zeros(2), "b": {"c": [1, 2.0], "d": 0}}) == "/b/d"
