"""Parameters that are no layer's weight: tokens, positions, scales, temperatures, lists of them,
and borrowed weights.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.discovery import find_layers
from tests.gradients.loop import assert_equals_a_loop, examples

N, D = 4, 4


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Vision(nn.Module):
    """What a vision transformer owns: class token, position embedding, layer scale, a temperature
    at the root.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = parameter(1, 1, D), parameter(1, 4, D)
        self.gamma, self.temperature = parameter(D), parameter()
        self.embed, self.mix, self.head = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.position
        x = x + self.gamma * torch.tanh(self.mix(x)) * x.mean(1, keepdim=True)
        return self.head(x[:, 0]) * self.temperature.exp()


def test_tokens_positions_scales_and_a_temperature_at_the_root() -> None:
    batch = (randn(N, 3, 3),)
    assert_equals_a_loop(Vision().double(), loss_fn, batch, examples(batch, N))


class Holder(nn.Module):
    """Lists and dictionaries of parameters, nested, in containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([parameter(D), parameter(D)])
        self.named = nn.ParameterDict({"shift": parameter(D), "scale": parameter()})
        self.store = nn.Module()
        self.store.deep = nn.ModuleDict(
            {"list": nn.ParameterList([parameter(D)]), "layer": nn.Linear(D, D)}
        )
        self.store.bare = parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gains[0] + self.named["shift"] * self.named["scale"].exp()
        x = self.store.deep["layer"](x) * self.store.deep["list"][0] + self.store.bare
        return torch.tanh(x) * self.gains[1]


def test_lists_and_dictionaries_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, D), Holder(), nn.ModuleList([Holder()])[0]).double()
    layers = {layer.name: layer for layer in find_layers(model)}
    assert set(layers) == {"0", "1", "1.store.deep.layer", "2", "2.store.deep.layer"}
    assert set(layers["1"].parameters) == {
        "gains.0",
        "gains.1",
        "named.shift",
        "named.scale",
        "store.deep.list.0",
        "store.bare",
    }
    batch = (randn(N, 5, 3),)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, N))


def test_a_frozen_entry_of_a_list_stays_out() -> None:
    model = Holder().double()
    model.gains[0].requires_grad_(False)
    model.named["scale"].requires_grad_(False)
    batch = (randn(N, D),)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, N))


def test_a_container_that_nothing_calls_is_refused_by_name() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(3, 3), "gains": nn.ParameterList([parameter(3)])})
    with pytest.raises(
        ValueError, match=r"'gains.0' is held by ParameterList.*Give the model a forward function"
    ):
        find_layers(model)
    model["gains"][0].requires_grad_(False)
    assert [layer.name for layer in find_layers(model)] == ["layer"]


class Borrower(nn.Module):
    """Uses the weight of a layer behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(self.embed(x).tanh(), self.embed.weight))


class Stranger(nn.Module):
    """A module that answers for a parameter which only another module uses."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Sequential(nn.Linear(D, D))
        self.owner.gain = parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.owner(x) * self.owner.gain


class Method(nn.Module):
    """A module that is used by a method of another name than forward."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = parameter(D)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

        def encode(self, x: Tensor) -> Tensor:
            return self.forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = self.Inner(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner.encode(x))


@pytest.mark.parametrize("kind", [Borrower, Stranger, Method])
def test_a_parameter_used_outside_its_module_counts(kind: type[nn.Module]) -> None:
    batch = (randn(N, D),)
    assert_equals_a_loop(kind().double(), loss_fn, batch, examples(batch, N))


class InLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.head = parameter(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_a_temperature_that_only_the_loss_uses_counts() -> None:
    def scaled(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return loss_fn(m, batch) * m.temperature

    batch = (randn(N, D),)
    assert_equals_a_loop(InLoss().double(), scaled, batch, examples(batch, N))


class Token(nn.Module):
    """Returns a parameter without having seen the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token = parameter(1, 1, D)

    def forward(self) -> Tensor:
        return self.token * 2


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = Token(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.token().expand(len(x), -1, -1), x], 1))


def test_a_module_that_never_sees_the_batch() -> None:
    batch = (randn(N, 3, D),)
    assert_equals_a_loop(WithToken().double(), loss_fn, batch, examples(batch, N))


def test_a_vision_transformer_of_transformers_has_dropout_of_rate_zero() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        image_size=4,
        patch_size=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.ViTForImageClassification(config).double().train()

    def logits(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return m(batch[0]).logits.sin().sum(1)

    batch = (randn(3, 3, 4, 4),)
    assert_equals_a_loop(model, logits, batch, examples(batch, 3))
