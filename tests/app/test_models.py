"""The networks: sizes, shapes, no module that mixes examples, initial weights by seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.models import cifar_cnn, digits_cnn, mnist_cnn, mnist_mlp, seeded
from dpkfc.app.recipes.catalogue import RECIPES, find_recipe
from dpkfc.app.settings import make_config
from dpkfc.gradients.discovery import find_layers
from dpkfc_papers.recipes.networks import cifar_vit, mnist_vit, resnet20, wide_resnet


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "size", "shape"),
    [
        (mnist_cnn, 206_922, (1, 28, 28)),
        (mnist_mlp, 269_322, (1, 28, 28)),
        (mnist_vit, 104_970, (1, 28, 28)),
        (cifar_cnn, 522_122, (3, 32, 32)),
        (digits_cnn, 13_706, (1, 8, 8)),
        (wide_resnet, 2_753_818, (3, 32, 32)),
        (resnet20, 269_722, (3, 32, 32)),
        (cifar_vit, 809_098, (3, 32, 32)),
    ],
)
def test_size_and_shapes(build, size: int, shape: tuple):
    model = build()
    assert _size(model) == size
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(
    "name",
    [
        # Its probe needs a sentence encoder.
        pytest.param(name, marks=pytest.mark.slow if name == "stackoverflow-head" else ())
        for name in RECIPES
    ],
)
def test_every_recipe_has_a_covered_model_of_its_input_shape(name: str):
    recipe = find_recipe(name)
    try:
        model = recipe.model(0)
    except DatasetError as error:
        pytest.skip(str(error))
    assert recipe.name == name
    inputs = torch.ones(1, *recipe.input_shape)
    # Features have tests of their own, and their scales take long.
    if recipe.probe is not None and recipe.features is None:
        inputs, _ = recipe.probe(make_config(recipe=name)).sample(
            1, torch.Generator().manual_seed(0)
        )
    output = model(inputs)
    assert output.shape[0] == 1 and output.shape[-1] == recipe.num_classes
    assert {layer.rule for layer in find_layers(model)} <= {
        "conv",
        "computed",
        "linear",
        "norm",
        "embedding",
    }


def test_initial_weights_are_a_function_of_the_seed_alone():
    state = torch.random.get_rng_state()
    first, again, other = seeded(digits_cnn, 1), seeded(digits_cnn, 1), seeded(digits_cnn, 2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )
