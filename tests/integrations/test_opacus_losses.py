"""Between the loader and `loss.backward()`: which losses of a script are sums over examples, and
what else it does to them.
"""

import copy
import gc
import weakref
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dpkfc.integrations._opacus_numbers import ScriptNumbers
from tests.integrations.opacus_cases import (
    B,
    backward,
    clipped_sum,
    cut,
    loader,
    mlp,
    private,
    train,
)
from tests.mutation_cases import weights
from tests.zoo.registry import Network, parameter

TORCH_BACKWARD = Tensor.backward


class Mixing(torch.autograd.Function):
    """Hands its input on; its backward pass subtracts the mean over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


class Plain(Mixing):
    """Hands its input on, and the gradient too."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def contrastive(out, y):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def cox(out, y):
    return (torch.logcumsumexp(out[:, 0], 0) - out[:, 0]).mean()


def dice(out, y):
    p = out.sigmoid()
    return 1 - 2 * (p * F.one_hot(y, 3)).sum() / (p.sum() + len(y))


def centred(out, y):
    return F.cross_entropy(out - out.mean(0), y)


def broadcast(out, y):
    return (out[:, :1] - y).square().mean()


def centre_by_a_parameter(out, y):
    return F.cross_entropy(out - nn.Parameter(out.detach().mean(0)), y)


def hook_output(out, y):
    out.register_hook(lambda g: g - g.mean(0))
    return F.cross_entropy(out, y)


def write_output(out, y):
    out.data.sub_(out.data.mean(0))
    return F.cross_entropy(out, y)


def mix_backward(out, y):
    return F.cross_entropy(Mixing.apply(out), y)


def weigh_classes(out, y):
    return F.cross_entropy(out, y, weight=out.new_tensor([1.0, 2.0, 0.5]))


def ignore_class(out, y):
    return F.cross_entropy(out, y, ignore_index=0)


def weigh_by_numpy(out, y):
    return (F.cross_entropy(out, y, reduction="none") * torch.from_numpy(1.0 * y.numpy())).mean()


def weigh_by_counts(out, y):
    counts = np.bincount(y.numpy(), minlength=3)
    return (
        F.cross_entropy(out, y, reduction="none") * torch.as_tensor(1.0 / (1 + counts))[y]
    ).mean()


def divide_by_its_value(out, y):
    loss = F.cross_entropy(out, y)
    return loss / loss.item()


def centre_by_a_number(out, y):
    return F.cross_entropy(out - out.mean().item() * torch.arange(3.0), y)


