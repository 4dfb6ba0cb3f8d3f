"""WRN with standardised weights: its order of layers, its gradients, and a tiny run of its recipe
with several views.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.app.assembly import make_augment, make_privacy_config
from dpkfc.app.recipes import catalogue
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import run
from dpkfc.gradients.discovery import find_layers
from dpkfc_papers.recipes.networks import WideResNet, standardised_conv
from tests.app.accounting import remembered
from tests.app.files import write_cifar
from tests.gradients.loop import assert_equals_a_loop, examples


def test_every_stage_is_activation_norm_convolution() -> None:
    model = WideResNet(16, 4)
    stages = [
        m for m in model.modules() if isinstance(m, nn.Sequential) and isinstance(m[0], nn.ReLU)
    ]
    assert len(stages) == 6 * 2 + 3 + 1  # six blocks of two, three projections, the end
    for stage in stages:
        assert isinstance(stage[1], nn.GroupNorm) and stage[1].num_groups == 16
        assert stage[1].num_channels % 16 == 0 and (
            len(stage) == 2 or isinstance(stage[2], nn.Conv2d)
        )
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions if m.kernel_size == (1, 1)] == [64, 128, 256]
    assert [m.stride[0] for m in convolutions].count(2) == 4 and all(
        m.bias is not None for m in convolutions
    )
    rules = [layer.rule for layer in find_layers(model)]
    assert (rules.count("computed"), rules.count("norm"), rules.count("linear")) == (
        16,
        16,
        1,
    ) and len(rules) == 33
    filters = model.stem.weight.flatten(1)
    torch.testing.assert_close(filters.norm(dim=1), torch.ones(16))
    torch.testing.assert_close(filters.mean(1), torch.zeros(16), atol=1e-6, rtol=0)


def test_gradients_of_a_small_one_equal_a_loop() -> None:
    model = WideResNet(10, 1, num_classes=3).double()
    x, y = torch.randn(3, 3, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2])

    def loss(model: nn.Module, batch: tuple) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert model(x).shape == (3, 3)
    assert_equals_a_loop(model, loss, (x, y), examples((x, y), 3))


@pytest.mark.parametrize(
    ("depth", "width", "message"),
    [(15, 4, "6 n"), (4, 4, "6 n"), (16, 0, "width must be at least 1")],
)
def test_impossible_sizes(depth: int, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WideResNet(depth, width)


def test_the_defaults_are_the_published_settings() -> None:
    config = run_config({"recipe": "cifar10-wrn"})
    made = make_privacy_config(config, (3, 32, 32))
    assert (made.augmentations, made.expected_batch_size, made.clipping, made.max_grad_norm) == (
        16,
        4096,
        "normalised",
        1,
    )
    assert (
        config.run.method,
        config.optimizer.optimizer,
        config.optimizer.lr,
        config.optimizer.momentum,
    ) == (
        "dp-sgd",
        "sgd",
        2.0,
        0.0,
    )
    assert make_augment(config, (3, 32, 32)) is not None
    assert make_augment(run_config({"recipe": "digits"}), (1, 8, 8)) is None


def test_settings_of_views_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="augmentations = 4 without augment.*horizontal-flip"):
        run_config({"recipe": "cifar10-cnn", "augmentations": 4})
    with pytest.raises(ConfigError, match="augment = 'random-crop' is for images"):
        make_augment(run_config({"recipe": "digits", "augment": "random-crop"}), (64,))


def tiny() -> nn.Module:
    conv = standardised_conv(3, 16, 3)
    return nn.Sequential(
        nn.AvgPool2d(8), conv, nn.ReLU(), nn.GroupNorm(16, 16), nn.Flatten(), nn.Linear(256, 10)
    )


@pytest.mark.slow
def test_a_tiny_run_shows_its_views_on_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        catalogue.RECIPES, "cifar10-wrn", replace(catalogue.RECIPES["cifar10-wrn"], build=tiny)
    )
    write_cifar(tmp_path / "cifar10")
    settings = {
        "steps": 2,
        "expected_batch_size": 6,
        "augmentations": 3,
        "probe_size": 8,
        "accountant": "rdp",
    }
    where = {"data_dir": str(tmp_path), "out": str(tmp_path / "run"), "max_physical_batch_size": 7}
    with remembered():
        result = run(run_config({"recipe": "cifar10-wrn", **settings, **where}))
    assert result.steps == 2
    card = json.loads((result.folder / "privacy_card.json").read_text("utf-8"))
    chosen = card["hyper_parameters"]
    assert (chosen["augmentations"], chosen["augment"]) == (3, "reflect-pad-crop-flip")
    assert card["mechanism"]["sensitivity"] == 1.0
