"""Private training in a Lightning Trainer: that its steps are the session's releases, whatever ends
or resumes the fit.
"""

import json

import pytest
import torch

pytest.importorskip("lightning.pytorch")
import lightning.pytorch as L
from torch.utils.data import DataLoader

from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.integrations.lightning import PrivateTraining
from dpkfc.privacy import Budget
from dpkfc.session import Session
from tests.integrations.lightning_cases import (
    Net,
    data,
    fit,
    plan_of,
    quiet,
    releases,
    trainer_of,
)
from tests.models import weights
from tests.recording import Heard
from tests.sessions import cross_entropy


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


# -- the private path really runs ------------------------------------------------------------------


@pytest.mark.quick("preconditioner1")
@pytest.mark.parametrize(
    "preconditioner", [None, KFAC(sides="both", probe=FeatureNoise(6), probe_size=16, every=3)]
)
def test_the_updates_are_the_releases_of_a_session(preconditioner, tmp_path):
    plan = plan_of(0.7, test_mode_seed=5, preconditioner=preconditioner, max_physical_batch_size=5)
    trainer, mine, _ = fit(tmp_path, plan=plan)
    theirs = Net()
    configured = theirs.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    with Session(plan, theirs, optimizer, data().tensors) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
            schedule.step()
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-6, atol=1e-8)
    assert trainer.global_step == releases(tmp_path) == mine.grads == 7
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.9**7)
    assert max(n for training, n in mine.seen if training) <= 5


def test_a_loss_that_public_rows_refuse_charges_no_budget(tmp_path):
    class Mixing(Net):
        def per_example_loss(self, batch):
            losses = super().per_example_loss(batch)
            return losses - losses.mean()

    ward = Budget(tmp_path / "ward.toml", epsilon=50.0, delta=1e-3)
    for module in (Mixing(), Net()):
        private = PrivateTraining(plan_of(), data(), budget=ward)
        if isinstance(module, Mixing):
            with pytest.raises(ValueError, match="mixes examples"):
                trainer_of(tmp_path, private).fit(module)
            assert not ward.charges
        else:
            trainer_of(tmp_path, private).fit(module)
    assert len(ward.charges) == 1


def test_epsilon_is_logged_and_the_module_is_left_as_it_was(tmp_path):
    names = list(Net().state_dict())
    trainer, module, private = fit(tmp_path, log_every_n_steps=3)
    assert trainer.callback_metrics["epsilon"] == pytest.approx(private.plan.epsilon())
    assert "val_loss" in trainer.callback_metrics
    assert not any("train" in name or name == "loss" for name in trainer.callback_metrics)
    summary = json.loads((tmp_path / "privacy.json").read_text())
    assert summary["spent"]["epsilon"] == private.plan.epsilon()
    assert summary["ledger"]["releases"] == 7
    assert summary["not_private"] == ["val_loss: logged by the module, not covered by the plan"]
    assert list(module.state_dict()) == names
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


@pytest.mark.parametrize(
    "interval, frequency, stepped", [("epoch", 1, 2), ("epoch", 2, 1), ("step", 3, 4)]
)
def test_schedules_are_stepped_at_their_interval(interval, frequency, stepped, tmp_path):
    class Scheduled(Net):
        def configure_optimizers(self):
            configured = super().configure_optimizers()
            configured["lr_scheduler"] |= {"interval": interval, "frequency": frequency}
            return configured

    # passes of five releases, and two more
    trainer, _, _ = fit(tmp_path, Scheduled(), plan_of(steps=12))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == stepped


class Logging(Net):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def per_example_loss(self, batch):
        losses = super().per_example_loss(batch)
        self.log(self.name, losses.mean(), batch_size=1)
        return losses


def test_a_private_loss_is_logged_only_under_a_name_that_says_so(tmp_path):
    """In batches of one size: the mean of an empty batch is not a number."""
    with pytest.raises(
        ValueError, match=r"logs 'train_loss'.*call it 'train_loss \(NOT private\)'"
    ):
        fit(tmp_path / "plain", Logging("train_loss"), plan_of(sampler="fixed"))
    assert releases(tmp_path / "plain") == 0
    trainer, _, _ = fit(
        tmp_path, Logging("train_loss (NOT private)"), plan_of(10.0, sampler="fixed")
    )
    assert trainer.callback_metrics["train_loss (NOT private)"] > 0
    assert (
        "train_loss (NOT private)"
        in json.loads((tmp_path / "privacy.json").read_text())["not_private"]
    )


class AtTheEnd(Net):
    """Fills a meter where the loss is made, and logs it when the epoch has ended."""

    def __init__(self, name):
        super().__init__()
        self.name, self.meter = name, Heard()

    def per_example_loss(self, batch):
        losses = super().per_example_loss(batch)
        self.meter.append(losses.mean().item())
        return losses

    def on_train_epoch_end(self):
        self.log(self.name, sum(self.meter) / len(self.meter))


