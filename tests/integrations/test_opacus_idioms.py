"""What scripts read of the objects that Opacus wraps: it works, or it is one short error that names
the line to write, before any budget is spent.
"""

import copy
import io
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_value_
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader

import dpkfc.integrations.opacus as opacus_door
from dpkfc.checkpoint import CheckpointError
from dpkfc.integrations.opacus import ModuleValidator, PrivacyEngine
from tests.documents import ROOT
from tests.integrations.opacus_cases import (
    B,
    N,
    backward,
    cut,
    data,
    loader,
    mlp,
    private,
    sgd,
    train,
)
from tests.mutation_cases import weights

# -- the model -------------------------------------------------------------------------------------


def test_copies_and_pickles_of_a_private_model_are_their_own_modules(tmp_path):
    engine, model, optimizer, batches = private()
    train(model, optimizer, batches, 1)
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        torch.load(tmp_path / "model.pt", weights_only=False),
        copy.deepcopy(model._module),
    ):
        assert other._module is other and other is not model
        assert other.to_standard_module() is other
        assert torch.equal(weights(other), weights(model))
    train(model, optimizer, batches, 1)
    assert engine.ledger.count == 2


class Squeezed(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).squeeze()


def test_a_model_that_squeezes_the_batch_axis_away_is_named_before_a_release():
    engine, model, optimizer, batches = private(Squeezed(nn.Linear(6, 1).double()))
    place = r"squeeze\(\) in line \d+ of test_opacus_idioms.py drops the batch axis of one example"
    with pytest.raises(ValueError, match=place):
        train(model, optimizer, batches, 1, lambda out, y: F.mse_loss(out, y.double()))
    assert engine.ledger.count == 0


def _squeeze_twice(model, x, y):
    return F.binary_cross_entropy_with_logits(model(x).squeeze(), (y[:, None] % 2).squeeze() * 1.0)


def _squeeze_in_the_model(model, x, y):
    return F.cross_entropy(model(x[:, None]), y)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: nn.Linear(6, 1), _squeeze_twice),
        (lambda: Squeezed(nn.Conv1d(1, 3, 6)), _squeeze_in_the_model),
    ],
)
def test_a_script_that_squeezes_trains_on_a_batch_of_one_as_on_others(make, loss):
    torch.manual_seed(0)
    model = make().double()
    settings = {"data_loader": loader(batch_size=2), "max_grad_norm": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    _, model, optimizer, batches = private(model, optimizer=optimizer, **settings)
    sizes = set()
    for x, y in batches:
        sizes.add(len(x))
        before = weights(model)
        expected = torch.zeros_like(before)
        optimizer.zero_grad()
        if len(x):
            own = copy.deepcopy(model)
            for i in range(len(x)):
                # A batch of the same example twice has its gradient, and no axis of length one.
                twice = loss(own, x[[i, i]], y[[i, i]])
                row = torch.cat([g.flatten() for g in torch.autograd.grad(twice, own.parameters())])
                expected += row * (0.1 / row.norm()).clamp(max=1)
            loss(model, x, y).backward()
        optimizer.step()
        assert torch.allclose(before - weights(model), expected / 2, atol=1e-12)
    assert {1, 2} <= sizes


# -- the optimizer ---------------------------------------------------------------------------------


def test_numbers_and_objects_of_a_private_optimizer():
    _, model, optimizer, batches = private(noise_multiplier=2.0)
    assert optimizer.original_optimizer is optimizer
    assert optimizer.loss_reduction == "mean"
    assert [id(p) for p in optimizer.params] == [id(p) for p in model.parameters()]
    assert batches.sample_rate == B / N
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.original_optimizer, 1, gamma=0.5)
    train(model, optimizer, batches, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert "original_optimizer" not in optimizer.state_dict()
    assert not hasattr(copy.deepcopy(optimizer), "original_optimizer")


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: optimizer.signal_skip_step(),
        lambda model, optimizer: optimizer.virtual_step(),
        lambda model, optimizer: optimizer.clip_and_accumulate(),
        lambda model, optimizer: optimizer.add_noise(),
        lambda model, optimizer: optimizer.scale_grad(),
        lambda model, optimizer: optimizer.pre_step(),
        lambda model, optimizer: optimizer.grad_samples[0],
        lambda model, optimizer: [g.norm() for g in optimizer.grad_samples],
        lambda model, optimizer: len(optimizer.grad_samples),
        lambda model, optimizer: model.allow_grad_accumulation(),
        lambda model, optimizer: model.disable_hooks(),
        lambda model, optimizer: model.enable_hooks(),
        lambda model, optimizer: model.add_hooks(),
        lambda model, optimizer: model.get_clipping_coef(),
        lambda model, optimizer: dict(model.trainable_parameters()),
    ],
)
def test_parts_of_a_step_are_one_error_and_spend_nothing(use):
    engine, model, optimizer, batches = private()
    before = weights(model)
    batch = next(iter(batches))
    backward(model, batch)
    with pytest.raises(RuntimeError, match="how-to-opacus.md#from-opacus-line|BatchMem"):
        use(model, optimizer)
    assert engine.ledger.count == 0 and torch.equal(weights(model), before)
    optimizer.step()
    assert engine.ledger.count == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda engine, optimizer: engine.attach(optimizer),
        lambda engine, optimizer: engine.get_renyi_divergence(),
        lambda engine, optimizer: optimizer.privacy_engine.get_privacy_spent(1e-5),
    ],
)
def test_a_script_of_the_first_opacus_is_told_where_the_line_to_write_stands(use):
    engine, _, optimizer, _ = private()
    with pytest.raises(AttributeError, match="how-to-opacus.md#from-opacus-line"):
        use(engine, optimizer)
    assert not hasattr(engine, "attach")
    for make in (copy.deepcopy, copy.copy):
        refusal = make(optimizer.privacy_engine)
        with pytest.raises(AttributeError, match="dpkfc has no optimizer.privacy_engine"):
            refusal.get_privacy_spent(1e-5)


