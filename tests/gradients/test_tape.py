"""What the tape refuses, and what one broken example does to the others."""

import pytest
import torch
from torch import nn

from dpkfc.gradients.clip import Clip, clip_factors
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from tests.gradients.cases import CASES, build, loss_fn


def clip_batch(model, batch, clip=1.0):
    layers = find_layers(model)
    tape, summer = Tape(model, layers), ClippedSummer(layers, {}, Clip(clip))
    with tape:
        losses = loss_fn(model, batch)
    norms = summer.add(tape.backward(losses), len(batch[0]))
    return clip_factors(norms, clip), summer.result()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "case", [c for c in CASES if "embedding" not in c.name], ids=lambda c: c.name
)
def test_a_broken_example_contributes_nothing(case, bad):
    model, (x, y) = build(case)
    kept = torch.tensor([0, 1, 3, 4])
    _, expected = clip_batch(model, (x[kept], y[kept]))
    x = x.clone()
    x[2].view(-1)[0] = bad
    factors, total = clip_batch(model, (x, y))
    if not torch.isfinite(loss_fn(model, (x, y))[2]):
        assert factors[2] == 0
        for name in total:
            torch.testing.assert_close(total[name], expected[name], rtol=1e-9, atol=1e-12)
    assert all(bool(torch.isfinite(t).all()) for t in total.values())


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.BatchNorm1d(3), r"'0' \(BatchNorm1d\) mixes the examples.*nn.GroupNorm"),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "running statistics"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ],
)
def test_modules_that_break_the_guarantee_are_refused(module, match):
    with pytest.raises(ValueError, match=match):
        find_layers(nn.Sequential(module, nn.Linear(3, 2)))


def test_nothing_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        find_layers(model)


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (lambda m, x: m(x).mean(), r"one loss per example.*\(\)"),
        (lambda m, x: m(x), r"one loss per example"),
        (lambda m, x: torch.zeros(4), "do not depend on any trainable layer"),
    ],
)
def test_bad_losses(losses, match):
    model = nn.Linear(3, 2)
    tape = Tape(model, find_layers(model))
    with tape:
        value = losses(model, torch.randn(4, 3))
    with pytest.raises(ValueError, match=match):
        tape.backward(value)


def test_input_overwritten_in_place_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tape = Tape(model, find_layers(model))
    with tape:
        hidden = []
        model[0].register_forward_hook(lambda module, args, out: hidden.append(out))
        out = model(torch.randn(4, 3))
        hidden[0] += 1
        losses = out.sum(1)
    with pytest.raises(ValueError, match="aten.add_.Tensor hides the batch axis"):
        tape.backward(losses)


def test_an_exception_inside_leaves_no_hook_and_no_frozen_parameter():
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="boom"), Tape(model, find_layers(model)):
        model(torch.randn(2, 3))
        raise RuntimeError("boom")
    assert model.weight.requires_grad
    assert not model._forward_hooks
    with pytest.raises(RuntimeError), Tape(model, find_layers(model)):
        model(torch.randn(2, 5))
    assert model.weight.requires_grad


def test_a_frozen_embedding_may_not_renormalise_rows_either():
    model = nn.Sequential(nn.Embedding(3, 3, max_norm=1.0).requires_grad_(False), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="max_norm"):
        find_layers(model)


def test_a_layer_that_is_called_twice_under_autocast_is_proved():
    """Autocast keeps the cast of a weight; the second call would read what belongs to the first."""
    linear = nn.Linear(6, 6)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    tape = Tape(model, find_layers(model))
    with torch.autocast("cpu", torch.bfloat16), tape:
        losses = model(torch.randn(4, 6)).float().square().sum(1)
    assert tape.failure(losses) is None


class Scaled(nn.Module):
    """Multiplies what a layer returns by a raw parameter that is flattened first."""

    def __init__(self, *shape, total=False):
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.rand(shape))
        self.total = total

    def forward(self, x):
        rows = self.layer(x)
        rows = rows.sum(1) if self.total else rows
        return rows * self.scale.repeat_interleave(1)


def test_a_flattened_parameter_is_shown_to_every_example():
    model = Scaled(2, 3)
    x = torch.rand(5, 4)
    with Tape(model, find_layers(model)) as tape:
        losses = model(x).square().sum(1)
    assert tape.failure(losses) is None
    (call,) = tape.backward(losses)[""]
    expected = torch.stack(
        [torch.autograd.grad(model(row[None]).square().sum(), model.scale)[0] for row in x]
    )
    assert torch.allclose(call.grads["scale"], expected)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_entries_of_a_flattened_parameter_are_no_examples(shape):
    model = Scaled(*shape, total=True)
    with Tape(model, find_layers(model)) as tape:
        losses = model(torch.rand(5, 4)).square()
    assert tape.failure(losses) is not None


def test_a_tape_forgets_the_shared_parameters_of_an_earlier_pass():
    model = Scaled(6)
    tape = Tape(model, find_layers(model), lenient=True)
    for count in (5, 1):
        with tape:
            losses = model(torch.rand(count, 4)).square().sum(1)
        assert "layer" in tape.backward(losses)
