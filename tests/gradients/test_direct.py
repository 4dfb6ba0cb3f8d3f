"""Parameters that a container reads itself, followed through its forward pass instead of running it again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from dpkfc.gradients import rules
from dpkfc.gradients.accumulate import Clip, ClippedSummer
from dpkfc.gradients.layers import Layer, find_layers
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
    "positions in a product": lambda x, p: x + (x @ x.mT).tanh() @ p.expand(x.shape[1], -1),
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


def _numbers(model: nn.Module, x: Tensor, loss=loss_fn) -> Tensor:
    torch.manual_seed(5)  # the same masks of dropout in every pass
    return loss(model, (x,))


def assert_clipped_as_in_a_loop(
    model: nn.Module, layers: list[Layer], x: Tensor, broken: tuple[int, ...] = (), sane: Tensor | None = None, loss=loss_fn
) -> None:
    """Norms and clipped sum of one batch; `sane` holds other examples in place of those that are broken."""
    parameters = dict(model.named_parameters())
    zero = {name: torch.zeros_like(p) for name, p in parameters.items()}
    losses, bound, expected = _numbers(model, x if sane is None else sane, loss), 0.7, dict(zero)
    norms = torch.full((len(x),), float("nan"), dtype=torch.float64)
    for i in set(range(len(x))).difference(broken):
        grads = torch.autograd.grad(losses[i], list(parameters.values()), retain_graph=True, allow_unused=True)
        row = {name: zero[name] if g is None else g for name, g in zip(zero, grads, strict=True)}
        norms[i] = torch.cat([g.flatten() for g in row.values()]).norm()
        expected = {name: expected[name] + g * min(1.0, bound / float(norms[i])) for name, g in row.items()}
    tape, summer = Tape(model, layers, batch_size=len(x)), ClippedSummer(layers, {}, Clip(bound))
    with tape:
        losses = _numbers(model, x, loss)
    found = summer.add(tape.backward(losses), len(x))
    fine = norms.isfinite()
    torch.testing.assert_close(found.norms[fine], norms[fine], rtol=1e-9, atol=1e-10)
    assert not found.factors[list(broken)].any()
    for name, total in summer.result().items():
        torch.testing.assert_close(total, expected[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def _own(layers: list[Layer]) -> Layer:
    (own,) = (layer for layer in layers if layer.rule == "fallback")
    return own


@pytest.fixture
def never_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "fallback_gradients", None)


def _steep(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Where an input is large, so is the gradient: a few of them add up to infinity."""
    return loss_fn(model, batch) * torch.where(batch[0][:, 0, 0] > 9, batch[0].new_tensor(1e307), 1.0)


@pytest.mark.usefixtures("never_run_again")
@pytest.mark.parametrize(("value", "loss"), [(float("nan"), loss_fn), (float("inf"), loss_fn), (10.0, _steep)])
@pytest.mark.parametrize("broken", [(2,), (0, 1, 3)])
@pytest.mark.parametrize("seen_before", [True, False])
def test_with_dropout_broken_examples_decide_nothing(seen_before: bool, broken: tuple[int, ...], value: float, loss) -> None:
    model, x = Vision(dropout=0.5).double(), randn(4, T, 3)
    layers, first = find_layers(model), x.clone()
    if seen_before:
        assert_clipped_as_in_a_loop(model, layers, x)
    first[list(broken)] = value
    assert_clipped_as_in_a_loop(model, layers, first, broken, x, loss)
    assert not _own(layers).direct.opaque
    assert bool(_own(layers).direct.followed) == (seen_before or len(broken) == 1), "a single row does not show enough"
    assert_clipped_as_in_a_loop(model, layers, x)


@pytest.mark.usefixtures("never_run_again")
@pytest.mark.parametrize("seen_before", [True, False])
def test_with_dropout_all_examples_may_be_broken(seen_before: bool) -> None:
    model, x = Vision(dropout=0.5).double(), randn(4, T, 3)
    layers = find_layers(model)
    if seen_before:
        assert_clipped_as_in_a_loop(model, layers, x)
    assert_clipped_as_in_a_loop(model, layers, x * torch.nan, (0, 1, 2, 3), x)
    assert not _own(layers).direct.opaque


@pytest.mark.usefixtures("never_run_again")
def test_with_dropout_an_example_alone_may_be_broken() -> None:
    model, layers = (m := Vision(dropout=0.5).double()), find_layers(m)
    assert_clipped_as_in_a_loop(model, layers, torch.full((1, T, 3), float("nan"), dtype=torch.float64), (0,), randn(1, T, 3))
    assert_clipped_as_in_a_loop(model, layers, randn(1, T, 3))


