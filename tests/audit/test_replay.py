"""The neighbour replay: it reaches the bound it checks, and its canaries and its walk are what they
are said to be.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dpkfc.release_pipeline
from dpkfc.audit.contributions import check_contributions
from dpkfc.audit.findings import select_failed
from dpkfc.audit.harness import open_session, script_plan
from dpkfc.audit.replay import Replay, World, prepare_canaries, replay
from dpkfc.audit.step_canaries import Canaries
from dpkfc.curvature import NGD
from dpkfc.session import Session
from tests.audit.sizes import size
from tests.injected_bugs.leak import note_sums
from tests.injected_bugs.subjects import (
    B,
    C,
    N,
    canaries_of,
    images,
    jittered,
    kfac,
    select,
    subject_of,
    texts,
    vectors,
)
from tests.recording import Heard
from tests.sessions import cross_entropy

ONE_SIZE, ROUNDED = "batches of one size", "rounded noise"
WHOLE_RUNS = ("DP-SGD", "DP-KFC", "DP-NGD", "GEP", "DiSK")
FEW = ("as it is", "loss × 1e4", "loss × -1e4", "loss × 1e-4", "loss NaN", "random × 1000")


@pytest.mark.slow
@pytest.mark.parametrize("name", size(("DP-KFC",), ("DP-SGD", "DP-KFC", "DP-NGD", "GEP", ONE_SIZE)))
def test_the_replay_comes_as_near_to_the_bound_as_can_be(name, evidence):
    """A check that never comes near its bound would pass whatever happens."""
    canaries = canaries_of(name)
    found = replay(
        subject_of(name),
        size(select(canaries, *FEW), canaries),
        sizes=size((0, 3), (0, 1, 3, 7, 16)),
    )
    assert not select_failed(found.findings())
    assert found.worst > (0.95 if name == ONE_SIZE else 0.999)
    assert found.control == 0.0
    evidence(
        "replay",
        name,
        pairs=found.pairs,
        canaries=len(canaries.names),
        worst=found.worst,
        tolerance=found.tolerance,
    )


def test_neighbours_differ_by_the_canary_alone():
    """The difference of two releases under frozen noise is the canary's clipped gradient over the
    batch size.
    """
    subject = vectors()
    canaries = select(canaries_of("DP-SGD"), "random × 1000")
    number = next(n for n, name in enumerate(canaries.names) if name.startswith("3: random"))
    script = [[0, 1, 2]], [[0, 1, 2, N + number]]
    with World(subject, canaries, script[0]) as one, World(subject, canaries, script[1]) as other:
        released = [world.step("", Replay()) for world in (one, other)]
    assert released[0] is not None and released[1] is not None
    moved = {n: (released[1].gradients[n] - x) * B for n, x in released[0].gradients.items()}
    assert sum(float(x.square().sum()) for x in moved.values()) ** 0.5 == pytest.approx(C)
    [(a, u)] = [(a, u) for n, a, u in canaries.plants["3"] if n == number]
    scale = float(moved["3.bias"] @ u.double()) / float(u.double() @ u.double())
    assert torch.allclose(moved["3.weight"], scale * torch.outer(u, a).double()) and scale > 0
    assert all(float(x.abs().max()) < 1e-15 for n, x in moved.items() if not n.startswith("3."))


def test_canaries_come_for_every_layer_and_every_kind_of_input():
    names = canaries_of("DP-KFC").names
    for layer in ("0", "2", "3"):
        assert {f"{layer}: random × 1000", f"{layer}: one entry"} <= set(names)
    assert {"0: stretched most", "3: stretched least, small", "input infinite", "loss NaN"} <= set(
        names
    )
    assert "read: positions cancel" in canaries_of("long texts").names
    # ids are no numbers to scale
    assert any(name.startswith("example ") for name in prepare_canaries(texts()).names)


def test_a_replay_stops_at_the_first_departure_where_that_is_enough(
    monkeypatch,
):
    subject, canaries = vectors(), select(canaries_of("DP-SGD"), *FEW)
    note_sums(monkeypatch)  # still the real code
    whole = replay(subject, canaries, sizes=(0, 2)).pairs
    monkeypatch.setattr(Session, "_apply", lambda self, released: None)
    assert replay(subject, canaries, sizes=(0, 2), until_failed=True).pairs == 1 < whole


def test_a_canary_at_which_the_step_stops_is_a_departure():
    """That it stops is seen by anyone."""

    def careful(model, batch):
        if bool(batch[0].isnan().any()):
            raise FloatingPointError("NaN among the inputs")
        return cross_entropy(model, batch)

    subject = replace(vectors(), loss_fn=careful)
    found = select_failed(
        replay(subject, select(canaries_of("DP-SGD"), "input NaN"), sizes=(0, 2)).findings()
    )
    assert "one release and one charge a step" in [finding.check for finding in found]
    assert any("NaN among the inputs" in finding.detail for finding in found)


def test_a_random_forward_pass_is_an_error():
    calls = Heard()  # not looked into, so a pass does not put it back

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(None)
            return x * (1 + 1e-3 * (len(calls) % 7))

    subject = vectors(model=lambda: nn.Sequential(nn.Linear(6, 3), Counting()))
    canaries = select(canaries_of("DP-SGD"), "as it is")
    with pytest.raises(ValueError, match="forward pass is random"):
        replay(subject, Canaries(canaries.names, canaries.rows, canaries.factors), sizes=(2,))


@pytest.mark.slow
def test_dropout_and_random_augmentation_raise_no_alarm():
    dropping = vectors(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    )
    for subject in (dropping, images(torch.float64, jittered)):
        canaries = select(prepare_canaries(subject), "as it is", "loss × 1e4")
        assert not select_failed(replay(subject, canaries, sizes=(0, 2)).findings())
        assert check_contributions(subject, canaries).passed


def test_shares_need_somebody_without_a_loss():
    canaries = Canaries()
    canaries.add("as it is", tuple(x[0] for x in vectors().dataset))
    with pytest.raises(ValueError, match="every canary has a loss"):
        check_contributions(vectors(), canaries)


@pytest.mark.parametrize(
    "name", size(("DP-KFC", ROUNDED), ("DP-SGD", "DP-KFC", "GEP", "DiSK", "patients", ROUNDED))
)
def test_shares_of_an_honest_step_are_equal_to_the_last_bits(name, evidence):
    canaries = canaries_of(name)
    found = check_contributions(subject_of(name), size(select(canaries, *FEW), canaries))
    assert found.passed, found
    evidence("shares", name, measured=found.measured, bound=found.bound)


# -- the session on a script -----------------------------------------------------------------------


def test_a_script_stops_where_it_ends_and_its_plan_is_that_of_the_run():
    subject = vectors()
    plan = script_plan(subject.plan, [[0], [], [1, 2]], N, seed=3, micro=2)
    assert (plan.noise_multiplier, plan.sensitivity, plan.event) == (1.0, C, subject.plan.event)
    assert plan.steps == subject.plan.steps and plan.config.max_physical_batch_size == 2
    session, _ = open_session(subject, plan, (*subject.dataset, torch.full((N,), -1)), verify=False)
    with session:
        seen = []
        for batch in session.batches():
            seen.append(batch.indices.tolist())
            session.step(batch, canaries_of("DP-SGD").loss(subject))
    assert seen == [[0], [], [1, 2]] and len(session.released) == 3


def test_a_metric_is_built_once_where_releases_must_share_their_coordinates():
    subject, canaries = vectors(preconditioner=kfac(every=1)), canaries_of("DP-SGD")
    for still, refreshed in ((True, [0]), (False, [0, 1, 2])):
        with World(subject, canaries, [[0], [1], [2]], still=still) as world:
            for _ in range(3):
                assert world.step("", Replay()) is not None
            assert world.session._pipeline.preconditioning.refreshed == refreshed


def test_what_two_sessions_leave_behind_is_compared():
    subject, canaries = vectors(), select(canaries_of("DP-SGD"), "as it is")
    with World(subject, canaries, [[0]]) as one, World(subject, canaries, [[1]]) as other:
        assert one.session.differs_from(other.session) == ""
        with torch.no_grad():
            one.session.model[2].bias[3] = float("nan")
        assert one.session.differs_from(other.session) == "2.bias"
        with torch.no_grad():
            other.session.model[2].bias[3] = float("nan")
        assert one.session.differs_from(other.session) == ""
        one.session.model.register_buffer("seen", torch.zeros(2))
        assert one.session.differs_from(other.session) == "seen"
        assert one.session.remaining_gradient == ""
        one.session.model[0].weight.grad = torch.zeros(8, 6, dtype=torch.float64)
        assert one.session.remaining_gradient == "0.weight"


# -- a whole run, recorded and replayed on neighbouring data ---------------------------------------


def record_run(subject, absent, monkeypatch, frozen=None):
    """Train as a user does, and return what reached the noise, what left it, events and weights.

    The method of Re:cord-play (arXiv:2602.17454): of a second run on neighbouring data, the noise
    is handed the sums, and answers what the first run was answered.
    """
    config = subject.plan.config
    preconditioner = config.preconditioner
    if isinstance(preconditioner, NGD):
        preconditioner = replace(preconditioner, steps=12)
    config = replace(config, test_mode_seed=7, steps=12, preconditioner=preconditioner)
    plan = config.with_noise(1.0, 1e-3, N)
    sums, answers = [], []
    whole = dpkfc.release_pipeline.release

    def release_and_note(clipped, *others):
        answer = whole(clipped, *others)
        sums.append({name: x.clone() for name, x in clipped.tensors.items()})
        if frozen is not None:
            answer = frozen[len(sums) - 1]
        answers.append(
            replace(answer, gradients={n: g.clone() for n, g in answer.gradients.items()})
        )
        return answer

    def losses(model, batch):
        return subject.loss_fn(model, batch[:-1]) * (batch[-1] != absent)

    model = subject.model()
    # A filter has a momentum of its own.
    momentum = 0.0 if config.postprocess else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    data = (*subject.dataset, torch.arange(N))
    with monkeypatch.context() as patch:
        patch.setattr(dpkfc.release_pipeline, "release", release_and_note)
        with Session(plan, model, optimizer, data) as session:
            for batch in session.batches():
                session.step(batch, losses)
            lines = [(x["event"], x["step"]) for x in session.ledger.releases]
    return plan, sums, answers, lines, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", size(("DP-SGD", "DP-KFC"), WHOLE_RUNS))
def test_a_whole_run_on_neighbouring_data_differs_by_the_sensitivity(name, monkeypatch):
    subject, worst = subject_of(name), 0.0
    for absent in (0, 17):
        plan, first, answers, lines, weights = record_run(subject, -1, monkeypatch)
        _, second, _, others, same = record_run(subject, absent, monkeypatch, answers)
        assert lines == others and len(first) == len(second) == 12
        assert all(torch.equal(x, y) for x, y in zip(weights, same, strict=True))
        for one, other in zip(first, second, strict=True):
            squares = sum(float((one[n] - other[n]).double().square().sum()) for n in one)
            worst = max(worst, squares**0.5 / plan.sensitivity)
    assert 0.01 < worst <= 1 + 1e-6