def test_a_script_that_reads_grad_sample_is_told_to_read_the_release():
    engine, model, optimizer, batches = private()
    backward(model, next(iter(batches)))
    with pytest.raises(AttributeError, match="are private; read p.grad after optimizer.step"):
        [p.grad_sample.norm() for p in model.parameters()]
    for p in model.parameters():
        assert not hasattr(p, "grad_sample")
        p.grad_sample = None  # as scripts do to save memory
        assert p.grad_sample is None
        del p.grad_sample
    optimizer.step()
    engine.close()
    assert not hasattr(nn.Parameter, "grad_sample")
    assert "grad_sample" not in vars(nn.Parameter)


def test_a_script_counts_logical_batches_by_the_flag_of_opacus():
    engine, model, optimizer, batches = private()
    flags = []
    with cut(batches, optimizer, 3) as parts:
        for batch in parts:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            flags.append(optimizer._is_last_step_skipped)
    assert flags.count(False) == engine.ledger.count == len(batches) < len(flags)
    engine.close()
    assert not hasattr(optimizer, "_is_last_step_skipped")


def test_the_loss_wrapper_of_opacus_is_refused_before_a_release():
    wrapper = pytest.importorskip("opacus.utils.fast_gradient_clipping_utils")
    engine, model, optimizer, batches = private()
    criterion = wrapper.DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss(), "mean")
    x, y = next(iter(batches))
    with pytest.raises(RuntimeError, match="no model.get_clipping_coef; docs/how-to-opacus.md"):
        criterion(model(x), y).backward()
    assert engine.ledger.count == 0


