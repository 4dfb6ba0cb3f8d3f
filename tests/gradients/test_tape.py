"""What the tape refuses, and what one broken example does to the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.gradients.accumulate import Clip, ClippedSummer
from dpkfc.gradients.contributions import capture
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.model_state import restored_state
from dpkfc.gradients.tape import Tape
from dpkfc.gradients.verify import check_per_example_gradients
from tests.gradients.cases import CASES, build, looped, loss_fn


def clipped(model: nn.Module, batch, clip: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    layers = find_layers(model)
    tape, summer = Tape(model, layers), ClippedSummer(layers, {}, Clip(clip))
    with tape:
        losses = loss_fn(model, batch)
    micro = summer.add(tape.backward(losses), len(batch[0]))
    return micro.factors, summer.result()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "embedding"], ids=lambda c: c.name)
def test_a_broken_example_contributes_nothing(case, bad: float) -> None:
    model, (x, y) = build(case)
    kept = torch.tensor([0, 1, 3, 4])
    _, expected = clipped(model, (x[kept], y[kept]))
    x = x.clone()
    x[2].view(-1)[0] = bad
    factors, total = clipped(model, (x, y))
    if not torch.isfinite(loss_fn(model, (x, y))[2]):
        assert factors[2] == 0
        for name in total:
            torch.testing.assert_close(total[name], expected[name], rtol=1e-9, atol=1e-12)
    assert all(bool(torch.isfinite(t).all()) for t in total.values())


def test_neighbouring_batches_differ_by_at_most_the_bound() -> None:
    for case in CASES:
        model, (x, y) = build(case, n=6)
        _, whole = clipped(model, (x, y), 0.3)
        _, less = clipped(model, (x[:5], y[:5]), 0.3)
        distance = torch.sqrt(sum((whole[n] - less[n]).square().sum() for n in whole))
        assert float(distance) <= 0.3 * (1 + 1e-9), case.name


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.BatchNorm1d(3), r"'0' \(BatchNorm1d\) mixes the examples.*Three ways out"),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "running statistics"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ],
)
def test_modules_that_break_the_guarantee_are_refused(module: nn.Module, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        find_layers(nn.Sequential(module, nn.Linear(3, 2)))


def test_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        find_layers(model)


def test_partly_shared_parameters_are_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    with pytest.raises(ValueError, match="shares a parameter"):
        find_layers(model)


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (lambda m, x: m(x).mean(), r"one loss per example.*\(\)"),
        (lambda m, x: m(x), r"one loss per example"),
        (lambda m, x: torch.zeros(4), "do not depend on any trainable layer"),
    ],
)
def test_bad_losses(losses, match: str) -> None:
    model = nn.Linear(3, 2)
    tape = Tape(model, find_layers(model))
    with tape:
        value = losses(model, torch.randn(4, 3))
    with pytest.raises(ValueError, match=match):
        tape.backward(value)


def test_wrong_batch_axis_is_named() -> None:
    model = nn.Linear(3, 2)
    layers = find_layers(model)
    with pytest.raises(ValueError, match="leading axis must be the batch of 4"):
        dict(capture(model, layers, lambda m: m(torch.randn(7, 4, 3)).sum((0, 2))))


def test_input_overwritten_in_place_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tape = Tape(model, find_layers(model))
    with tape:
        hidden = model[0](torch.randn(4, 3))
        out = model[1](hidden)
        hidden += 1
        losses = out.sum(1)
    with pytest.raises(ValueError, match="input of layer '1' was changed in place"):
        tape.backward(losses)


class Leaky(nn.Module):
    """Uses another module's weight behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + F.linear(x, self.inner.weight)


