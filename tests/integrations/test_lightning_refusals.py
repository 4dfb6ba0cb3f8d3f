"""What the private fit of Lightning refuses, each before a release and with its fix."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("lightning.pytorch")
import lightning.pytorch as L
from torch.utils.data import DataLoader, Subset

from dpkfc.integrations.lightning import _UNCALLED, PrivateModule, PrivateTraining
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


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


class Plain(L.LightningModule):
    def __init__(self):
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
        return [
            torch.optim.SGD(part.parameters(), 0.1) for part in (self.layers[0], self.layers[3])
        ]


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


class Other:
    def training_step(self, batch, _):
        return None


class Inherited(Other, Net):
    """Gets its training step from beside PrivateModule."""


class Watched(Net):
    def on_train_start(self):
        self.layers[0].weight.register_hook(lambda g: None)


class Mixing(Net):
    def forward(self, x):
        return self.layers(x - x.mean(0))


class Logging(Net):
    """Logs the un-noised loss, under a name that says so."""

    def per_example_loss(self, batch):
        losses = super().per_example_loss(batch)
        self.log("loss (NOT private)", losses.mean(), on_step=True, on_epoch=True, batch_size=1)
        return losses


class Watching(Logging):
    def configure_callbacks(self):
        return [
            L.callbacks.EarlyStopping("loss (NOT private)_epoch", check_on_train_epoch_end=True)
        ]


class BatchMean(Net):
    def per_example_loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


def checkpoints(**settings):
    return {"callbacks": [L.callbacks.ModelCheckpoint(**settings)], "enable_checkpointing": True}


@pytest.mark.parametrize(
    "build, settings, match",
    [
        (Plain, {}, "Plain has a training_step of its own.*PrivateModule"),
        (Empty, {}, "does not define per_example_loss"),
        (automatic, {}, "would step the optimizer without noise"),
        (Two, {}, "one optimizer of all trainable parameters"),
        (Plateau, {}, "stepped on releases"),
        (Mixing, {}, "mixes examples"),
        (Inherited, {}, "Inherited has a training_step of its own"),
        (Watched, {}, "'layers.0.weight' has a hook on its gradient"),
        (
            Net,
            {"callbacks": [PrivateTraining(plan_of(), data())]},
            "several PrivateTraining callbacks",
        ),
        (Net, {"min_steps": 20}, "ask for 20 steps.*calibrated for 7"),
        (Net, {"min_epochs": 2}, "ask for 10 steps.*calibrated for 7"),
        (
            Net,
            {"callbacks": [L.callbacks.LearningRateFinder(num_training_steps=3)]},
            "A search for a learning rate",
        ),
        (BatchMean, {}, "one loss per example"),
        (
            Logging,
            {"callbacks": [L.callbacks.EarlyStopping("loss (NOT private)")]},
            r"EarlyStopping\(monitor='loss.*reads what",
        ),
        (Watching, {}, "EarlyStopping.*without noise"),
        (Logging, checkpoints(monitor="loss (NOT private)_step"), "ModelCheckpoint.*without noise"),
        (Logging, checkpoints(filename="{loss (NOT private):.2f}"), r"ModelCheckpoint\(filename"),
        (Net, {"overfit_batches": 1}, "overfit_batches replaces the sampler"),
        (Net, {"gradient_clip_val": 1.0}, "clipping is not supported for manual"),
        (Net, {"accumulate_grad_batches": 2}, "accumulation is not supported for manual"),
    ],
)
def test_what_would_train_otherwise_is_refused_before_anything_is_spent(
    build, settings, match, tmp_path
):
    """Batches are of one size: one that comes out with a row or with none shows nothing of what
    mixes examples.
    """
    module = build()
    before = weights(module) if list(module.parameters()) else None
    with pytest.raises(Exception, match=match):
        fit(tmp_path, module, plan_of(sampler="fixed"), **settings)
    assert not (tmp_path / "ledger.jsonl").exists() or releases(tmp_path) == 0
    assert before is None or torch.equal(weights(module), before)


def test_automatic_optimization_switched_on_later_steps_nothing(tmp_path):
    """Whatever the module does, the optimizer does not move without a release."""
    module = Automatic()
    before = weights(module)
    with pytest.raises(RuntimeError, match="without a release of the session"):
        fit(tmp_path, module)
    assert torch.equal(weights(module), before)
    assert releases(tmp_path) == 0


def test_a_private_module_without_the_callback_does_not_train(tmp_path):
    module = Net()
    before = weights(module)
    with pytest.raises(RuntimeError, match="add PrivateTraining"):
        trainer_of(tmp_path, None).fit(module)
    assert torch.equal(weights(module), before)


def test_a_loader_of_the_users_own_is_refused(tmp_path):
    module = Net()
    with pytest.raises(ValueError, match="without train_dataloaders"):
        trainer_of(tmp_path, PrivateTraining(plan_of(), data())).fit(module, DataLoader(data(), 8))


@pytest.mark.parametrize("sanity", [0, 2])
def test_private_rows_are_not_validated_on(sanity, tmp_path):
    """A plain name of a metric would carry them, without noise, to loggers and an early end."""
    rows = data()
    for held_out in (rows, Subset(rows, range(3))):
        private = PrivateTraining(plan_of(), rows, ledger_path=tmp_path / "ledger.jsonl")
        trainer = trainer_of(tmp_path, private, num_sanity_val_steps=sanity)
        with pytest.raises(ValueError, match="validation data holds records"):
            trainer.fit(Net(), val_dataloaders=DataLoader(held_out, 6))
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("name", _UNCALLED)
def test_a_hook_that_a_private_fit_never_calls_is_refused(name, tmp_path):
    """A warm-up in `optimizer_step`, say, was left out without a word."""
    own = type("Own", (Net,), {name: lambda self, *_: None})
    with pytest.raises(ValueError, match=f"Own has a {name} of its own"):
        fit(tmp_path, own())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_step_of_the_users_own_is_refused(tmp_path):
    class Own(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            F.cross_entropy(module(data().tensors[0]), data().tensors[1]).backward()
            self.before = weights(module)
            module.optimizers().step()

    own, module = Own(), Net()
    with pytest.raises(RuntimeError, match="without a release of the session"):
        fit(tmp_path, module, callbacks=[own])
    assert torch.equal(weights(module), own.before)


@pytest.mark.parametrize("kind", ["parameter", "release in the gradient of"])
def test_weights_written_between_release_and_step_are_refused(kind, tmp_path):
    class Own(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            weight = module.layers[0].weight
            (weight if kind == "parameter" else weight.grad).data[0, 0] = data().tensors[0][0, 0]

    with pytest.raises(RuntimeError, match=f"on_before_optimizer_step .* the {kind} 'layers.0"):
        fit(tmp_path, callbacks=[Own()])


@pytest.mark.parametrize("name", ["training_step", "train_dataloader"])
def test_a_private_module_may_not_define_its_own_training(name):
    with pytest.raises(TypeError, match="per_example_loss"):
        type("Own", (PrivateModule,), {name: lambda self: None})


def test_loss_scaling_is_refused(tmp_path):
    private = PrivateTraining(plan_of(), data())
    trainer = trainer_of(tmp_path, private, precision="bf16-mixed")
    module = Net()
    trainer.fit(module)
    assert trainer.global_step == 7
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    trainer = trainer_of(tmp_path, PrivateTraining(plan_of(), data()), precision="16-true")
    with pytest.raises(ValueError, match="scales losses"):
        trainer.fit(Net())


def test_a_plan_is_what_a_configuration_was_calibrated_to():
    with pytest.raises(ValueError, match=r"plan is a NoneType; pass what PrivacyConfig"):
        PrivateTraining(None, [])