def test_a_clip_of_gradient_values_before_the_step_is_refused_and_works_after_it():
    engine, model, optimizer, batches = private()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).backward()
    batch = next(iter(batches))
    backward(model, batch)
    with pytest.warns(UserWarning, match="before optimizer.step.* leave out clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_value_(other.parameters(), 0.5)
    assert torch.equal(other.weight.grad, torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="clip_grad_value_ finds no gradient.* leave it out"):
        clip_grad_value_(model.parameters(), 1.0)
    assert engine.ledger.count == 0
    optimizer.step()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert all(p.grad.abs().max() <= 1 for p in model.parameters())


def test_a_gradient_that_is_read_before_the_step_is_none_with_one_clear_line():
    engine, model, optimizer, batches = private()
    other = nn.Linear(2, 1)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        backward(model, batch)
        assert other.weight.grad is None
        if number == 0:
            with pytest.warns(UserWarning, match="p.grad is None before optimizer.step"):
                assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
    assert _get_current_function_mode() is None and engine.ledger.count == number + 1


class SharpnessAware(torch.optim.SGD):
    """Steps uphill by `first_step`, from gradients that the script has just computed."""

    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(0.05 * p.grad)


def test_an_optimizer_that_steps_twice_is_refused_by_its_class():
    model = mlp()
    with pytest.raises(ValueError, match="optimizer is a SharpnessAware.* pass a plain torch"):
        private(model, optimizer=SharpnessAware(model.parameters(), lr=0.1))


def run_in_two(model, x):
    return checkpoint_sequential(model, 2, x, use_reentrant=True)


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("call", [partial(checkpoint, use_reentrant=True), run_in_two])
def test_a_reentrant_checkpoint_around_the_model_is_refused_by_its_setting(call, grows):
    engine, model, optimizer, batches = private()
    x, y = next(iter(batches))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        loss = F.cross_entropy(call(model, x.requires_grad_(grows)), y)
        loss.backward()
        optimizer.step()
    assert engine.ledger.count == 0


@pytest.mark.parametrize(
    "compile_module, fix",
    [
        (torch.jit.script, "of torch.jit, which takes no hooks; pass the plain one"),
        (
            lambda m: torch.jit.trace(m, data()[0][0][None]),
            "of torch.jit, which takes no hooks; pass the plain one",
        ),
        (
            lambda m: nn.Sequential(torch.jit.trace(m, data()[0][0][None])),
            "module '0' was traced by torch.jit",
        ),
    ],
)
def test_a_compiled_module_of_torchscript_is_refused_by_its_kind(compile_module, fix):
    with pytest.raises(ValueError, match=fix):
        private(compile_module(mlp()))


def test_a_step_hook_sees_each_release_once_and_before_the_step():
    engine, model, optimizer, batches = private(noise_multiplier=1.0)
    seen = []

    def hook(given):
        gradients = torch.cat([p.grad.flatten() for p in given.params])
        seen.append((weights(model), gradients, given.noise_multiplier))

    optimizer.attach_step_hook(
        lambda given: seen.append("the first hook, which the second replaces")
    )
    optimizer.attach_step_hook(hook)
    start = weights(model)
    with cut(batches, optimizer, 2) as physical:
        for x, y in physical:
            backward(model, (x, y))
            optimizer.step()
            if engine.ledger.count == 1:
                break
    ((before, release, noise),) = seen
    assert torch.equal(before, start) and noise == 1.0
    torch.testing.assert_close(start - 0.1 * release, weights(model))


def test_a_step_hook_cannot_change_what_the_optimizer_sees():
    """A backward pass inside the hook would add raw gradients to the release."""
    engine, model, optimizer, batches = private(noise_multiplier=1.0)
    batch = next(iter(batches))

    def add_gradients(given):
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()

    def clear(given):
        given.zero_grad()

    def scale(given):
        given.params[0].grad.data.mul_(2)

    before = weights(model)
    for done, hook in enumerate((add_gradients, clear, scale), 1):
        optimizer.attach_step_hook(hook)
        with pytest.raises(RuntimeError, match="may read releases") as caught:
            train(model, optimizer, batches, 1)
        assert len(str(caught.value)) <= 160 and engine.ledger.count == done
        assert torch.equal(weights(model), before)
        assert all(p.grad is None for p in model.parameters())
    optimizer.attach_step_hook(None)
    train(model, optimizer, batches, 1)


# -- the loader ------------------------------------------------------------------------------------


def test_objects_that_opacus_has_wrapped_are_refused_by_the_object_inside():
    opacus = pytest.importorskip("opacus")
    from opacus.data_loader import DPDataLoader

    wrapped = opacus.GradSampleModule(mlp())
    _, theirs, optimizer, _ = (
        None,
        *opacus.PrivacyEngine().make_private(
            module=(model := mlp()),
            optimizer=sgd(model),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        ),
    )
    for settings, line in (
        ({"model": wrapped}, "module=model.to_standard_module()"),
        ({"model": mlp(), "optimizer": optimizer}, "optimizer=optimizer.original_optimizer"),
        ({"data_loader": DPDataLoader.from_data_loader(loader())}, "DataLoader that it was made"),
    ):
        with pytest.raises(ValueError, match=line.replace("(", r"\(").replace(")", r"\)")):
            private(**settings)
    standard = theirs.to_standard_module()
    engine, model, optimizer, batches = private(standard, optimizer=optimizer.original_optimizer)
    train(model, optimizer, batches, 1)
    assert engine.ledger.count == 1


# -- the accountant --------------------------------------------------------------------------------


def test_history_state_and_precision_of_the_accountant():
    engine, model, optimizer, batches = private(
        engine=PrivacyEngine(accountant="rdp"),
        noise_multiplier=2.0,
        test_mode_seed=None,
    )
    accountant = engine.accountant
    assert accountant.history == [] and accountant.state_dict()["history"] == []
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=B / N))
    train(model, optimizer, batches, 3)
    assert accountant.history == [(2.0, B / N, 3)] and len(accountant) == 3
    target = {"epoch": 1}
    state = accountant.state_dict(target)
    assert state is target and state["mechanism"] == "rdp" and state["epoch"] == 1
    epsilon = engine.get_epsilon(1e-3)
    assert accountant.get_epsilon(delta=1e-3, alphas=[2.0, 8.0]) == epsilon
    assert accountant.get_epsilon(1e-3, eps_error=0.1, delta_error=1e-9) == epsilon
    spent, order = accountant.get_privacy_spent(delta=1e-3, alphas=[2.0])
    assert spent == epsilon and math.isnan(order)
    accountant.load_state_dict(state)
    assert engine.get_epsilon(1e-3) == epsilon
    with pytest.raises(RuntimeError, match="optimizer.step"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.parametrize(
    "state, match",
    [
        ({}, "no 'history'"),
        ({"mechanism": "rdp"}, "no 'history'"),
        (
            {"history": [(1.0, B / N, 1)], "mechanism": "rdp"},
            r"make_private\(ledger_path=..., resume=True\)",
        ),
    ],
)
def test_a_state_that_the_ledger_does_not_hold_is_refused(state, match):
    engine, model, optimizer, batches = private(noise_multiplier=2.0)
    for releases in (0, 1):
        with pytest.raises(ValueError, match=match):
            engine.accountant.load_state_dict(state)
        train(model, optimizer, batches, 1)
        assert engine.ledger.count == releases + 1


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_run_goes_on_from_a_checkpoint_and_its_ledger(tmp_path):
    paths = {"ledger_path": tmp_path / "ledger.jsonl", "noise_multiplier": 2.0}
    engine, model, optimizer, batches = private(**paths)
    train(model, optimizer, batches)
    engine.save_checkpoint(
        path=tmp_path / "model.pt",
        module=model,
        optimizer=optimizer,
        checkpoint_dict={"epoch": 1},
    )
    assert not list(tmp_path.glob("*.pkl"))
    after, momentum = weights(model), list(optimizer.state.values())[0]["momentum_buffer"].clone()
    spent = engine.get_epsilon(1e-3)
    engine.close()

    engine, model, optimizer, batches = private(**paths, resume=True)
    found = engine.load_checkpoint(path=tmp_path / "model.pt", module=model, optimizer=optimizer)
    assert found["epoch"] == 1 and "module_state_dict" in found
    assert torch.equal(weights(model), after) and engine.get_epsilon(1e-3) == spent
    assert torch.equal(list(optimizer.state.values())[0]["momentum_buffer"], momentum)
    train(model, optimizer, batches)
    assert engine.ledger.count == 2 * (N // B)


def test_a_checkpoint_of_another_model_and_a_path_that_is_a_file_are_refused(tmp_path):
    engine, model, optimizer, batches = private()
    engine.save_checkpoint(path=tmp_path / "saved", module=model)
    other = nn.Linear(3, 3)
    before = weights(other)
    with pytest.raises(CheckpointError, match="another model"):
        engine.load_checkpoint(path=tmp_path / "saved", module=other)
    assert torch.equal(weights(other), before)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="give the name of a new one"):
        engine.save_checkpoint(path=tmp_path / "file", module=model)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="fixed for the whole run"):
        engine.save_checkpoint(path=tmp_path / "saved", module=model, noise_scheduler=object())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        engine.load_checkpoint(path=tmp_path / "absent", module=model)