class Mixer(nn.Module):
    """Subtracts the batch mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y - y.mean(0, keepdim=True)


@pytest.mark.parametrize("model", [Leaky(), Mixer()], ids=["weight used elsewhere", "batch mean"])
def test_verification_finds_what_inspection_cannot(model: nn.Module) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"per-example gradient of 'inner.weight'.*differs"):
        check_per_example_gradients(model, find_layers(model), lambda m, b: m(b).square().sum(1), x, [x[:1], x[1:]])


class Workspace(nn.Module):
    """Copies its batch into memory of its own, which the next pass writes over; row by row, or each row with those before it."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.inner, self.mixes = nn.Linear(3, 1), mixes
        self.place = [torch.zeros(64 * 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixes:  # from the end, so that one row alone lies where the last of several does
            held = self.place[0][-3 * len(x) :].view(-1, 3)
            held.copy_(x.cumsum(0))
            return self.inner(held).sum(1)
        held = self.place[0][: 3 * len(x)].view(3, len(x))
        held.copy_(x.T)
        return self.inner(held.T).square().sum(1)


def test_verification_compares_what_the_tape_saw_when_it_saw_it() -> None:
    x, right, wrong = torch.randn(2, 3), Workspace(mixes=False), Workspace(mixes=True)
    assert check_per_example_gradients(right, find_layers(right), lambda m, b: m(b), x, [x[:1], x[1:]])

    def without_value(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = m(b)
        return losses - losses.detach()

    for loss in (lambda m, b: m(b), without_value):  # the second is zero, so that losses show nothing
        with pytest.raises(ValueError, match=r"per-example gradient of 'inner.weight'.*differs"):
            check_per_example_gradients(wrong, find_layers(wrong), loss, x, [x[:1], x[1:]])


def test_verification_accepts_every_case_and_restores_modes() -> None:
    for case in CASES:
        model, (x, y) = build(case, n=2)
        model.train() if "batch norm" not in case.name else None
        modes = [m.training for m in model.modules()]
        singles = [(x[i : i + 1], y[i : i + 1]) for i in range(2)]
        check_per_example_gradients(model, find_layers(model), loss_fn, (x, y), singles)
        assert modes == [m.training for m in model.modules()]


def test_unused_trainable_layer_is_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)})
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="'idle.weight' of layer 'idle' is trainable but loss_fn never uses"):
        check_per_example_gradients(model, find_layers(model), lambda m, b: m["used"](b).sum(1), x, [x[:1], x[1:]])


def test_a_buffer_written_in_the_forward_pass_is_put_back_and_named() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(3))
    with pytest.raises(ValueError, match="changes the buffer 'mean'"), restored_state(model):
        model.mean += 1
    assert float(model.mean.sum()) == 0


def test_capture_is_in_the_per_example_scale() -> None:
    model, (x, y) = build(CASES[0])
    blocks = capture(model, find_layers(model), lambda m: loss_fn(m, (x, y)))
    rows = looped(model, (x, y))
    g = blocks["0"].per_example()
    for i, row in enumerate(rows):
        expected = torch.cat([row["0.weight"], row["0.bias"].unsqueeze(1)], 1)
        torch.testing.assert_close(g[i], expected)


def test_an_exception_inside_leaves_no_hook_and_no_frozen_parameter() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="boom"), Tape(model, find_layers(model)):
        model(torch.randn(2, 3))
        raise RuntimeError("boom")
    assert model.weight.requires_grad
    assert not model._forward_hooks
    with pytest.raises(RuntimeError), Tape(model, find_layers(model)):
        model(torch.randn(2, 5))
    assert model.weight.requires_grad


class Positions(nn.Module):
    """A raw parameter and an argument that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return (x + positions) * self.gain


def test_a_shared_argument_as_long_as_the_batch_is_told_from_one_of_the_examples() -> None:
    model, positions = Positions(), torch.randn(4, 3)
    for n in (3, 4):
        layers, x = find_layers(model), torch.randn(n, 4, 3)
        tape, summer = Tape(model, layers), ClippedSummer(layers, {}, Clip(1e9))
        with tape:
            losses = model(x, positions).square().sum((1, 2))
        summer.add(tape.backward(losses), n)
        (expected,) = torch.autograd.grad(model(x, positions).square().sum(), [model.gain])
        torch.testing.assert_close(summer.result()["gain"], expected)


def test_a_frozen_embedding_may_not_renormalise_rows_either() -> None:
    model = nn.Sequential(nn.Embedding(3, 3, max_norm=1.0).requires_grad_(False), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="max_norm"):
        find_layers(model)


def test_writes_behind_the_version_counter_are_put_back_too() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(3))
    with pytest.raises(ValueError, match="changes the buffer 'mean'"), restored_state(model):
        model.mean.data.add_(1)
    assert float(model.mean.sum()) == 0
