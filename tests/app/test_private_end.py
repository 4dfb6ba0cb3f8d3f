"""A run that charged, noisy evaluations on held-out private examples end early."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.app.finished import read_card

pytest.importorskip("sklearn")

from dpkfc import PrivacyConfig, Session
from dpkfc.app import training_loop
from dpkfc.app.folder_findings import card_finding, ledger_finding
from dpkfc.app.metrics import Metrics
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import read_settings, resume, run
from dpkfc.early_stopping import PrivateEarlyStopping, wrong_answers
from dpkfc.privacy.accounting import event_from_dict, total_epsilon
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.ledger import BudgetExhausted, verify
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.report.verify import verify_ledger

PRIVATE = {
    "recipe": "digits",
    "method": "dp-sgd",
    "steps": 9,
    "evaluate_every": 2,
    "epsilon": 3.0,
    "accountant": "rdp",
    "validation_size": 60,
    "stop_on": "private-loss",
    "patience": 4,
}
KIND = ExtraRelease(purpose="evaluation", noise_multiplier=5.0, norm=1.0, count=2)


def _kinds(folder):
    return [line.get("purpose", "step") for line in verify(folder / "ledger.jsonl").releases]


def _epsilon_of_ledger(folder):
    lines = verify(folder / "ledger.jsonl").releases
    return total_epsilon([(event_from_dict(line["event"]), 1) for line in lines], 1e-5, "rdp")


# -- the sum ---------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Adds what it has seen to what follows, also in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += x.sum()
        return x * self.weight + self.seen


class RememberingInAttribute(nn.Module):
    """Adds what it has seen before, in an attribute."""

    def __init__(self):
        super().__init__()
        self.seen = 0.0

    def forward(self, x):
        self.seen = self.seen + float(x.sum())
        return x + self.seen


def _column_loss(model, batch):
    return model(batch[0])[:, 0]


ODD = [math.nan, math.inf, -math.inf, -3.0, 0.0, 0.5, 1.9999, 2.0, 7.0, 1e30, 1e-30]


def _remembering_loss():
    """Return a loss that adds what it has seen before."""
    seen = [0.0]

    def loss(model, batch):
        seen[0] += float(batch[0].sum())
        return _column_loss(model, batch) + seen[0]

    return loss


@pytest.mark.quick("model0-*", "model3-*")
@pytest.mark.parametrize(
    "model, loss",
    [
        (nn.Identity(), _column_loss),
        (Remembering(), _column_loss),
        (RememberingInAttribute(), _column_loss),
        (nn.Identity(), _remembering_loss()),
    ],
)
def test_one_held_out_record_moves_the_sum_by_at_most_one(model, loss):
    values = torch.tensor([*ODD, ODD[0], ODD[5]]).view(-1, 1)

    def total(rows):
        held_out = PrivateEarlyStopping(1, on=(values[rows],), most=2.0)
        return held_out.total(model, loss)

    every = list(range(len(values)))
    whole = total(every)
    alone = [total([row]) for row in every]
    assert whole == sum(alone), "an example changed what another one adds"
    for row in every:
        without = total([other for other in every if other != row])
        assert abs(whole - without) <= 1.0
        for other in every:
            moved = [*every[:row], other, *every[row + 1 :]]
            assert abs(whole - total(moved)) <= 1.0
    assert max(alone) == 1.0 and min(alone) == 0.0


def test_errors_count_zero_or_one():
    model = nn.Identity()
    inputs, labels = torch.eye(4)[[0, 1, 2, 3]], torch.tensor([0, 1, 1, 1])
    assert wrong_answers(model, (inputs, labels)).tolist() == [0, 0, 1, 1]
    stopping = PrivateEarlyStopping(1, on=(inputs, labels), most=1.0)
    assert stopping.total(model, wrong_answers) == 2.0
    model.train()
    stopping.total(model, wrong_answers)
    assert model.training


@pytest.mark.parametrize(
    "change", [{"most": 0.0}, {"most": math.nan}, {"patience": 0}, {"on": (torch.zeros(0, 2),)}]
)
def test_bounds_and_examples_are_checked(change):
    with pytest.raises(ValueError):
        PrivateEarlyStopping(**{"patience": 1, "on": (torch.zeros(2, 1),), "most": 1.0, **change})


# -- a session -------------------------------------------------------------------------------------


def _session(tmp_path, *kinds, **more):
    model = nn.Linear(3, 2)
    plan = PrivacyConfig(
        expected_batch_size=10, steps=4, accountant="rdp", extra_releases=kinds, **more
    ).calibrate(3.0, 1e-5, 100)
    data = (torch.randn(100, 3), torch.randint(2, (100,)))
    return Session(
        plan,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        ledger_path=tmp_path / "ledger.jsonl",
    )


HELD_OUT = (torch.randn(50, 3), torch.randint(2, (50,)))


def test_every_evaluation_is_charged_before_it_is_released(tmp_path, monkeypatch):
    session = _session(tmp_path, KIND)
    stopping = PrivateEarlyStopping(1, on=HELD_OUT, most=2.0)
    seen = []
    draw = type(session.plan.noise_stream()).normal

    def watch(stream, size, step, dtype=np.float32):
        seen.append(_kinds(tmp_path)[-1])
        return draw(stream, size, step, dtype)

    with session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
            if batch.step < 2:
                monkeypatch.setattr("dpkfc.privacy.rng.NoiseStream.normal", watch)
                stopping.loss(session, cross_entropy)
                monkeypatch.undo()
        assert seen == ["evaluation", "evaluation"]
        with pytest.raises(BudgetExhausted, match="2 releases for evaluation"):
            stopping.loss(session, cross_entropy)
        expected = ["step", "evaluation", "step", "evaluation", "step", "step"]
        assert _kinds(tmp_path) == expected
        assert session.steps_done == 4
        assert session.epsilon == pytest.approx(_epsilon_of_ledger(tmp_path))
        assert session.epsilon == session.plan.epsilon() <= 3.0


def test_a_closed_or_damaged_ledger_releases_nothing(tmp_path, monkeypatch):
    session = _session(tmp_path, KIND)
    stopping = PrivateEarlyStopping(1, on=HELD_OUT, most=2.0)
    drawn = []
    monkeypatch.setattr(
        "dpkfc.privacy.rng.NoiseStream.normal", lambda *given: drawn.append(given) or 1 / 0
    )
    (tmp_path / "ledger.jsonl").write_text("forged")
    with pytest.raises(LedgerError):
        stopping.loss(session, cross_entropy)
    session.close()
    with pytest.raises(LedgerError):
        stopping.loss(session, cross_entropy)
    assert not drawn


def test_a_plan_must_allow_evaluations_of_single_examples(tmp_path):
    stopping = PrivateEarlyStopping(1, on=HELD_OUT, most=2.0)
    small = ExtraRelease(purpose="evaluation", noise_multiplier=5.0, norm=0.5)
    for number, (kinds, message) in enumerate([((), "no releases"), ((small,), "raise norm")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with _session(folder, *kinds) as session, pytest.raises(ValueError, match=message):
            stopping.loss(session, cross_entropy)
        assert not _kinds(folder)


def test_forfeited_steps_forfeit_evaluations(tmp_path):
    with _session(tmp_path, KIND) as session:
        session.step(next(session.batches()), cross_entropy)
        session.forfeit_steps()
        assert (session.ledger.steps, session.ledger.extra) == (4, {"evaluation": 2})
        assert session.epsilon == pytest.approx(session.plan.epsilon())


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.quick("private-error")
@pytest.mark.parametrize("stop_on", ["private-loss", "private-error"])
def test_a_run_evaluates_as_often_as_planned(tmp_path, stop_on):
    out = tmp_path / "run"
    result = run(run_config({**PRIVATE, "stop_on": stop_on, "out": str(out)}))
    rows = Metrics.read(out / "metrics.parquet").rows
    released = [row.step for row in rows if row.noisy_loss is not None]
    card = read_card(out)
    assert card["guarantee"]["epsilon"] == pytest.approx(_epsilon_of_ledger(out))
    assert result.epsilon == pytest.approx(card["guarantee"]["epsilon"])
    assert 2.9 < result.epsilon <= 3.0
    assert _kinds(out).count("evaluation") == 4 and _kinds(out).count("step") == 9
    assert set(released) <= {2, 4, 6, 8}
    public = card["assumed_public"]["evaluations that may end the run"]
    assert "as if each example" in public["why"] and "60 held-out" in public["value"]
    assert verify_ledger(out / "ledger.jsonl")["releases"] == 13
    plan = prepare(read_settings(RunFolder.locate(out))).plan
    assert ledger_finding(out / "ledger.jsonl", plan).passed
    assert card_finding(out / "ledger.jsonl", plan, "cpu").passed


def test_an_early_end_charges_the_whole_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateEarlyStopping, "is_over", lambda stopping, losses: len(losses) == 2)
    out = tmp_path / "run"
    run(run_config({**PRIVATE, "out": str(out)}))
    rows = Metrics.read(out / "metrics.parquet").rows
    assert rows[-1].step == 4 and rows[-1].noisy_loss is not None
    assert _kinds(out).count("evaluation") == 4 and _kinds(out).count("step") == 9
    card = read_card(out)
    assert rows[-1].epsilon == pytest.approx(card["guarantee"]["epsilon"])
    assert "by the noisy evaluations" in card["hyper_parameters"]["early end"]
    with pytest.raises(ConfigError, match="complete"):
        resume(out)


def test_a_resumed_run_stays_within_its_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateEarlyStopping, "is_over", lambda stopping, losses: False)
    out = tmp_path / "run"

    def crash(*given):
        raise KeyError

    def end(loop, row):
        if row.step == 4:
            # The process dies behind the release of step 4, before a checkpoint.
            monkeypatch.setattr(training_loop.TrainingLoop, "_save", crash)
        return True

    original = training_loop.TrainingLoop._release_loss

    def release(loop, row):
        found = original(loop, row)
        end(loop, row)
        return found

    monkeypatch.setattr(training_loop.TrainingLoop, "_release_loss", release)
    with pytest.raises(KeyError):
        run(run_config({**PRIVATE, "out": str(out)}))
    assert _kinds(out).count("evaluation") == 2
    monkeypatch.undo()
    monkeypatch.setattr(PrivateEarlyStopping, "is_over", lambda stopping, losses: False)
    resume(out)
    assert _kinds(out).count("evaluation") <= 4 and _kinds(out).count("step") == 9
    card = read_card(out)
    assert card["guarantee"]["epsilon"] == pytest.approx(_epsilon_of_ledger(out))
    assert card["guarantee"]["epsilon"] <= 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"patience": 0},
        {"validation_size": 0},
        {"evaluate_every": 0},
        {"noise_multiplier": 1.0},
        {"public_validation": "file.safetensors"},
        {"stop_share": 0.95},
        {"stop_on": "test"},
    ],
)
def test_settings_that_do_not_go_together(change):
    with pytest.raises(ConfigError):
        prepare(run_config({**PRIVATE, **change}))


def test_no_evaluation_within_the_steps_is_one_error():
    with pytest.raises(ConfigError, match="leaves no evaluation"):
        prepare(run_config({**PRIVATE, "evaluate_every": 9}))
    with pytest.raises(ConfigError, match="add up with sampler"):
        prepare(run_config({**PRIVATE, "sampler": "fixed"}))
