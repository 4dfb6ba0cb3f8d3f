"""Stop in the middle of a batch: nothing of it is in the next release, and the ledger is right.

Opacus scripts that are interrupted are in `tests/integrations`.
"""

import gc
import weakref
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.privacy.ledger import verify
from dpkfc.session import Session
from tests.recording import Heard
from tests.test_session import data, kfac, loss_fn, plan, weights


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)).double()
    model.register_buffer("kept", torch.arange(3.0))
    return model


def open_session(model, **settings):
    p = plan(1.0, **{"max_physical_batch_size": 2, **settings})
    return Session(p, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), data())


def finish(session):
    torch.manual_seed(5)  # for dropout
    for batch in session.batches():
        session.step(batch, loss_fn)


def assert_clean(model):
    """Nothing on the model is other than before the loop, and nothing private hangs on it."""
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(
        not m._forward_hooks and not m._forward_pre_hooks and m.training for m in model.modules()
    )
    assert torch.equal(model.get_buffer("kept"), torch.arange(3.0))


class Interrupted:
    """A loss function that is interrupted at its n-th call from now on."""

    def __init__(self, at, error):
        self.calls, self.at, self.error = Heard(), at, error

    def __call__(self, model, batch):
        self.calls.append(None)
        losses = loss_fn(model, batch)
        if len(self.calls) == self.at:
            raise self.error
        return losses


# -- a session -------------------------------------------------------------------------------------


# A loss that fails on the first public rows leaves the check out with a warning, so errors begin at
# its later calls.
INTERRUPTIONS = [(at, KeyboardInterrupt) for at in (1, 2, 4, 6, 8, 10, 11)]
INTERRUPTIONS += [(at, ZeroDivisionError) for at in (4, 6, 8, 10, 11)]


@pytest.mark.quick("2-Key*", "11-Zero*")
@pytest.mark.parametrize(("at", "error"), INTERRUPTIONS)
def test_interrupted_anywhere_in_verification_or_in_a_batch(at, error):
    """The first calls are the check of the first step; then micro-batches."""
    model = net()
    with open_session(model, expected_batch_size=16, preconditioner=kfac()) as session:
        before = weights(model)
        with pytest.raises(error):
            session.step(next(session.batches()), Interrupted(at, error))
        assert session.ledger.count == 0 and session.epsilon == 0
        assert not session.optimizer.state
        assert torch.equal(weights(model), before)
        assert_clean(model)
        finish(session)
        assert session.ledger.count == session.plan.steps
    assert torch.equal(weights(model), train_uninterrupted())


@cache
def train_uninterrupted():
    model = net()
    with open_session(model, expected_batch_size=16, preconditioner=kfac()) as session:
        finish(session)
    return weights(model)


@pytest.mark.quick("break", "close")
@pytest.mark.parametrize("way", ["break", "close", "drop", "second loop"])
def test_a_batch_that_was_drawn_and_left_is_drawn_again(way):
    """Test mode shows it: the run goes on as if the loop had not been left."""
    model, clean = net(), net()
    with open_session(clean) as session:
        finish(session)
    with open_session(model) as session:
        torch.manual_seed(5)
        first = session.batches()
        session.step(next(first), loss_fn)
        state, left = torch.get_rng_state(), next(first)
        if way == "close":
            first.close()
        elif way == "drop":
            del first
            gc.collect()
        second = session.batches()
        again = next(second)
        assert np.array_equal(left.rows, again.rows) and session.ledger.count == 1
        if way == "second loop":
            with pytest.raises(RuntimeError, match="was not passed to session.step"):
                next(first)
        torch.set_rng_state(state)
        session.step(again, loss_fn)
        with pytest.raises(RuntimeError, match="once, in the order drawn"):
            session.step(left if left is not again else again, loss_fn)
        for batch in second:
            session.step(batch, loss_fn)
        assert session.ledger.count == session.plan.steps
        assert_clean(model)
    assert torch.equal(weights(model), weights(clean))


class Stumbling(torch.optim.SGD):
    """Is interrupted once, after the release and before the weights move."""

    stumble = True

    def step(self, closure=None):
        if self.stumble:
            self.stumble = False
            assert all(p.grad is not None for group in self.param_groups for p in group["params"])
            raise KeyboardInterrupt
        super().step()


def test_interrupted_after_the_release_it_is_charged_and_its_step_is_another_release(tmp_path):
    model = net()
    p = PrivacyConfig(expected_batch_size=8, steps=4).with_noise(1.0, 1e-3, 40)
    path = tmp_path / "ledger.jsonl"
    with Session(p, model, Stumbling(model.parameters(), 0.1), data(), ledger_path=path) as session:
        before = weights(model)
        with pytest.raises(KeyboardInterrupt):
            session.step(next(session.batches()), loss_fn)
        assert session.ledger.count == 1  # it existed: it stays charged
        assert torch.equal(weights(model), before)
        assert_clean(model)
        assert sum(1 for batch in session.batches() if session.step(batch, loss_fn)) == 3
    assert len(verify(path).releases) == 4


def test_an_exception_keeps_no_private_tensor_alive():
    """What holds the gradients of the batch is gone as soon as the exception is."""
    model, alive = net(), Heard()

    def fail(model, batch):
        losses = loss_fn(model, batch)
        if len(alive) == 12:
            raise ZeroDivisionError
        alive.append(weakref.ref(losses))
        return losses

    with open_session(model, expected_batch_size=24) as session:
        with pytest.raises(ZeroDivisionError):
            session.step(next(session.batches()), fail)
        gc.collect()
        assert len(alive) == 12 and all(ref() is None for ref in alive)


# -- the Trainer -----------------------------------------------------------------------------------


@pytest.mark.quick("KeyboardInterrupt")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_trainer_that_is_interrupted_in_the_middle_of_a_batch(error, tmp_path):
    pytest.importorskip("transformers")
    from dpkfc.integrations.huggingface import PrivateTrainer, per_example_cross_entropy
    from tests.integrations import hf_cases

    model = hf_cases.model_of("sequence")
    p = hf_cases.plan_of(max_physical_batch_size=4)
    second = Heard()  # rows of the micro-batches of the second logical batch

    def loss(model, inputs):
        losses = per_example_cross_entropy(
            model(**{k: x for k, x in inputs.items() if k != "labels"}).logits, inputs["labels"]
        )
        if trainer.state.global_step == 1:
            second.append(len(losses))
            if len(second) == 2:
                raise error
        return losses

    trainer = PrivateTrainer(
        model,
        hf_cases.arguments(tmp_path),
        plan=p,
        per_example_loss=loss,
        train_dataset=hf_cases.examples("sequence"),
        data_collator=hf_cases.pad,
    )
    with pytest.raises(error):
        trainer.train()
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 1
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert len(second) == 2 and not trainer.is_in_train
