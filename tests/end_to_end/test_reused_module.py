"""A module called several times in one forward pass: the norm is that of the sum over its calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from tests.gradients.loop import assert_equals_a_loop, examples
from tests.gradients.whitened import check


class Gain(nn.Module):
    """Covered by the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain)


class Block(nn.Module):
    """What a weight-sharing transformer repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.gain = (
            nn.LayerNorm(4),
            nn.Linear(4, 6),
            nn.Linear(6, 4, bias=False),
            Gain(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(self.down(torch.tanh(self.up(self.norm(x)))))


class Repeated(nn.Module):
    """One inner module, called as `how` says, between a table and a head."""

    def __init__(
        self, inner: Callable[[], nn.Module], how: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(7, 4), inner(), nn.Linear(4, 3)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.how(self.inner, self.table(ids)).mean(1))


def siblings(inner: nn.Module, x: Tensor) -> Tensor:
    """Two branches of different lengths."""
    return inner(x).mean(1, keepdim=True) * inner(x[:, :2]).mean(1, keepdim=True)


def depth(inner: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = inner(x)
    return x


def conv(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(torch.tanh(inner(x.mT))).mT


INNER = {
    "linear": lambda: nn.Linear(4, 4),
    "norm": lambda: nn.LayerNorm(4),
    "fallback": Gain,
    "block": Block,
}
CASES = [(name, inner, how) for name, inner in INNER.items() for how in (siblings, depth)]
CASES += [("conv", lambda: nn.Conv1d(4, 4, 3, padding=1), conv)]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("kind", [None, "dense"])
@pytest.mark.parametrize(
    ("name", "inner", "how"), CASES, ids=[f"{name} {how.__name__}" for name, _, how in CASES]
)
def test_the_sum_over_calls_equals_a_loop(name: str, inner, how, kind: str | None) -> None:
    torch.manual_seed(0)
    model = Repeated(inner, how).double()
    check(model, (torch.randint(0, 7, (5, 6)), torch.randint(0, 3, (5,))), loss_fn, kind)


class Siamese(nn.Module):
    """The whole model is called twice by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids))).mean(1)


def pair_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - model(batch[1])).square().sum(1)


def test_two_inputs_through_one_model() -> None:
    torch.manual_seed(0)
    model = Siamese().double()
    check(model, (torch.randint(0, 7, (4, 6)), torch.randint(0, 7, (4, 3))), pair_loss, "dense")


def test_a_module_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert [layer.name for layer in find_layers(model)] == ["0"]
    with Tape(model, find_layers(model)):
        assert len(shared._forward_hooks) == 1


class Normed(nn.Module):
    """Two factors that are called once more on an identity matrix, for a norm through which no
    gradient goes (as DoRA does).
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = (
            nn.Embedding(7, 4),
            nn.Linear(4, 2, bias=False),
            nn.Linear(2, 4, bias=False),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        norm = self.b(self.a(torch.eye(4, dtype=x.dtype))).detach().norm(dim=0)
        return self.head((self.b(self.a(x)) / norm).mean(1))


@pytest.mark.parametrize("kind", [None, "dense"])
@pytest.mark.parametrize("n", [2, 5])
def test_calls_on_which_no_loss_depends_need_no_batch(n: int, kind: str | None) -> None:
    torch.manual_seed(0)
    check(
        Normed().double(), (torch.randint(0, 7, (n, 5)), torch.randint(0, 3, (n,))), loss_fn, kind
    )


def test_as_many_examples_as_rows_of_the_identity() -> None:
    """The identity has a row for every example here, so each example is differentiated alone."""
    torch.manual_seed(0)
    batch = (torch.randint(0, 7, (4, 5)), torch.randint(0, 3, (4,)))
    assert_equals_a_loop(Normed().double(), loss_fn, batch, examples(batch, 4))


def test_a_layer_without_any_other_call_contributes_zeros() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "seen": nn.Linear(4, 3)}).double()
    layers, x = find_layers(model), torch.randn(5, 4, dtype=torch.float64)
    tape = Tape(model, layers, batch_size=5)
    with tape:
        model["seen"](x)
        losses = model["used"](x).square().sum(1)
    assert not bool(tape.backward(losses)["seen"][0].output_gradients[0].any())