# -- the validator ---------------------------------------------------------------------------------


def block():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3),
        nn.BatchNorm2d(24, eps=1e-3),
        nn.InstanceNorm2d(24, track_running_stats=True),
    )


def test_the_validator_finds_and_replaces_what_mixes_examples():
    model = nn.Sequential(block(), nn.Flatten(), nn.Linear(24 * 4, 3)).double()
    (found,) = ModuleValidator.validate(model, strict=False)
    assert "BatchNorm" in str(found) and not ModuleValidator.is_valid(model)
    with pytest.raises(ValueError, match="GroupNorm"):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix(model)
    assert ModuleValidator.validate(fixed, strict=True) == [] and ModuleValidator.is_valid(fixed)
    norm = fixed[0][1]
    assert (norm.num_groups, norm.num_channels, norm.eps) == (8, 24, 1e-3)
    assert norm.weight.dtype is torch.float64 and isinstance(model[0][1], nn.BatchNorm2d)
    assert torch.equal(fixed[2].weight, model[2].weight) and fixed[2] is not model[2]
    engine = PrivacyEngine()
    engine.validate(module=fixed, optimizer=None, data_loader=None)
    assert engine.is_compatible(module=fixed, optimizer=None, data_loader=None)
    assert not engine.is_compatible(module=model, optimizer=None, data_loader=None)
    assert PrivacyEngine.get_compatible_module(fixed) is fixed
    with pytest.raises(ValueError, match="replace it by nn.GroupNorm"):
        engine.validate(module=model)
    assert isinstance(PrivacyEngine.get_compatible_module(nn.BatchNorm1d(6)), nn.GroupNorm)
    engine, fixed, optimizer, batches = private(
        fixed, data_loader=DataLoader(data(shape=(1, 4, 4)), batch_size=B)
    )
    train(fixed, optimizer, batches, 1)