def test_what_hooks_of_the_training_log_is_marked(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"'meter' is logged while training.*'meter \(NOT private\)', or 'meter \(public\)'",
    ):
        fit(tmp_path / "plain", AtTheEnd("meter"), plan_of())
    for name, is_private in (("meter (NOT private)", True), ("rate (public)", False)):
        trainer, _, _ = fit(tmp_path / name, AtTheEnd(name), plan_of())
        assert name in trainer.callback_metrics
        assert (
            name in json.loads((tmp_path / name / "privacy.json").read_text())["not_private"]
        ) == is_private


# -- what ends a fit -------------------------------------------------------------------------------


class Fails(L.Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    "settings, done",
    [
        ({"max_steps": 3}, 3),
        ({"max_epochs": 2, "limit_train_batches": 2}, 4),
        ({"max_steps": 100}, 7),
        ({"callbacks": [L.callbacks.EarlyStopping("val_loss", patience=1, min_delta=99.0)]}, 7),
        ({"fast_dev_run": 2}, 2),
        ({"min_steps": 4, "max_steps": 6}, 6),
    ],
)
def test_only_whole_logical_batches_are_spent(settings, done, tmp_path):
    trainer, module, _ = fit(tmp_path, **settings)
    assert trainer.global_step == releases(tmp_path) == module.grads == done


def test_an_early_end_costs_the_whole_plan(tmp_path):
    """Releases may have decided it, and ε of fewer steps would be too small."""
    early = L.callbacks.EarlyStopping("val_loss", patience=1, min_delta=99.0)
    trainer, _, private = fit(tmp_path, callbacks=[early], limit_train_batches=1)
    assert trainer.global_step == 2
    assert releases(tmp_path) == 7
    assert private.session.epsilon == private.plan.epsilon(7)


def test_an_exception_leaves_a_right_ledger_and_no_gradient(tmp_path):
    """What the model raises on a private batch does not end a fit, since a record may cause it."""
    module = Net()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module, plan_of(sampler="fixed"), callbacks=[Fails(at=3)])
    assert releases(tmp_path) == 3
    assert all(p.grad is None for p in module.parameters())

    class Breaks(Net):
        def per_example_loss(self, batch):
            if self.grads == 2:
                raise error
            return super().per_example_loss(batch)

    error = KeyError()
    trainer, *_ = fit(tmp_path / "goes on", Breaks(), plan_of(sampler="fixed"))
    assert trainer.global_step == releases(tmp_path / "goes on") == 7
    # Its owner ends it.
    error, module = SystemExit(), Breaks()
    with pytest.raises(SystemExit):
        fit(tmp_path / "inside", module, plan_of(sampler="fixed"))
    assert releases(tmp_path / "inside") == 2
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.quick("preconditioner1")
@pytest.mark.parametrize(
    "preconditioner", [None, KFAC(sides="both", probe=FeatureNoise(6), probe_size=16, every=3)]
)
def test_a_checkpoint_continues_the_run(preconditioner, tmp_path):
    plan = plan_of(0.5, test_mode_seed=2, preconditioner=preconditioner)
    _, whole, _ = fit(tmp_path / "whole", plan=plan)
    folder = tmp_path / "cut"
    trainer, _, _ = fit(folder, plan=plan, max_steps=4)
    trainer.save_checkpoint(folder / "at4.ckpt")
    with pytest.raises(ValueError, match="holds 4 releases of an earlier run"):
        fit(folder, plan=plan)
    trainer, module, _ = fit(folder, plan=plan, ckpt_path=folder / "at4.ckpt")
    assert trainer.global_step == releases(folder) == 7
    torch.testing.assert_close(weights(module), weights(whole), rtol=1e-6, atol=1e-8)
    with pytest.raises(RuntimeError, match="does not contain"):
        fit(tmp_path / "other", plan=plan, ckpt_path=folder / "at4.ckpt")


def test_a_second_fit_does_not_spend_a_second_budget(tmp_path):
    private, module = PrivateTraining(plan_of(), data()), Net()
    trainer_of(tmp_path, private).fit(module)
    before = weights(module)
    with pytest.raises(ValueError, match="7 releases in an earlier fit.*ledger_path"):
        trainer_of(tmp_path, private).fit(module)
    assert torch.equal(weights(module), before)


def test_only_the_checkpoint_of_a_private_fit_is_continued(tmp_path):
    trainer, _, _ = fit(tmp_path / "a", max_steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=False)
    torch.save(
        {name: x for name, x in content.items() if name != "dpkfc_session"}, tmp_path / "plain.ckpt"
    )
    with pytest.raises(ValueError, match="not written by a private fit"):
        fit(tmp_path / "b", ckpt_path=tmp_path / "plain.ckpt")
    private = PrivateTraining(plan_of(), data(), ledger_path=tmp_path / "ledger.jsonl")
    trainer, module = trainer_of(tmp_path, private), Net()
    # is no resume of the next fit
    trainer.validate(module, DataLoader(data(12), 6), ckpt_path=tmp_path / "a.ckpt")
    trainer.fit(module)
    assert releases(tmp_path) == 7
