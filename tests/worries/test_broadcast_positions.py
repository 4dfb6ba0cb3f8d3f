"""Positions and parameters that all examples share: broadcasting may not add the examples' gradients up."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dpkfc.gradients.verify import check_per_example_gradients
from torch import Tensor, nn

from dpkfc.gradients.accumulate import Clip, ClippedSummer
from dpkfc.gradients.contributions import capture
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.tape import Tape
from tests.gradients.whitened import check, clipped, example_rows, looped

V, D, L = 9, 4, 12


class Learned(nn.Module):
    """A raw parameter that is handed out without a batch axis, cut to the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, L, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:, : x.shape[1]]


class Text(nn.Module):
    """Token embeddings plus something that all examples share."""

    def __init__(self, shared: Callable[[Text, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(L, D)
        self.norm, self.linear, self.learned = nn.LayerNorm(D), nn.Linear(D, D), Learned()
        self.register_buffer("waves", torch.sin(torch.arange(L * D).reshape(1, L, D) * 0.7))
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.shared = shared

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        h = h + self.shared(self, h)
        return self.head(torch.tanh(self.mix(h)).square().mean(1))


def count(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1])


WAYS: dict[str, Callable[[Text, Tensor], Tensor]] = {
    "ids [1, T]": lambda m, h: m.positions(count(h)[None]),
    "ids [T]": lambda m, h: m.positions(count(h)),
    "ids [T], expanded later": lambda m, h: m.positions(count(h)).expand(len(h), -1, -1),
    "one id": lambda m, h: m.positions(torch.tensor([3]))[:, None],
    "norm of positions": lambda m, h: m.norm(m.positions(count(h)[None])),
    "linear on positions [T]": lambda m, h: m.linear(m.positions(count(h))),
    "linear on waves": lambda m, h: m.linear(m.waves[:, : h.shape[1]]),
    "norm of waves": lambda m, h: m.norm(m.waves[:, : h.shape[1]]),
    "raw parameter": lambda m, h: m.learned(h),
    "positions twice": lambda m, h: m.positions(count(h)[None]) + m.positions(count(h).flip(0)),
    "positions and tokens in one table": lambda m, h: m.tokens(count(h)[None]) * m.positions(count(h)[None]),
}


def text(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Text(WAYS[way]).double()
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    used = {"tokens", "mix", "head"} | {name for name in ("positions", "norm", "linear", "learned") if name in _used(way)}
    for name, module in model.named_children():
        module.requires_grad_(name in used)
    return model


def _used(way: str) -> set[str]:
    words = {"norm": "norm", "linear": "linear", "raw": "learned", "positions": "positions", "id": "positions"}
    words |= {"ids": "positions"}
    return {module for word, module in words.items() if word in way.replace(",", "").split()}


def batch(n: int, t: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, V, (n, t)), torch.randint(0, 3, (n,))


def loss_fn(model: nn.Module, examples: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


@pytest.mark.parametrize("kind", [None, "dense"])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("way", WAYS)
def test_every_example_has_a_gradient_of_its_own(way: str, n: int, kind: str | None) -> None:
    check(text(way), batch(n, 7), loss_fn, kind)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_the_same_numbers_and_verification_agrees(way: str) -> None:
    model, examples = text(way), batch(2, 7)
    plain = loss_fn(model, examples)
    with Tape(model, find_layers(model), batch_size=2):
        assert torch.equal(loss_fn(model, examples), plain)
    check_per_example_gradients(
        model, find_layers(model), loss_fn, examples, [example_rows(examples, [i]) for i in range(2)]
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_number_of_examples_is_read_from_the_models_input(way: str) -> None:
    """As the probes of a preconditioner need it."""
    model, examples = text(way), batch(4, 7)
    rows = looped(model, examples, loss_fn)
    blocks = capture(model, find_layers(model), lambda m: loss_fn(m, examples))
    for layer in find_layers(model):
        if layer.rule == "embedding":
            expected = torch.stack([row[layer.parameters["weight"]] for row in rows])
            torch.testing.assert_close(blocks[layer.name].per_example(), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_callers_own_backward_pass(way: str) -> None:
    """As the Opacus adapter listens to it."""
    model, examples = text(way), batch(4, 7)
    layers = find_layers(model)
    _, expected = clipped(model, layers, examples, loss_fn, 0.3)
    tape = Tape(model, layers, lambda tape: None, 4.0, 4)
    with tape:
        loss = loss_fn(model, examples).mean()
    loss.backward()
    summer = ClippedSummer(layers, {}, Clip(0.3))
    summer.add(tape.collect(), 4)
    for name, found in summer.result().items():
        torch.testing.assert_close(found, expected[name])


# -- one-dimensional ids as long as the batch ------------------------------------------------------------------------------


def test_positions_as_many_as_examples_are_known_once_another_batch_was_seen() -> None:
    model = text("ids [T]")
    layers = find_layers(model)
    clipped(model, layers, batch(2, 6), loss_fn, 0.3)  # what a session verifies first
    for n in (6, 1, 7):
        examples = batch(n, 6)
        rows = looped(model, examples, loss_fn)
        norms, _ = clipped(model, layers, examples, loss_fn, 0.3)
        exact = torch.stack([torch.sqrt(sum(g.square().sum() for g in row.values())) for row in rows])
        torch.testing.assert_close(norms, exact)


def test_at_first_sight_the_gradients_decide_and_the_fix_is_named() -> None:
    model = text("ids [T]")
    layers = find_layers(model)
    with pytest.raises(ValueError, match=r"'positions' was called with ids of shape \[6\].*use ids of shape \[1, 6\]"):
        clipped(model, layers, batch(6, 6), loss_fn, 0.3)
    clipped(model, layers, batch(6, 6), loss_fn, 0.3)  # seen now


class Labelled(nn.Module):
    """One label an example, embedded from ids [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.head = nn.Embedding(V, D), nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.labels(ids)))


def test_one_id_an_example_needs_no_second_axis() -> None:
    torch.manual_seed(0)
    model = Labelled().double()
    check(model, (torch.randint(0, V, (6,)), torch.randint(0, 3, (6,))), loss_fn, "dense")
    model = Labelled().double()
    examples = (torch.arange(4), torch.randint(0, 3, (4,)))
    capture(model, find_layers(model), lambda m: loss_fn(m, examples))["labels"]


def test_a_listening_tape_that_has_seen_nothing_asks_for_another_shape() -> None:
    model = Labelled().double()
    layers = find_layers(model)
    tape = Tape(model, layers, lambda tape: None, 4.0, 4)
    for seen in (False, True):
        if seen:
            clipped(model, layers, (torch.arange(3), torch.zeros(3, dtype=torch.long)), loss_fn, 1.0)
        with tape:
            loss = loss_fn(model, (torch.arange(4), torch.zeros(4, dtype=torch.long))).mean()
        loss.backward()
        if seen:
            assert set(tape.collect()) == {"labels", "head"}
        else:
            with pytest.raises(ValueError, match=r"one id an example use \[4, 1\]"):
                tape.collect()


# -- what is not an example's own is refused -------------------------------------------------------------------------------


def test_a_shared_output_of_which_one_row_is_taken_is_refused() -> None:
    """The first row would carry every example's gradient; found without any verification."""
    model = Text(lambda m, h: m.positions(count(h)[None])[0]).double()
    with pytest.raises(ValueError, match="gradients of different examples mix"):
        clipped(model, find_layers(model), batch(3, 5), loss_fn, 1.0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions carry notes from Python 3.11 on")
def test_an_axis_that_the_model_adds_itself_is_explained() -> None:
    model = Text(lambda m, h: m.positions(count(h)).repeat(len(h), 1, 1)).double()
    with pytest.raises(RuntimeError) as caught:
        clipped(model, find_layers(model), batch(3, 5), loss_fn, 1.0)
    assert "use ids of shape [1, T]" in "".join(caught.value.__notes__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions carry notes from Python 3.11 on")
@pytest.mark.parametrize("way", ["repeat", "repeat_interleave"])
def test_an_output_that_the_model_repeats_itself_is_explained(way: str) -> None:
    def repeated(m: Text, h: Tensor) -> Tensor:
        p = m.positions(count(h)[None])
        return p.repeat(len(h), 1, 1) if way == "repeat" else p.repeat_interleave(len(h), 0)

    with pytest.raises(RuntimeError) as caught:
        clipped(model := Text(repeated).double(), find_layers(model), batch(3, 5), loss_fn, 1.0)
    assert [note for note in caught.value.__notes__ if "'positions'" in note and "use expand(N, ...)" in note]


def test_time_first_layouts_are_not_taken_for_shared_inputs() -> None:
    model = nn.LSTM(D, D)
    tape = Tape(model, find_layers(model), batch_size=3)
    with tape:
        out = model(torch.randn(1, 3, D))[0]
    assert out.shape == (1, 3, D)


def test_one_shared_id_keeps_its_rank() -> None:
    """[1, d] becomes [N, d], which is never silently aligned with another axis."""
    model = Text(lambda m, h: m.positions(torch.tensor([3]))).double()
    with pytest.raises(RuntimeError, match="size of tensor"):
        clipped(model, find_layers(model), batch(3, 5), loss_fn, 1.0)
    with pytest.raises(ValueError, match="gradients of different examples mix"):
        clipped(model, find_layers(model), batch(5, 5), loss_fn, 1.0)
