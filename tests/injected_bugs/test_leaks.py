"""Every planted leak is caught, and the step without it raises no alarm."""

import time

import pytest

from dpkfc.audit.replay import World
from tests.audit.sizes import FULL
from tests.injected_bugs import in_clip, in_data, in_noise, ranks
from tests.injected_bugs.detectors import DETECTORS, SMALL, find_leak
from tests.injected_bugs.subjects import MIXING, SUBJECTS, canaries_of, select, subject_of

LEAKS = [*in_noise.LEAKS, *in_clip.LEAKS, *in_data.LEAKS]
CONTROL = (
    "as it is",
    "loss × 1e4",
    "loss × -1e4",
    "NaN",
    "× 1e20",
    "cancel",
    "stretched most",
    "0.6 · 2^149",
)
LATER = (
    "DP-KFC in float32",
    "truncated batches",
    "patients",
    "convolutions",
    "texts",
    "small batches",
    "long vectors",
)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_planted_leak_is_caught(leak, evidence):
    canaries = canaries_of(leak.subject)
    started, by = time.perf_counter(), []
    found = []
    with pytest.MonkeyPatch.context() as m:
        leak.patch(m)
        subject = subject_of(leak.subject)
        some = (
            select(canaries, *leak.canaries, *CONTROL) if FULL else select(canaries, *leak.canaries)
        )
        for detector in (
            [*leak.by, *(d for d in DETECTORS if d not in leak.by)] if FULL else leak.by
        ):
            noticed = find_leak(detector, subject, some)
            by += [detector] if noticed else []
            found += noticed
            if noticed and not FULL:
                break
    assert set(by) & set(leak.by), f"{leak.name}: not caught by {', '.join(leak.by)}"
    seconds = round(time.perf_counter() - started, 1)
    measured = "; ".join(f"{x.check}: {x.measured}" for x in found[:3])
    evidence(
        "leaks",
        leak.name,
        what=(leak.patch.__doc__ or leak.name).strip(),
        subject=leak.subject,
        caught_by=by,
        measured=measured,
        seconds=seconds,
    )


@pytest.mark.quick("DP-KFC", "DP-SGD", "LSTM")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_step_without_a_leak_raises_no_alarm(name, evidence):
    if name in LATER and not FULL:
        pytest.skip("in the long run")
    subject, canaries = subject_of(name), canaries_of(name)
    some = canaries if FULL else select(canaries, *CONTROL)
    detectors = [
        d for d in DETECTORS if FULL or d not in ("two worlds", "sampler", "sync", "low bits")
    ]
    alarms = {d: find_leak(d, subject, some, DETECTORS | SMALL) for d in detectors}
    assert not any(alarms.values()), alarms
    evidence(
        "leaks", f"no leak: {name}", caught_by=[], checks=len(detectors), canaries=len(some.names)
    )


@pytest.mark.quick("*module*", "*augmentation*")
@pytest.mark.parametrize(
    "leak", [leak for leak in LEAKS if leak.subject in MIXING], ids=lambda leak: leak.name
)
def test_a_model_that_mixes_raises_no_alarm_where_the_proof_holds(leak):
    """The leak is in the proof: without a patch such examples are differentiated one at a time,
    also unchecked ones.
    """
    canaries = canaries_of(leak.subject)
    some = canaries if FULL else select(canaries, "as it is", "loss × 1e4")
    alarms = {d: find_leak(d, subject_of(leak.subject), some, DETECTORS | SMALL) for d in leak.by}
    assert not any(alarms.values()), alarms


@pytest.mark.parametrize("name", SUBJECTS)
def test_an_audit_takes_the_way_that_training_takes(name):
    """Canaries leave a pass proved: whole micro-batches are audited, as they are trained on."""
    subject, canaries = subject_of(name), canaries_of(name)
    everyone = [0, 1, *range(subject.size, subject.size + len(canaries.names))]
    with World(subject, canaries, [everyone]) as world:
        world.session.step(next(world.batches), world.loss)
        mode = world.session._gradient_mode
    assert mode.unproved_on_private_rows is None


@pytest.mark.skipif(not FULL, reason="in the long run: two processes")
def test_leaks_between_ranks_are_caught(tmp_path, evidence):
    for name, found in ranks.run(tmp_path).items():
        assert bool(found) == (name != "no leak"), (name, found)
        measured = "; ".join(f"{x.check}: {x.measured}" for x in found[:3])
        what = (ranks.PATCHES[name].__doc__ or "").strip()
        evidence(
            "leaks",
            f"{name}, two ranks",
            what=what,
            caught_by=["two ranks"] if found else [],
            measured=measured,
        )