@pytest.mark.parametrize(
    "loss, match",
    [
        (weigh_by_counts, r"torch.as_tensor, .*; read values after loss.backward\(\)"),
        (divide_by_its_value, "aten.div.Tensor, it computes with a number read of the examples"),
        (centre_by_a_number, "aten.mul.Tensor, it computes with a number read of the examples"),
        (weigh_classes, r"class weights .*; write reduction='none', then mean\(\)"),
        (ignore_class, r"ignore_index=0 .*; write reduction='none', then mean\(\)"),
        (weigh_by_numpy, r"lift_fresh.*; reduce losses by mean\(\) or sum\(\)"),
        (contrastive, "not a sum over examples: aten.mm"),
        (cox, "not a sum over examples: aten.logcumsumexp"),
        (dice, "not a sum over examples: aten.div"),
        (centred, "not a sum over examples: aten.mean.dim"),
        (centre_by_a_parameter, "not a sum over examples: aten.mean.dim"),
        (broadcast, "not a sum over examples: aten.sub"),
        (hook_output, r"stands Tensor.register_hook"),
        (write_output, "stands aten.sub_.*memory that .data"),
        (mix_backward, "computed by MixingBackward"),
        (lambda out, y: F.cross_entropy(out, y, reduction="none"), "needs one number"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_that_mixes_examples_is_refused_by_name(loss, match, alone):
    model = OneByOne() if alone else mlp()
    engine, model, optimizer, batches = private(
        model, data_loader=loader(batch_size=20), verify=False
    )
    with pytest.raises(ValueError, match=match):
        train(model, optimizer, batches, criterion=loss)
    check_torch_is_as_before()
    assert engine.ledger.count == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_a_script_has_written_into_is_refused():
    engine, model, optimizer, batches = private(data_loader=loader(batch_size=20), verify=False)
    x, y = next(iter(batches))
    x.data.copy_(x.data.flip(0))
    with pytest.raises(ValueError, match="stands aten.copy_"):
        backward(model, (x, y))
    assert engine.ledger.count == 0


class OneByOne(nn.Module):
    """A model whose batch axis is not proved, since its backward pass is Python code."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(Plain.apply(self.inner[0](x)) @ self.inner[0].weight)


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_that_is_not_proved_gives_the_same_step(verify):
    """One example at a time, whether public rows have shown it before or the backward pass shows
    it.
    """
    _, model, optimizer, batches = private(OneByOne(), verify=verify, max_grad_norm=0.05)
    before = weights(model)
    batch = next(iter(batches))
    assert len(batch[0]) > 2
    backward(model, batch)
    assert all(p.grad is None for p in model.parameters())
    assert not _get_current_dispatch_mode_stack()
    stacks = []
    # Nothing that follows is of interest: the step runs without modes.
    optimizer.register_step_post_hook(lambda *_: stacks.extend(_get_current_function_mode_stack()))
    optimizer.step()
    assert not stacks
    expected = 0.1 * clipped_sum(OneByOne(), batch, 0.05) / 8
    torch.testing.assert_close(before - weights(model), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, w: F.linear(torch.tanh(x), w),
        lambda x, w: (x[:, None] * w).sin().sum(2),
        lambda x, w: F.linear(x, w.exp()),
    ],
)
def test_weights_of_the_model_itself_count_once_in_the_batch_that_is_checked(read):
    """The model runs on public rows inside of its first call."""
    torch.manual_seed(0)
    model = Network(lambda m, x: read(x, m.w), w=parameter(3, 6))
    engine, model, optimizer, batches = private(
        model, max_grad_norm=100.0, data_loader=loader(batch_size=20)
    )
    reference = copy.deepcopy(model)
    batch = next(iter(batches))
    recording = engine._private._recording
    backward(model, batch)
    optimizer.step()
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(released, clipped_sum(reference, batch, 100.0) / 20)
    assert recording.exact is None  # the batch is proved


@pytest.mark.parametrize("is_frozen", [False, True])
def test_another_model_in_the_loss_is_a_public_constant(is_frozen):
    """A teacher need not be frozen, and its own parameters get no gradient."""
    teacher = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    teacher.requires_grad_(not is_frozen)
    _, model, optimizer, batches = private(mlp(), max_grad_norm=0.05)
    before = weights(model)
    x, y = next(iter(batches))
    with torch.no_grad():
        answers = teacher(x).softmax(1)
    out = model(x)
    (F.cross_entropy(out, answers) + teacher(x + out.sum(1, keepdim=True)).sum(1).mean()).backward()
    optimizer.step()
    assert all(p.grad is None for p in teacher.parameters())
    reference, expected = mlp(), 0.0
    for one in x:
        out = reference(one[None])
        target = teacher(one[None]).softmax(1).detach()
        loss = F.cross_entropy(out, target) + teacher(one[None] + out.sum()).sum()
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))]
        )
        expected += gradient * min(1, 0.05 / gradient.norm())
    torch.testing.assert_close(before - weights(model), 0.1 * expected / 8, rtol=1e-6, atol=1e-9)


def test_a_later_call_on_what_an_earlier_one_returned_needs_a_proof():
    for model in (nn.Linear(6, 6).double(), nn.Sequential(nn.Linear(6, 6), Applied()).double()):
        _, model, optimizer, batches = private(
            model, data_loader=loader(batch_size=20), verify=False
        )
        x, y = next(iter(batches))
        first = model(x)
        if isinstance(model, nn.Linear):
            F.cross_entropy(model(first) + first, y).backward()
            optimizer.step()
        else:
            with pytest.raises(ValueError, match="let one module make both calls"):
                F.cross_entropy(model(first), y).backward()


class Applied(nn.Module):
    def forward(self, x):
        return Plain.apply(x)


def check_torch_is_as_before():
    assert not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()
    assert Tensor.backward is TORCH_BACKWARD


def penalty(model, starts):
    return 0.3 * sum(
        (p - q).square().sum() for p, q in zip(model.parameters(), starts, strict=True)
    )


def test_a_penalty_whose_gradient_meets_the_release_is_not_clipped():
    _, model, optimizer, batches = private(max_grad_norm=0.05, data_loader=loader(batch_size=20))
    reference = copy.deepcopy(model)
    starts = [torch.ones_like(p) for p in model.parameters()]

    def add_penalty(optimizer, args, kwargs):
        for p, start in zip(model.parameters(), starts, strict=True):
            if p.grad is not None:
                p.grad.add_(p.detach() - start, alpha=0.6)

    optimizer.register_step_pre_hook(add_penalty)
    seen = []
    with cut(batches, optimizer, 8) as parts:
        for batch in parts:
            backward(model, batch)
            optimizer.step()
            seen.append(batch)
            if not optimizer._is_last_step_skipped:
                break
    assert len(seen) > 1
    of_examples = sum(clipped_sum(reference, batch, 0.05) for batch in seen) / 20
    penalty(reference, starts).backward()
    of_penalty = torch.cat([p.grad.flatten() for p in reference.parameters()])
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(released, of_examples + of_penalty)


def test_a_batch_whose_loss_was_refused_is_not_stepped():
    engine, model, optimizer, batches = private(data_loader=loader(batch_size=20), verify=False)
    x, y = next(iter(batches))
    with pytest.raises(ValueError, match="not a sum over examples") as kept:
        centred(model(x), y).backward()
    assert kept is not None  # what it holds keeps the batch alive
    check_torch_is_as_before()
    with pytest.raises(RuntimeError, match="without a backward pass"):
        optimizer.step()
    assert engine.ledger.count == 0


def test_a_refused_model_leaves_torch_as_it_was():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    engine, model, _, batches = private(mlp().append(Centred()))
    x, _ = next(iter(batches))
    with pytest.raises(ValueError, match="mixes examples"):
        model(x)
    check_torch_is_as_before()
    assert engine.ledger.count == 0


def leave_batch(loss):
    _, model, _, batches = private(data_loader=loader(batch_size=20), verify=False)
    x, y = next(iter(batches))
    with suppress(ValueError):
        loss(model(x), y).backward()
    return weakref.ref(model)


def test_batches_that_are_left_behind_leave_no_modes_behind():
    """Nor do the stacks of modes keep their models in memory."""
    gone = [leave_batch(loss) for loss in (F.cross_entropy, centred)]
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    engine, _, _, batches = private(verify=False)
    next(iter(batches))
    engine.close()
    check_torch_is_as_before()


@pytest.mark.parametrize(
    "declared, loss",
    [
        ("mean", lambda out, y: F.cross_entropy(out, y) * len(y)),
        ("mean", lambda out, y: out[:, None].expand(-1, len(y), -1).square().mean()),
        (
            "mean",
            lambda out, y: F.cross_entropy(
                out[..., None].expand(-1, -1, len(y)), y[:, None].expand(-1, len(y))
            ),
        ),
        (
            "sum",
            lambda out, y: F.cross_entropy(out, y, reduction="sum") / (y == 0).sum().add(1).item(),
        ),
        ("sum", lambda out, y: F.cross_entropy(out, y, reduction="none").sum() / len(y)),
    ],
)
def test_a_loss_with_another_factor_than_before_is_refused(declared, loss):
    """Sizes, counts and padded lengths of a batch reach the script as numbers, whose origin is not
    seen.
    """
    engine, model, optimizer, batches = private(loss_reduction=declared, verify=False)
    with pytest.raises(ValueError, match="divided by another number than in earlier batches"):
        train(model, optimizer, batches, criterion=loss)
    assert engine.ledger.count >= 1


def losses_of(out, y):
    return F.cross_entropy(out, y, reduction="none")


@pytest.mark.parametrize(
    "declared, loss",
    [
        ("sum", lambda out, y: (losses_of(out, y) / len(y)).sum()),
        ("sum", lambda out, y: losses_of(out, y).mul_(1 / len(y)).sum()),
        ("mean", lambda out, y: (losses_of(out, y) / len(y)).mean()),
        ("mean", lambda out, y: F.cross_entropy(out / len(out), y)),
        ("mean", lambda out, y: F.cross_entropy(out / len(out) ** 0.5, y)),
        ("sum", lambda out, y: (losses_of(out, y) / torch.tensor(len(y))).sum()),
        ("sum", lambda out, y: (losses_of(out, y) * (torch.ones(len(y)) / len(y))).sum()),
        ("sum", lambda out, y: (losses_of(out, y) * (B / len(y))).sum()),
        ("sum", lambda out, y: (losses_of(out, y) / max(1, len(y) - 1)).sum()),
        ("mean", lambda out, y: losses_of(out, y).clamp(max=B / len(y)).mean()),
        ("mean", lambda out, y: (out[..., None].expand(-1, -1, len(y)).mean(2)).sum(1).mean()),
    ],
)
def test_a_number_that_follows_the_size_of_the_batch_is_refused(declared, loss):
    engine, model, optimizer, batches = private(loss_reduction=declared, verify=False)
    with pytest.raises(ValueError, match="follows a length of the batch"):
        train(model, optimizer, batches, criterion=loss)
    assert engine.ledger.count >= 1


def weigh_by_shares(out, y):
    """The factors of both means add up to one."""
    share = 1 / len(y)
    return share * losses_of(out, y).mean() + (1 - share) * out.square().sum(1).mean()


def test_factors_that_make_up_for_each_other_are_refused():
    engine, model, optimizer, batches = private(verify=False)
    with pytest.raises(ValueError, match="divided by another number than in earlier batches"):
        train(model, optimizer, batches, criterion=weigh_by_shares)
    assert engine.ledger.count >= 1


def clip_at_the_median(out, y):
    losses = losses_of(out, y)
    return losses.clamp(max=1.1 * sorted(losses.tolist())[len(y) // 2]).mean()


def weigh_by_a_count(out, y):
    return (losses_of(out, y) * (1 + int((y == 0).sum()))).mean()


def branch_on_a_value(out, y):
    losses = losses_of(out, y)
    return losses.mean() if losses.mean() > 1.1 else losses.square().mean()


@pytest.mark.parametrize("loss", [clip_at_the_median, weigh_by_a_count, branch_on_a_value])
def test_a_loss_that_follows_what_the_script_has_read_is_refused(loss):
    engine, model, optimizer, batches = private(verify=False)
    with pytest.raises(ValueError, match=r"in another way .*; read them after loss.backward\(\)"):
        train(model, optimizer, batches, criterion=loss)
    assert engine.ledger.count >= 1


def test_numbers_of_a_list_of_the_batch_are_refused():
    def collate(rows):
        return torch.utils.data.default_collate(rows)[0], [int(y) for _, y in rows]

    _, model, optimizer, batches = private(data_loader=loader(collate_fn=collate), verify=False)
    with pytest.raises(ValueError, match="batch tensors alone"):
        train(model, optimizer, batches, criterion=lambda out, y: (out / (1 + y.count(0))).mean())


@pytest.mark.parametrize("size", [3, 4])
def test_only_a_third_length_tells_a_schedule_from_a_scaled_length(size):
    numbers = ScriptNumbers()
    for step in (1, 2):
        numbers.check(1.0, ["mul", 0.1 * step], [2 * step], is_read=False)
    follows = pytest.raises(ValueError, match="follows a length") if size == 3 else nullcontext()
    with follows:
        numbers.check(1.0, ["mul", 0.1 * 3], [2 * size], is_read=False)


def test_an_array_that_is_written_is_refused_as_a_write_into_the_batch():
    engine, model, optimizer, batches = private(verify=False)
    x, y = next(iter(batches))
    array = x.numpy()
    array -= array.mean(0)
    with pytest.raises(ValueError, match="stands numpy: an array was written that shares its memo"):
        F.cross_entropy(model(x), y).backward()
    assert engine.ledger.count == 0


def test_means_over_the_batch_may_be_logged():
    engine, model, optimizer, batches = private(verify=False)
    for x, y in batches:
        out = model(x)
        out.detach().mean(0).numpy().sum()
        F.cross_entropy(out, y).backward()
        optimizer.step()
    assert engine.ledger.count == len(batches)


def test_a_schedule_and_a_random_flip_are_taken():
    engine, model, optimizer, batches = private(verify=False)
    for step, (x, y) in enumerate(batches):
        out = model(x if step % 2 else x.flip(1))
        (losses_of(out, y) + 0.1 * step * out.square().sum(1)).mean().backward()
        optimizer.step()
    assert engine.ledger.count == len(batches)


def test_a_look_at_the_loss_now_and_then_is_taken():
    engine, model, optimizer, batches = private(verify=False)
    for step, (x, y) in enumerate(batches):
        out = model(x)
        loss = F.cross_entropy(out, y)
        if step % 2:
            (out.argmax(1) == y).double().mean().item()
            with torch.no_grad():
                losses_of(out, y).max().item()
        loss.backward()
        optimizer.step()
    assert engine.ledger.count == len(batches)


@pytest.mark.parametrize(
    "declared, loss",
    [
        ("mean", lambda out, y: losses_of(out, y).sum() / len(y)),
        ("sum", lambda out, y: (losses_of(out, y) / 8).sum()),
        ("mean", lambda out, y: (out.square() / out.shape[1]).sum(1).mean()),
    ],
)
def test_a_mean_by_hand_and_constants_are_taken(declared, loss):
    engine, model, optimizer, batches = private(loss_reduction=declared, verify=False)
    train(model, optimizer, batches, criterion=loss)
    assert engine.ledger.count == len(batches)


def test_ignored_labels_count_in_the_divisor():
    """How many labels of a batch are left out is private: the mean divides by the number of all."""
    _, model, optimizer, batches = private(max_grad_norm=1e6)
    before, reference = weights(model), mlp()
    x, y = next(iter(batches))
    y = torch.where(y == 0, -100, y)
    assert 0 < int((y == -100).sum()) < len(y)
    backward(model, (x, y))
    optimizer.step()
    F.cross_entropy(reference(x), y, reduction="sum").backward()
    moved = torch.cat([p.grad.flatten() for p in reference.parameters()]) / 8
    torch.testing.assert_close(before - weights(model), 0.1 * moved, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [torch.clone, nn.Parameter])
@pytest.mark.parametrize("where", ["input", "loss"])
def test_what_an_earlier_batch_has_left_is_no_public_number(where, make):
    """One example of an earlier batch would move the gradients of a whole later one."""
    _, model, optimizer, batches = private()
    left = []
    steps = 0
    with pytest.raises(ValueError, match="an earlier batch"):
        for x, y in batches:
            mean = left[-1] if left else torch.zeros((), dtype=torch.float64)
            if where == "input":
                loss = F.cross_entropy(model(x + mean), y)
            else:
                loss = F.cross_entropy(model(x), y) * (1 + mean)
            left.append(make(loss.detach()))
            loss.backward()
            optimizer.step()
            steps += 1
    assert steps == 1


def test_what_a_batch_of_one_has_left_is_no_public_number():
    _, model, optimizer, batches = private()
    mean = torch.ones((), dtype=torch.float64)
    with (
        pytest.raises(ValueError, match="an earlier batch"),
        cut(batches, optimizer, 1) as parts,
    ):
        for x, y in parts:
            loss = F.cross_entropy(model(x), y) / mean
            mean = 0.9 * mean + 0.1 * loss.detach()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("size", [1, 8])
def test_a_gradient_of_backward_multiplies_the_loss(size):
    settings = {"max_grad_norm": 100.0, "data_loader": loader(batch_size=20)}
    releases = []
    for gradient in (torch.tensor(-0.1, dtype=torch.float64), None):
        _, model, optimizer, batches = private(**settings)
        with cut(batches, optimizer, size) as parts:
            for x, y in parts:
                loss = F.cross_entropy(model(x), y)
                if gradient is None:
                    loss = -0.1 * loss
                loss.backward(gradient)
                optimizer.step()
        releases.append(weights(model))
    torch.testing.assert_close(*releases)
    assert not torch.equal(releases[0], weights(mlp()))


def perturb_once(model, x, y, reduction):
    """Return inputs of FGSM: a step along the gradient at the inputs."""
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(z), y, reduction=reduction), z)
    return (z + g).detach()


def perturb_often(model, x, y, reduction):
    """Return inputs of PGD: a perturbation that begins as zeros, and is projected."""
    d = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        loss = F.cross_entropy(model(x + d), y, reduction=reduction)
        g = torch.autograd.grad(loss, [d])[0]
        d = (d + g).clamp(-0.1, 0.1).detach().requires_grad_()
    return x + d.detach()


@pytest.mark.parametrize("perturb", [perturb_once, perturb_often])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("alone", [False, True])
def test_adversarial_examples_are_those_of_each_example(perturb, reduction, alone):
    """Also of a mean, whose gradients at the inputs are N times smaller in plain torch."""
    own = OneByOne() if alone else mlp()
    reference = copy.deepcopy(own)
    _, model, optimizer, batches = private(
        own, data_loader=loader(batch_size=20), max_grad_norm=0.1
    )
    before = weights(model)
    x, y = next(iter(batches))
    F.cross_entropy(model(perturb(model, x, y, reduction)), y).backward()
    optimizer.step()
    rows = [perturb(reference, x[i : i + 1], y[i : i + 1], reduction) for i in range(len(x))]
    moved = clipped_sum(reference, (torch.cat(rows), y), 0.1) / 20
    torch.testing.assert_close(before - weights(model), 0.1 * moved, rtol=1e-6, atol=1e-9)


def penalise_gradients(model, x, y):
    z = x.clone().requires_grad_()
    losses = F.cross_entropy(model(z), y, reduction="none")
    (g,) = torch.autograd.grad(losses.sum(), z, create_graph=True)
    return (losses + g.square().sum(1)).mean()


def divide_gradients(model, x, y):
    """The size of the batch decides what it adds."""
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(z), y, reduction="sum") / len(x), z)
    return F.cross_entropy(model(z + g), y)


def mix_gradients(model, x, y):
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(Mixing.apply(model(z)), y), z)
    return F.cross_entropy(model(z + g), y)


def share_a_perturbation(model, x, y):
    d = torch.zeros(1, 6, dtype=x.dtype, requires_grad=True)
    (g,) = torch.autograd.grad(F.cross_entropy(model(x + d), y), d)
    return F.cross_entropy(model(x + g), y)


def penalise_jacobians(model, x, y):
    rows = torch.func.vmap(torch.func.jacrev(lambda row: model(row[None])[0]))(x)
    return F.cross_entropy(model(x), y) + rows.square().sum((1, 2)).mean()


def penalise_each(model, x, y):
    penalty = sum(p.square().sum() for p in model.parameters())
    return (F.cross_entropy(model(x), y, reduction="none") + penalty).mean()


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (penalise_jacobians, "inside of torch.func.*; train with dpkfc.Session"),
        (penalise_gradients, "create_graph=True.*; train with dpkfc.Session"),
        (divide_gradients, "hides its examples|not a sum over examples"),
        (mix_gradients, "hides its examples|not a sum over examples"),
        (share_a_perturbation, "hides its examples|not a sum over examples"),
        (penalise_each, "uses '.*' beside the outputs of the model: .*#penalties"),
    ],
)
def test_gradients_that_belong_to_no_example_are_refused(loss, match):
    engine, model, _, batches = private(data_loader=loader(batch_size=20), verify=False)
    x, y = next(iter(batches))
    with pytest.raises(ValueError, match=match) as caught:
        loss(model, x, y).backward()
    assert len(str(caught.value)) <= 160
    assert engine.ledger.count == 0


def test_a_backward_pass_to_some_parameters_is_one_error_and_spends_nothing():
    engine, model, optimizer, batches = private()
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(ValueError, match="freeze the other parameters"):
        loss.backward(inputs=list(model[2].parameters()))
    with pytest.raises(RuntimeError, match="without a backward pass"):
        optimizer.step()
    assert engine.ledger.count == 0