def _root(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Its gradient is NaN where the output is zero, while the loss is finite."""
    return model(*batch).flatten(1).square().sum(1).sqrt()


@pytest.mark.usefixtures("never_run_again")
@pytest.mark.parametrize("seen_before", [True, False])
def test_a_finite_loss_may_have_a_broken_gradient(seen_before: bool) -> None:
    class Masked(Vision):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (x[:, :, :1].amax(1, keepdim=True) < 9)

    model, x = Masked(dropout=0.5).double(), randn(4, T, 3)
    layers, large = find_layers(model), x.clone()
    large[1] = 10
    if seen_before:
        assert_clipped_as_in_a_loop(model, layers, x, loss=_root)
    assert bool(_numbers(model, large, _root).isfinite().all())
    assert_clipped_as_in_a_loop(model, layers, large, (1,), x, loss=_root)


@pytest.mark.parametrize("use", ["unseen", "seen and unseen", "positions in a product"])
@pytest.mark.parametrize("n", [4, T])
def test_what_cannot_be_followed_is_found_beside_a_broken_example(use: str, n: int) -> None:
    model, x = Read(lambda x, p: USES[use](x, p) + 0 * p).double(), randn(n, T, 3)
    layers, broken = find_layers(model), x.clone()
    broken[1] = float("nan")
    assert_clipped_as_in_a_loop(model, layers, broken, (1,), x)
    assert not _own(layers).direct.followed
    assert_clipped_as_in_a_loop(model, layers, x)
    assert _own(layers).direct.opaque


def test_where_nothing_shows_whose_the_rows_are_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken gradient of a finite loss beside zeros: the row might be a position that all examples have."""
    model, again = Read(lambda x, p: x * p).double(), list[int]()
    layers, real = find_layers(model), rules.fallback_gradients

    def noted(*args, **kwargs):
        again.append(1)
        return real(*args, **kwargs)

    def loss(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out = m(*batch).flatten(1).sum(1) * 0
        return torch.cat([out[:1].square().sqrt(), out[1:]])

    monkeypatch.setattr(rules, "fallback_gradients", noted)
    tape = Tape(model, layers)
    with tape:
        losses = loss(model, (randn(3, T, 3),))
    found = rules.blocks_of(_own(layers), tape.backward(losses)[""], 3).grads["own"]
    assert bool(found[0].isnan().any()) and not found[1:].any()
    assert again and not _own(layers).direct.opaque and not _own(layers).direct.followed


@pytest.mark.usefixtures("never_run_again")
@pytest.mark.parametrize("broken", [(), (1,)])
def test_with_dropout_gradients_may_all_be_zero_at_first(broken: tuple[int, ...]) -> None:
    model, x = Vision(dropout=0.5).double(), randn(4, T, 3)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    layers, first = find_layers(model), x.clone()
    first[list(broken)] = float("nan")
    assert_clipped_as_in_a_loop(model, layers, first, broken, x)
    assert not _own(layers).direct.followed and not _own(layers).direct.opaque, "zeros show nothing"
    nn.init.normal_(model.head.weight)
    assert_clipped_as_in_a_loop(model, layers, x)
    assert _own(layers).direct.followed


SPREAD = {  # as many rows as positions, or as examples: in a batch of T nobody can tell from the shapes
    "positions": lambda x, p: x + p.expand(x.shape[1], -1),
    "positions repeated": lambda x, p: x * p.repeat(x.shape[1], 1).unsqueeze(0),
    "positions, then examples": lambda x, p: torch.cat([p.expand(x.shape[1], -1).expand(len(x), -1, -1), x], 1),
    "positions twice": lambda x, p: (x + (q := 2 * p.expand(x.shape[1], -1))) * q,
    "examples": lambda x, p: torch.cat([p.expand(len(x), -1).unsqueeze(1), x], 1),
    "examples, then positions": lambda x, p: x + p.expand(len(x), -1).unsqueeze(1).expand(-1, x.shape[1], -1),
    "examples without positions": lambda x, p: (x.mean(1) + p.expand(len(x), -1)).tanh() * p,
    "examples written to": lambda x, p: x + p.expand(len(x), -1).clone().mul_(2).unsqueeze(1),
    "examples behind positions": lambda x, p: (x.transpose(0, 1) + p.expand(len(x), -1)).transpose(0, 1),
    "examples and positions": lambda x, p: torch.cat([p.expand(len(x), -1).unsqueeze(1), x + p.expand(x.shape[1], -1)], 1),
}


_SIZES = [(T, 3, T), (3, T, 1), (1, T)]  # behind positions, examples are left to the fallback where nothing is known yet


class Spread(Read):
    def __init__(self, use) -> None:
        super().__init__(use)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(super().forward(x)))


@pytest.mark.usefixtures("never_run_again")
@pytest.mark.parametrize(("use", "sizes"), [(u, s) for u in SPREAD for s in _SIZES if s[0] == 3 or "behind" not in u])
def test_with_dropout_a_batch_may_be_as_long_as_the_positions(use: str, sizes: tuple[int, ...]) -> None:
    model = Spread(SPREAD[use]).double()
    layers = find_layers(model)
    for n in sizes:
        assert_clipped_as_in_a_loop(model, layers, randn(n, T, 3))
        assert not _own(layers).direct.opaque
    assert _own(layers).direct.followed


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
