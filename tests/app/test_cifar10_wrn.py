"""WRN with standardised weights: its order of layers and the settings of its recipe."""

import pytest
import torch
from torch import nn

from dpkfc.app.assembly import make_augment
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.toml import ConfigError
from dpkfc.gradients.discovery import find_layers
from dpkfc_papers.recipes.networks import WideResNet


def test_every_stage_is_activation_norm_convolution():
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
    assert (rules.count("fallback"), rules.count("norm"), rules.count("linear")) == (
        16,
        16,
        1,
    ) and len(rules) == 33
    filters = model.stem.weight.flatten(1)
    torch.testing.assert_close(filters.norm(dim=1), torch.ones(16))
    torch.testing.assert_close(filters.mean(1), torch.zeros(16), atol=1e-6, rtol=0)


def test_settings_of_views_that_do_not_go_together():
    with pytest.raises(ConfigError, match="augmentations = 4 without augment.*horizontal-flip"):
        run_config({"recipe": "cifar10-cnn", "augmentations": 4})
    with pytest.raises(ConfigError, match="augment = 'random-crop' is for images"):
        make_augment(run_config({"recipe": "digits", "augment": "random-crop"}), (64,))