def test_frozen_norms_in_eval_mode_stay_and_an_optimizer_made_before_is_named():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model[1].eval().requires_grad_(False)
    assert ModuleValidator.fix(model) is model
    trained = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    optimizer = sgd(trained)
    with pytest.raises(ValueError, match="does not hold trainable parameter"):
        private(ModuleValidator.fix(trained), optimizer=optimizer)


class Bounded(torch.optim.SGD):
    """Changes the release and the weights around the step of its base class."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.clamp_(-1, 1)


def test_an_optimizer_may_call_the_step_of_its_base_class():
    runs = []
    for kind, lr in ((torch.optim.SGD, 0.1), (Bounded, 0.2)):
        model = mlp()
        engine, model, optimizer, batches = private(
            model, optimizer=kind(model.parameters(), lr), noise_multiplier=1.0
        )
        assert train(model, optimizer, batches) == engine.ledger.count == N // B
        engine._private.check_released()
        with pytest.raises(RuntimeError, match="without a new batch"):
            optimizer.step()
        runs.append(weights(model))
    torch.testing.assert_close(runs[0].clamp(-1, 1), runs[1])


def test_a_copy_in_the_middle_of_a_batch_holds_nothing_of_it():
    engine, model, optimizer, batches = private(noise_multiplier=1.0)
    x, y = next(iter(batches))
    loss = nn.functional.cross_entropy(model(x), y)
    copies = [copy.deepcopy(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    loss.backward()
    optimizer.step()
    assert engine.ledger.count == 1
    for other in copies:
        assert other._module is other and all(p.grad is None for p in other.parameters())
        other(x).sum().backward()
        for part in other.modules():
            for hook in [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]:
                assert not hook.is_active


# -- schedules, imports ----------------------------------------------------------------------------


OTHER_IMPORTS = (ROOT / "docs/how-to-opacus.md").read_text("utf-8").split("### Other imports")[1]
OTHER_NAMES = {
    name
    for row in re.findall(r"^\| (`.*?) \|", OTHER_IMPORTS, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
}


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_an_import_of_another_name_of_opacus_points_to_the_table(name):
    with pytest.raises(ImportError, match=f"{name}; docs/how-to-opacus.md"):
        exec(f"from dpkfc.integrations.opacus import {name}")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_every_way_to_take_gradients_gives_the_same_step(mode):
    reference = private(max_grad_norm=0.1)
    train(*reference[1:], 1)
    _, model, optimizer, *rest = private(max_grad_norm=0.1, grad_sample_mode=mode)
    train(model, optimizer, rest[-1], 1)
    torch.testing.assert_close(weights(model), weights(reference[1]))


def test_an_unknown_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'Privacy'"):
        _ = opacus_door.Privacy
