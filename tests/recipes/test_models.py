"""The networks: sizes, shapes, no module that mixes examples, initial weights by seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkfc.gradients.layers import find_layers
from dpkfc.recipes.base import RECIPES, find_recipe
from dpkfc.recipes.models import cifar_cnn, digits_cnn, digits_mlp, mnist_cnn, seeded, wide_resnet


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "size", "shape"),
    [
        (mnist_cnn, 206_922, (1, 28, 28)),
        (cifar_cnn, 522_122, (3, 32, 32)),
        (digits_cnn, 13_706, (1, 8, 8)),
        (digits_mlp, 4_810, (1, 8, 8)),
        (wide_resnet, 2_753_818, (3, 32, 32)),
    ],
)
def test_size_and_shapes(build, size: int, shape: tuple):
    model = build()
    assert _size(model) == size
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_covered_model_of_its_input_shape(name: str):
    recipe = find_recipe(name)
    model = recipe.model(0)
    assert recipe.name == name
    dtype = torch.float32 if recipe.probe is None else torch.long
    assert model(torch.ones(1, *recipe.input_shape, dtype=dtype)).shape == (1, recipe.num_classes)
    assert {layer.rule for layer in find_layers(model)} <= {"conv", "computed", "linear", "norm"}


def test_initial_weights_are_a_function_of_the_seed_alone():
    state = torch.random.get_rng_state()
    first, again, other = seeded(digits_cnn, 1), seeded(digits_cnn, 1), seeded(digits_cnn, 2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
