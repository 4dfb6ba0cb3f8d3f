"""Parameters that a container reads itself, followed through its forward pass instead of running it again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from dpkfc.gradients import rules
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.tape import Tape
from dpkfc.gradients.verify import check_whole_batch
from tests.gradients.loop import assert_equals_a_loop, examples, taped

T, D = 5, 4


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1)


class Vision(nn.Module):
    """Class and mask tokens, positions, layer scale, latent queries, a temperature: a transformer's raw parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head, self.drop = nn.Linear(3, D), nn.Linear(D, 2), nn.Dropout(dropout)
        self.token, self.blank = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Parameter(torch.randn(1, T + 4, D))
        self.gain, self.temperature = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(()))
        self.latents = nn.Parameter(torch.randn(3, D))
        self.prompts = nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        x = self.embed(x)
        hidden = (torch.arange(t) % 2 == 0).view(1, t, 1)
        x = torch.where(hidden, self.blank.expand(n, t, -1), x)
        x = torch.cat([self.token.expand(n, -1, -1), x], dim=1)
        x = self.drop(x + self.position[:, : t + 1].to(x.dtype))
        x += self.prompts[0]
        keys = torch.cat([self.prompts[1].view(1, 1, -1).repeat(n, 1, 1), x], 1)
        read = F.scaled_dot_product_attention(self.latents.unsqueeze(0).expand(n, -1, -1), keys, keys)
        return self.head((1 - torch.sigmoid(self.gain)) * read) * self.temperature.exp()


def followed(model: nn.Module) -> bool:
    """Whether its parameters are followed in a batch of three."""
    layers = find_layers(model)
    tape = Tape(model, layers)
    with tape:
        losses = loss_fn(model, (randn(3, T, 3),))
    calls = tape.backward(losses)
    (own,) = (layer for layer in layers if layer.rule == "fallback")
    return all(call.gradients is not None for call in calls[own.name]) and not own.direct.opaque


@pytest.mark.parametrize("n", [1, 2, T, T + 1])
def test_followed_parameters_equal_a_loop(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Vision().double(), (randn(n, T, 3),)
    if n > 1:
        monkeypatch.setattr(rules, "fallback_gradients", None)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, n))


def test_dropout_below_is_no_obstacle() -> None:
    model, batch = Vision(dropout=0.5).double(), (randn(4, T, 3),)
    assert followed(model)
    check_whole_batch(model, find_layers(model), loss_fn, batch, 4)


def test_a_frozen_one_is_left_alone() -> None:
    model, batch = Vision().double(), (randn(3, T, 3),)
    model.token.requires_grad_(False)
    model.gain.requires_grad_(False)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, 3))


class Read(nn.Module):
    """A container with one parameter `[D]` and one use of it."""

    def __init__(self, use, shape: tuple[int, ...] = (D,)) -> None:
        super().__init__()
        self.embed, self.own, self.use = nn.Linear(3, D), nn.Parameter(torch.randn(*shape)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.embed(x), self.own)


class Twice(torch.autograd.Function):
    """A use that no function mode sees."""

    @staticmethod
    def forward(ctx, x: Tensor, p: Tensor) -> Tensor:
        return x + 2 * p

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, 2 * g.sum((0, 1))


