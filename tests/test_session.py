"""The session against brute force, and the invariants that only the whole loop can keep."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from dpkfc.checkpoint import CheckpointError
from dpkfc.config import PrivacyConfig
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy import Budget, BudgetError
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.extra_releases import ExtraRelease
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.session import Session
from dpkfc.weights import digest_for_files, digest_weights
from dpkfc.weights_record import read_weights_record
from tests.mutation_cases import N, data, kfac, net, weights
from tests.recording import Heard
from tests.sessions import cross_entropy as loss_fn


def config(**settings):
    return PrivacyConfig(**{"expected_batch_size": 8, "steps": 6, "test_mode_seed": 3, **settings})


def plan(noise=0.0, **settings):
    return config(**settings).with_noise(noise, 1e-3, N)


def session(p, model, lr=0.1, dataset=None, **options):
    dataset = data() if dataset is None else dataset
    return Session(
        p, model, torch.optim.SGD(model.parameters(), lr, momentum=0.9), dataset, **options
    )


def train(s, steps=None, loss_fn=loss_fn):
    for done, batch in enumerate(s.batches(), 1):
        s.step(batch, loss_fn)
        if done == steps:
            break


def test_a_step_before_the_first_batch_is_refused():
    with (
        session(plan(1.0), net()) as s,
        pytest.raises(RuntimeError, match="once, in the order drawn"),
    ):
        s.step(None, loss_fn)  # type: ignore[arg-type]


def test_a_batch_may_be_neither_skipped_nor_used_twice():
    with session(plan(1.0), net()) as s:
        batches = s.batches()
        first = next(batches)
        with pytest.raises(RuntimeError, match="was not passed to session.step"):
            next(batches)
        batches = s.batches()
        first = next(batches)
        s.step(first, loss_fn)
        with pytest.raises(RuntimeError, match="once, in the order drawn"):
            s.step(first, loss_fn)


@pytest.mark.parametrize("what", ["a step", "the model"])
def test_in_inference_mode_is_refused_before_a_release(what):
    with torch.inference_mode(what == "the model"):
        model = net()
    with session(plan(1.0), model) as s:
        batch = next(s.batches())
        with torch.inference_mode(what == "a step"), pytest.raises(RuntimeError, match="outside"):
            s.step(batch, loss_fn)
        assert s.steps_done == 0


def test_beyond_the_budget_nothing_moves():
    model = net()
    with session(plan(1.0), model) as s:
        last = None
        for last in s.batches():
            s.step(last, loss_fn)
        before, epsilon = weights(model), s.epsilon
        with pytest.raises(BudgetExhausted, match="all 6 releases"):
            s.step(last, loss_fn)
        assert torch.equal(before, weights(model))
        assert s.epsilon == epsilon
        assert list(s.batches()) == []


def test_epsilon_while_training_is_a_bound_without_dp_accounting(monkeypatch):
    p = PrivacyConfig(expected_batch_size=8, steps=6).calibrate(2.0, 1e-3, N)
    slow = [p.epsilon(count) for count in range(7)]
    asked = set()
    exact = EpsilonCurve.epsilon
    monkeypatch.setattr(
        EpsilonCurve, "epsilon", lambda curve, count: asked.add(count) or exact(curve, count)
    )
    with session(p, net()) as s:
        quick = [s.epsilon for batch in s.batches() if s.step(batch, loss_fn)]
    assert asked <= {0, 6}
    assert quick == pytest.approx(slow[1:], rel=1e-3)
    assert quick == sorted(quick) and quick[-1] == slow[-1]


# -- resume ----


def build(folder, p):
    model = net()
    return session(p, model, ledger_path=folder / "ledger.jsonl"), model


def test_resume_never_continues_the_noise_stream(tmp_path):
    """Invariant 9: outside test mode two resumes of one checkpoint draw different noise."""
    p = PrivacyConfig(expected_batch_size=8, steps=6).with_noise(1.0, 1e-3, N)
    results = []
    s, _ = build(tmp_path, p)
    with s:
        train(s, 3)
        s.save(tmp_path / "checkpoint")
    stored = b"".join(f.read_bytes() for f in (tmp_path / "checkpoint").iterdir())
    assert b"philox" not in stored.lower()
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    for _ in range(2):
        (tmp_path / "ledger.jsonl").write_bytes(ledger)
        s, model = build(tmp_path, p)
        with s:
            s.restore(tmp_path / "checkpoint")
            train(s, 1)
        results.append(weights(model))
    assert not torch.allclose(results[0], results[1])


def test_checkpoints_that_do_not_belong_are_refused(tmp_path):
    p = plan(1.0)
    s, _ = build(tmp_path, p)
    with s:
        train(s, 2)
        s.save(tmp_path / "checkpoint")
    (tmp_path / "other").mkdir()
    s, _ = build(tmp_path / "other", plan(1.5))
    with s, pytest.raises(CheckpointError, match="belongs to plan"):
        s.restore(tmp_path / "checkpoint")
    (tmp_path / "empty").mkdir()
    s, model = build(tmp_path / "empty", p)
    before = weights(model)
    with s, pytest.raises(CheckpointError, match="ledger does not contain the 2 releases"):
        s.restore(tmp_path / "checkpoint")
    assert torch.equal(before, weights(model))
    with pytest.raises(LedgerError, match="plan"):
        build(tmp_path, plan(1.5))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    p = plan(1.0)
    s, _ = build(tmp_path, p)
    with s:
        train(s, 2)
        s.save(tmp_path / "checkpoint")
    wide = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    with session(p, wide, ledger_path=tmp_path / "ledger.jsonl") as s:
        with pytest.raises(CheckpointError, match=r"another model: '0.bias' is \(8,\).*\(9,\)"):
            s.restore(tmp_path / "checkpoint")


def test_checkpoints_hold_released_values_only(tmp_path):
    """Invariant 17: with enormous noise, nothing in a checkpoint correlates with the private
    data.
    """
    p = plan(1.0, preconditioner=kfac())
    s, _ = build(tmp_path, p)
    with s:
        train(s, 2)
        s.save(tmp_path / "checkpoint")
    names = {f.name for f in (tmp_path / "checkpoint").iterdir()}
    assert names == {
        "model.safetensors",
        "state.safetensors",
        "preconditioner.safetensors",
        "manifest.json",
    }
    meta = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["meta"]
    known = {
        "plan",
        "caveats",
        "step",
        "world_size",
        "ledger_count",
        "ledger_head",
        "optimizer",
        "preconditioner_step",
        "extra",
    }
    assert set(meta) - {"torch_rng"} == known


# -- bad input ----


def test_an_optimizer_of_other_parameters_is_refused():
    model = net()
    with pytest.raises(ValueError, match="does not hold trainable parameter '0.weight'"):
        Session(plan(), model, torch.optim.SGD(model[2].parameters(), 0.1), data())
    extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="not in the model"):
        Session(plan(), model, torch.optim.SGD([*model.parameters(), extra], 0.1), data())


def test_a_dataset_of_another_size_is_refused():
    model = net()
    with pytest.raises(ValueError, match="calibrated for 40 examples but the dataset has 30"):
        session(plan(), model, dataset=data(30))


@pytest.mark.parametrize(
    ("container", "how"),
    [
        (lambda x, y: list(x), "tensors of a list are columns: for records pass torch.stack"),
        (lambda x, y: tuple(x), "tensors of a tuple are columns: for records pass torch.stack"),
        (lambda x, y: [x.numpy(), y.numpy()], r"len\(dataset\) \(columns are a tuple of tensors"),
        (lambda x, y: (x, y.tolist()), r"len\(dataset\) \(columns are a tuple of tensors"),
    ],
)
def test_a_list_or_tuple_of_another_size_is_refused_with_how_it_is_read(container, how):
    with pytest.raises(ValueError, match=how) as refusal:
        session(plan(), net(), dataset=container(*data(40)))
    assert len(str(refusal.value)) <= 160


@pytest.mark.parametrize("lr", [0.0, 1e-30])
def test_a_rate_too_small_to_see_is_no_error(lr):
    with session(plan(1.0), net(), lr=lr) as s:
        train(s, 1)
        assert s.steps_done == 1


def test_an_optimizer_that_moves_nothing_is_noticed():
    """The most expensive injury of users of other libraries: the loss falls, ε accrues, the weights
    never move.
    """

    class Idle(torch.optim.SGD):
        def step(self, closure=None):
            return None

    model = net()
    with Session(plan(1.0), model, Idle(model.parameters(), 0.1), data()) as s:
        with pytest.raises(RuntimeError, match="did not move in the first step"):
            train(s, 1)


# -- what is said of a run without a guarantee ----


def test_epsilon_without_a_guarantee_warns_once():
    with session(plan(1.0, accountant="rdp"), net()) as s:
        train(s, 1)
        with pytest.warns(UserWarning, match=r"epsilon is not a guarantee of this run.*test mode"):
            assert s.epsilon > 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert s.epsilon > 0
            assert s.plan.epsilon() > s.epsilon
            s.plan.describe()
    with pytest.warns(UserWarning, match="UNCERTIFIED: shuffled batches"):
        plan(
            1.0, sampler="shuffle", uncertified=True, test_mode_seed=None, accountant="rdp"
        ).epsilon()


def test_epsilon_with_a_guarantee_or_without_any_noise_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(1.0, test_mode_seed=None, accountant="rdp").epsilon() > 0
        assert plan(0.0).epsilon() == float("inf")
        plan(1.0, accountant="rdp").describe()


def test_a_bound_of_another_word_is_refused():
    with pytest.raises(ValueError, match="'auto' or None, got 'all'"):
        config(max_physical_batch_size="all")


# -- a script that is run twice ----


def secure(steps=4, **settings):
    changed = {"test_mode_seed": None, "steps": steps, **settings}
    return config(**changed).with_noise(1.0, 1e-3, N)


def open_secure(folder, model=None, **how):
    folder.mkdir(exist_ok=True)
    return session(secure(), model or net(), ledger_path=folder / "ledger.jsonl", **how)


def finish(folder, steps=None):
    with open_secure(folder) as s:
        train(s, steps)
        s.save(folder / "checkpoint")
        return s.model


def test_a_finished_session_vouches_for_released_weights_alone(tmp_path):
    trained = finish(tmp_path)
    with open_secure(tmp_path, resume=True) as s:
        with pytest.raises(LedgerError, match="does not hold the weights of"):
            s.check_weights()
        with pytest.raises(LedgerError, match="holds no weights of"):
            s.save(tmp_path / "other")
        s.model.load_state_dict(trained.state_dict())
        s.check_weights()
    with open_secure(tmp_path, resume=True) as s:
        s.restore(tmp_path / "checkpoint")
        s.check_weights()
        s.model.load_state_dict(net().state_dict())
        with pytest.raises(RuntimeError, match="was written between two releases"):
            s.check_weights()
        with pytest.raises(RuntimeError, match="was written between two releases"):
            s.save(tmp_path / "other")


def test_a_checkpoint_of_initial_weights_is_no_release(tmp_path):
    with open_secure(tmp_path) as s:
        s.save(tmp_path / "checkpoint")
        train(s)
    (tmp_path / "ledger.weights.json").unlink()
    with open_secure(tmp_path, resume=True) as s:
        s.restore(tmp_path / "checkpoint")
        with pytest.raises(LedgerError, match="does not hold the weights of"):
            s.check_weights()
    assert not (tmp_path / "ledger.weights.json").exists()


# -- the digest of the weights ----


def test_the_record_describes_the_weights_and_their_average(tmp_path):
    p = secure(weight_average=WeightEMA(0.5))
    model = net()
    with session(p, model, ledger_path=tmp_path / "ledger.jsonl") as s:
        train(s)
        with s.averaged_weights():
            average = {name: x.clone() for name, x in model.state_dict().items()}
    record = read_weights_record(tmp_path / "ledger.jsonl")
    assert record is not None and record.releases == 4 and record.head == s.ledger.head
    assert record.describes(digest_for_files(model.state_dict()))
    assert record.describes(digest_for_files(average))
    assert not record.describes(digest_for_files(net().state_dict()))
    fewer = dict(list(average.items())[1:])
    assert not record.describes(digest_for_files(fewer))
    tied = {**average, "copy": average["0.weight"]}
    assert not record.describes(digest_for_files(tied))
    assert digest_weights(average) == digest_weights(dict(reversed(average.items())))
    assert digest_weights(average) != digest_weights(model.state_dict())


def test_changed_weights_leave_no_record(tmp_path):
    with open_secure(tmp_path) as s:
        train(s)
        s.model.load_state_dict(net().state_dict())
    assert not (tmp_path / "ledger.weights.json").exists()


def test_an_evaluation_of_older_weights_keeps_the_record(tmp_path):
    finish(tmp_path, 2)
    with open_secure(tmp_path) as s:
        s.restore(tmp_path / "checkpoint")
        train(s)
    before = (tmp_path / "ledger.weights.json").read_bytes()
    with open_secure(tmp_path, resume=True) as s:
        s.restore(tmp_path / "checkpoint")
    assert (tmp_path / "ledger.weights.json").read_bytes() == before


# -- a budget of the dataset ----


def test_a_session_charges_its_whole_plan_once(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=12.0, delta=1e-3)
    with open_secure(tmp_path, budget=ward) as s:
        assert s.ledger.count == 0 and s.receipt is None and not ward.charges
        train(s, 2)
        assert s.receipt is not None and s.receipt.before == 0.0
        assert s.receipt.after == pytest.approx(s.plan.epsilon())
        s.save(tmp_path / "checkpoint")
    with open_secure(tmp_path, budget=ward) as s:
        assert s.receipt is not None and s.receipt.before == 0.0
        s.restore(tmp_path / "checkpoint")
        train(s)
    assert len(ward.charges) == 1


def test_a_session_that_does_not_fit_leaves_nothing_behind(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=0.01, delta=1e-3)
    text = ward.path.read_text("utf-8")
    with pytest.raises(BudgetExhausted, match=r"ward\.toml has ε = 0.01 of 0.01 left"):
        open_secure(tmp_path, budget=ward)
    with pytest.raises(BudgetError, match="certified plans alone"):
        session(plan(1.0), net(), ledger_path=tmp_path / "ledger.jsonl", budget=ward)
    assert [x.name for x in tmp_path.iterdir() if x.suffix != ".lock"] == ["ward.toml"]
    assert ward.path.read_text("utf-8") == text


def mixes(model, batch):
    return loss_fn(model, batch) - loss_fn(model, batch).mean()


def test_a_loss_that_public_rows_refuse_charges_no_budget(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=12.0, delta=1e-3)
    with open_secure(tmp_path, budget=ward) as s:
        batch = next(s.batches())
        with pytest.raises(ValueError, match="mixes examples"):
            s.step(batch, mixes)
        assert not ward.charges
        s.step(batch, loss_fn)  # which the same session may correct
        assert len(ward.charges) == s.ledger.count == 1


def test_what_private_rows_may_decide_comes_after_the_charge(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=12.0, delta=1e-3)
    charges = Heard()

    def note(model, batch):
        charges.append(len(ward.charges))
        return loss_fn(model, batch)

    with open_secure(tmp_path, budget=ward, verify=False) as s:
        train(s, 1, note)
    assert charges and set(charges) == {1}


def test_a_release_beside_the_steps_comes_after_the_charge(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=30.0, delta=1e-3)
    kind = ExtraRelease(purpose="counts", noise_multiplier=1.0, norm=1.0)
    plan = secure(extra_releases=(kind,))
    with session(plan, net(), budget=ward) as s:
        with pytest.raises(ValueError, match="raise norm"):
            s.release_vector("counts", np.zeros(2), 2.0)
        assert not ward.charges
        s.release_vector("counts", np.zeros(2), 1.0)
        assert len(ward.charges) == s.ledger.count == 1
    with session(plan, net(), budget=ward) as s:
        s.forfeit_steps()
        assert len(ward.charges) == 2 and s.ledger.count == 5


def test_a_budget_that_another_run_spends_first_refuses_the_first_step(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=secure().epsilon() * 1.1, delta=1e-3)
    with open_secure(tmp_path / "a", budget=ward) as a, open_secure(tmp_path / "b") as b:
        ward.charge(b.plan, b.ledger)
        with pytest.raises(BudgetExhausted, match=r"ward\.toml has ε"):
            train(a)
        with pytest.raises(BudgetExhausted, match=r"ward\.toml has ε"):
            a.forfeit_steps()
        assert a.ledger.count == 0
