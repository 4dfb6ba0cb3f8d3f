"""Weights that are computed from other parameters: exact, or refused by name, and never only half
of them.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from dpkfc.gradients.discovery import find_layers
from tests.gradients.loop import assert_equals_a_loop, examples

X = (4, 3, 6, 6)


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1)


def old(function, *args):  # noqa: ANN202
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return function(*args)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def scaled(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        parametrize.register_parametrization(module, name, Scaled())
    return module


def symmetric() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(6, 6), "weight", Symmetric())


CASES = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
    "weight norm of a convolution": lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    "weight norm over all": lambda: parametrizations.weight_norm(nn.Linear(6, 4), dim=None),
    "old weight norm": lambda: old(nn.utils.weight_norm, nn.Linear(6, 4)),
    "old weight norm of a convolution": lambda: old(nn.utils.weight_norm, nn.Conv2d(3, 4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 4)),
    "orthogonal by cayley": lambda: parametrizations.orthogonal(
        nn.Linear(6, 6), orthogonal_map="cayley"
    ),
    "orthogonal by exponential": lambda: parametrizations.orthogonal(
        nn.Linear(6, 6), orthogonal_map="matrix_exp"
    ),
    "spectral norm at rest": lambda: parametrizations.spectral_norm(nn.Linear(6, 4)).eval(),
    "old spectral norm at rest": lambda: nn.utils.spectral_norm(nn.Linear(6, 4)).eval(),
    "symmetric": symmetric,
    "with a parameter": lambda: scaled(nn.Linear(6, 4), "weight", "bias"),
    "two in a row": lambda: scaled(parametrizations.weight_norm(nn.Linear(6, 4)), "weight"),
    "of a norm": lambda: scaled(nn.LayerNorm(6), "weight"),
    "of attention": lambda: scaled(nn.MultiheadAttention(6, 2, batch_first=True), "in_proj_weight"),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5),
}


BY_FALLBACK = {
    "old weight norm",
    "old weight norm of a convolution",
    "old spectral norm at rest",
    "pruned",
}
BY_FALLBACK |= {"of a norm", "of attention"}


class Around(nn.Module):
    """The module between two ordinary layers, called twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 3, 1), inner

    def forward(self, x: Tensor) -> Tensor:
        total = 0.0
        for scale in (1, 2):
            y = self.first(x * scale)
            if isinstance(self.inner, nn.MultiheadAttention):
                y = self.inner(
                    y.flatten(1, 2), y.flatten(1, 2), y.flatten(1, 2), need_weights=False
                )[0]
            else:
                y = self.inner(y)
            total = total + y
        return total


@pytest.mark.parametrize("case", sorted(CASES))
def test_computed_weights_equal_a_loop(case: str) -> None:
    model = Around(CASES[case]()).double()
    batch = (torch.randn(X, dtype=torch.float64),)
    layers = {layer.name: layer for layer in find_layers(model)}
    assert layers["inner"].rule == ("fallback" if case in BY_FALLBACK else "computed")
    assert set(layers) == {"first", "inner"}
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, X[0]))
    loss_fn(
        model, batch
    ).sum().backward()  # and the model is as it was: nothing of the examples is left on it
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_frozen_direction_leaves_an_ordinary_layer() -> None:
    model = Around(old(nn.utils.weight_norm, nn.Linear(6, 4))).double()
    model.inner.weight_v.requires_grad_(False)
    model.inner.weight_g.requires_grad_(False)
    batch = (torch.randn(X, dtype=torch.float64),)
    assert {layer.rule for layer in find_layers(model)} == {"conv", "linear"}
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, X[0]))


@pytest.mark.parametrize("function", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_that_moves_in_every_pass_is_refused(function) -> None:
    model = Around(function(nn.Linear(6, 4)))
    with pytest.raises(
        ValueError, match=r"module 'inner.*power iteration in every forward pass.*eval"
    ) as caught:
        find_layers(model)
    assert len(str(caught.value)) <= 160
    find_layers(model.eval())


def test_a_spectral_norm_of_a_vector_has_nothing_that_moves() -> None:
    model = Around(parametrizations.spectral_norm(nn.Linear(6, 4), "bias")).double()
    batch = (torch.randn(X, dtype=torch.float64),)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, X[0]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weight_norm_of_a_recurrent_layer(kind: type[nn.Module]) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = old(nn.utils.weight_norm, kind(6, 4, batch_first=True), "weight_hh_l0")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    model = Reader().double()
    batch = (torch.randn(3, 5, 6, dtype=torch.float64),)
    assert {layer.name: layer.rule for layer in find_layers(model)} == {"inner": "fallback"}
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, 3))
