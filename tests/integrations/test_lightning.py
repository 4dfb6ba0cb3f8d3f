"""Private training in a Lightning Trainer: that its steps are the session's releases, whatever ends or resumes the fit."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch")
import lightning.pytorch as L

from dpkfc.config import PrivacyConfig
from dpkfc.curvature.preconditioner import KFAC
from dpkfc.curvature.probes import FeatureNoise
from dpkfc.integrations.lightning import PrivateModule, PrivateTraining
from dpkfc.privacy.ledger import verify
from dpkfc.session import Session

N, B = 40, 8


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*no guarantee of this run")
        yield


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))


class Net(PrivateModule):
    def __init__(self, dropout: float = 0.0, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.momentum = lr, momentum
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.seen, self.grads = [], 0

    def forward(self, x):
        return self.layers(x)

    def per_example_loss(self, batch):
        self.seen.append((self.training, len(batch[0])))
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer):
        self.grads += all(p.grad is not None for p in self.parameters())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def plan_of(noise: float = 1.0, steps: int = 7, **settings):
    chosen = {"expected_batch_size": B, "steps": steps, "accountant": "rdp", **settings}
    return PrivacyConfig(**chosen).with_noise(noise, 1e-3, N)


def trainer_of(folder, private: PrivateTraining | None, *others, **settings):
    chosen = {"max_epochs": -1, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    chosen |= {"logger": False, "enable_checkpointing": False, "default_root_dir": folder}
    return L.Trainer(callbacks=[*([private] if private else []), *others], **{**chosen, **settings})


def fit(folder, module=None, plan=None, callbacks=(), dataset=None, ckpt_path=None, **settings):
    """(trainer, module, callback) after a fit with a ledger in the folder."""
    module = module or Net()
    folder.mkdir(exist_ok=True)
    private = PrivateTraining(plan or plan_of(), dataset or data(), ledger_path=folder / "ledger.jsonl")
    trainer = trainer_of(folder, private, *callbacks, **settings)
    trainer.fit(module, val_dataloaders=DataLoader(data(12), 6), ckpt_path=ckpt_path)
    return trainer, module, private


def releases(folder) -> int:
    return len(verify(folder / "ledger.jsonl").releases)


def weights(module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


# -- the private path really runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", [None, KFAC(probe=FeatureNoise(6), probe_size=16, every=3)])
def test_the_updates_are_the_releases_of_a_session(preconditioner, tmp_path) -> None:
    plan = plan_of(0.7, test_mode_seed=5, preconditioner=preconditioner, max_physical_batch_size=3)
    trainer, mine, _ = fit(tmp_path, plan=plan)
    theirs = Net()
    [optimizer], [schedule] = theirs.configure_optimizers()
    with Session(plan, theirs, optimizer, data().tensors) as session:
        for batch in session.batches():
            session.step(batch, lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="none"))
            schedule.step()
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-6, atol=1e-8)
    assert trainer.global_step == releases(tmp_path) == mine.grads == 7
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.9**7)
    assert max(n for training, n in mine.seen if training) <= 3


def test_enormous_noise_destroys_the_model(tmp_path) -> None:
    _, module, _ = fit(tmp_path, plan=plan_of(1e6))
    assert weights(module).norm() > 1e4


def test_epsilon_is_logged_and_the_module_is_left_as_it_was(tmp_path) -> None:
    names = list(Net().state_dict())
    trainer, module, private = fit(tmp_path, log_every_n_steps=3)
    assert trainer.callback_metrics["epsilon"] == pytest.approx(private.plan.epsilon())
    assert "val_loss" in trainer.callback_metrics
    assert not any("train" in name or name == "loss" for name in trainer.callback_metrics)
    assert list(module.state_dict()) == names
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


# -- what ends a fit --------------------------------------------------------------------------------------------------


class Fails(L.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("settings", "done"),
    [
        ({"max_steps": 3}, 3),
        ({"max_epochs": 1}, 5),
        ({"max_epochs": 2, "limit_train_batches": 2}, 4),
        ({"max_epochs": 1, "limit_train_batches": 0.4}, 2),
        ({"max_steps": 100}, 7),
        ({"callbacks": [L.callbacks.EarlyStopping("val_loss", patience=1, min_delta=99.0)]}, 7),
        ({"callbacks": [L.callbacks.EarlyStopping("val_loss", patience=1, min_delta=99.0)], "limit_train_batches": 1}, 2),
        ({"fast_dev_run": 2}, 2),
    ],
)
def test_only_whole_logical_batches_are_spent(settings, done: int, tmp_path) -> None:
    trainer, module, _ = fit(tmp_path, **settings)
    assert trainer.global_step == releases(tmp_path) == module.grads == done


def test_an_exception_leaves_a_right_ledger_and_no_gradient(tmp_path) -> None:
    module = Net()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module, callbacks=[Fails(at=3)])
    assert releases(tmp_path) == 3
    assert all(p.grad is None for p in module.parameters())

    class Breaks(Net):
        def per_example_loss(self, batch):
            if self.grads == 2:
                raise KeyError
            return super().per_example_loss(batch)

    module = Breaks()
    with pytest.raises(KeyError):
        fit(tmp_path / "inside", module)
    assert releases(tmp_path / "inside") == 2
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("preconditioner", [None, KFAC(probe=FeatureNoise(6), probe_size=16, every=3)])
def test_a_checkpoint_continues_the_run(preconditioner, tmp_path) -> None:
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


def test_releases_that_a_checkpoint_does_not_know_stay_charged(tmp_path) -> None:
    saved = L.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[saved, Fails(at=3)], enable_checkpointing=True)
    trainer, _, _ = fit(tmp_path, ckpt_path=tmp_path / "step=2.ckpt")
    assert releases(tmp_path) == 7
    assert trainer.global_step == 6


# -- what is refused --------------------------------------------------------------------------------------------------


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch, _):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Empty(PrivateModule):
    def configure_optimizers(self):
        return torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)


class Two(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.layers[0], self.layers[3])]


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class Automatic(Net):
    def setup(self, stage):
        self.automatic_optimization = True


def automatic():
    module = Net()
    module.automatic_optimization = True
    return module


class Mixing(Net):
    def forward(self, x):
        return self.layers(x - x.mean(0))


class BatchMean(Net):
    def per_example_loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("build", "settings", "match"),
    [
        (Plain, {}, "Plain has a training_step of its own.*PrivateModule"),
        (Empty, {}, "does not define per_example_loss"),
        (automatic, {}, "would step the optimizer without noise"),
        (Two, {}, "one optimizer of all trainable parameters"),
        (Plateau, {}, "stepped on releases"),
        (Mixing, {}, "mixes examples"),
        (BatchMean, {}, "one loss per example"),
        (Net, {"overfit_batches": 1}, "overfit_batches replaces the sampler"),
        (Net, {"gradient_clip_val": 1.0}, "clipping is not supported for manual"),
        (Net, {"accumulate_grad_batches": 2}, "accumulation is not supported for manual"),
    ],
)
def test_what_would_train_otherwise_is_refused_before_anything_is_spent(build, settings, match: str, tmp_path) -> None:
    module = build()
    before = weights(module) if list(module.parameters()) else None
    with pytest.raises(Exception, match=match):
        fit(tmp_path, module, **settings)
    assert not (tmp_path / "ledger.jsonl").exists() or releases(tmp_path) == 0
    assert before is None or torch.equal(weights(module), before)


def test_automatic_optimization_switched_on_later_steps_nothing(tmp_path) -> None:
    """Whatever the module does, the optimizer does not move without a release."""
    module = Automatic()
    before = weights(module)
    with pytest.raises(RuntimeError, match="without a release of the session"):
        fit(tmp_path, module)
    assert torch.equal(weights(module), before)
    assert releases(tmp_path) == 0


def test_a_private_module_without_the_callback_does_not_train(tmp_path) -> None:
    module = Net()
    before = weights(module)
    with pytest.raises(RuntimeError, match="add PrivateTraining"):
        trainer_of(tmp_path, None).fit(module)
    assert torch.equal(weights(module), before)


def test_a_loader_of_the_users_own_is_refused(tmp_path) -> None:
    module = Net()
    with pytest.raises(ValueError, match="without train_dataloaders"):
        trainer_of(tmp_path, PrivateTraining(plan_of(), data())).fit(module, DataLoader(data(), 8))


def test_a_step_of_the_users_own_is_refused(tmp_path) -> None:
    class Own(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            F.cross_entropy(module(data().tensors[0]), data().tensors[1]).backward()
            self.before = weights(module)
            module.optimizers().step()

    own, module = Own(), Net()
    with pytest.raises(RuntimeError, match="without a release of the session"):
        fit(tmp_path, module, callbacks=[own])
    assert torch.equal(weights(module), own.before)


@pytest.mark.parametrize("name", ["training_step", "train_dataloader"])
def test_a_private_module_may_not_define_its_own_training(name: str) -> None:
    with pytest.raises(TypeError, match="per_example_loss"):
        type("Own", (PrivateModule,), {name: lambda self: None})


def test_loss_scaling_is_refused(tmp_path) -> None:
    private = PrivateTraining(plan_of(), data())
    trainer = trainer_of(tmp_path, private, precision="bf16-mixed")
    module = Net()
    trainer.fit(module)
    assert trainer.global_step == 7
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    trainer = trainer_of(tmp_path, PrivateTraining(plan_of(), data()), precision="16-true")
    with pytest.raises(ValueError, match="scales losses"):
        trainer.fit(Net())