def _set(x: Tensor, p: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = p
    return x


USES = {
    "a matrix": lambda x, p: x @ torch.diag(p),
    "set by an index": _set,
    "unseen": lambda x, p: Twice.apply(x, p),
    "seen and unseen": lambda x, p: Twice.apply(x * p, p),
    "an argument of a function": lambda x, p: F.layer_norm(x, (D,), p),
    "random": lambda x, p: x + F.dropout(p, 0.0),
    "in two pieces": lambda x, p: x + torch.cat([p[:2], p[2:]]),
    "handed on as it is": lambda x, p: p.view(1, D),
    "written to": lambda x, p: x + p.clone().add_(x.detach().mean() * 0 + 1.0),
    "in a list": lambda x, p: torch.stack([x, x + p, torch.broadcast_tensors(x, p)[1]]).sum(0),
    "positions as many as examples": lambda x, p: x + p.unsqueeze(0).expand(x.shape[1], -1),
    "spread within an example": lambda x, p: x + p.view(1, 1, D).expand(1, x.shape[1], D),
    "a tensor that all share": lambda x, p: x + p * torch.ones(x.shape[1], D, dtype=x.dtype),
    "another shared one": lambda x, p: x * (p * p).exp(),
}


@pytest.mark.parametrize("n", [3, T])
@pytest.mark.parametrize("use", USES)
def test_whatever_the_use_the_gradients_are_those_of_a_loop(use: str, n: int) -> None:
    """In batches as long as the other axis too, where a row could be taken for an example."""
    model, batch = Read(USES[use]).double(), (randn(n, T, 3),)
    for _ in range(2):
        assert_equals_a_loop(model, loss_fn, batch, examples(batch, n))


def test_what_was_settled_at_one_size_holds_at_another() -> None:
    model = Read(USES["positions as many as examples"]).double()
    layers = find_layers(model)
    for n in (3, T, 2, T, 1):
        batch = (randn(n, T, 3),)
        tape = Tape(model, layers, batch_size=n)
        with tape:
            losses = loss_fn(model, batch)
        (own,) = (layer for layer in layers if layer.rule == "fallback")
        found = rules.blocks_of(own, tape.backward(losses)[own.name], n).grads["own"]
        for i in range(n):
            single = loss_fn(model, (batch[0][i : i + 1],)).sum()
            torch.testing.assert_close(found[i], torch.autograd.grad(single, model.own)[0])


def test_followed_and_not() -> None:
    assert followed(Vision().double()) and followed(Read(lambda x, p: x * p).double())
    for use in ("a matrix", "set by an index", "unseen", "seen and unseen", "a tensor that all share"):
        assert not followed(Read(USES[use]).double()), use


def test_a_call_that_repeats_and_one_that_is_checkpointed() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Read(lambda x, p: (x * p).tanh() + p)
            self.back = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.back(checkpoint(self.inner, x, use_reentrant=False))
            return self.inner(x)

    batch = (randn(3, T, 3),)
    assert_equals_a_loop(Outer().double(), loss_fn, batch, examples(batch, 3))


@pytest.mark.parametrize("seen_before", [True, False])
def test_an_example_without_a_finite_gradient_leaves_the_others_as_they_were(seen_before: bool) -> None:
    model, x = Vision().double(), randn(4, T, 3)
    layers = find_layers(model)
    (own,) = (layer for layer in layers if layer.rule == "fallback")

    def rows(x: Tensor) -> dict[str, Tensor]:
        tape = Tape(model, layers)
        with tape:
            losses = loss_fn(model, (x,))
        return rules.blocks_of(own, tape.backward(losses)[own.name], 4).grads

    broken = x.clone()
    broken[2] = float("nan")
    after = None if seen_before else rows(broken)
    before = rows(x)
    after = after or rows(broken)
    for name, gradients in before.items():
        torch.testing.assert_close(after[name][[0, 1, 3]], gradients[[0, 1, 3]])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_followed_after_an_error(error: type[BaseException]) -> None:
    def fails(x: Tensor, p: Tensor) -> Tensor:
        raise error

    model = Read(fails).double()
    tape = Tape(model, find_layers(model))
    with pytest.raises(error), tape:
        model(randn(2, T, 3))
    assert not _get_current_function_mode_stack()


def test_under_autocast() -> None:
    model, x = Vision(), torch.randn(4, T, 3)

    def cast(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(*batch).float().flatten(1).sin().sum(1)

    assert followed(model.double())
    found, expected = taped(model.float(), cast, (x,), 4), taped(model, loss_fn, (x,), 4)
    for one, other in zip(found, expected, strict=True):
        for name, gradient in other.items():
            assert float((one[name] - gradient).norm()) <= 0.1 * float(gradient.norm()) + 0.1, name
