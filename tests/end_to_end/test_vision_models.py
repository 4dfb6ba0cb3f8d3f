"""Worry: "My vision transformer owns its class token and positions, or scales its residuals, and
nothing here knows it".
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients import rules
from tests.gradients.loop import assert_equals_a_loop, examples

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
}
# the others have modules with nothing below them that own a parameter
FOLLOWED = (
    "ViT",
    "DeiT",
    "Beit",
    "CLIPVision",
)


def model_of(name: str) -> nn.Module:
    if name == "CLIPVision":
        return transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(projection_dim=3, **SHAPE)
        )
    options = {"hidden_sizes": [4] * 4, "depths": [1] * 4} if name == "ConvNext" else SHAPE
    config = getattr(transformers, f"{name}Config")(num_labels=3, **options)
    return getattr(transformers, f"{name}ForImageClassification")(config)


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(
        out.logits if hasattr(out, "logits") else out.image_embeds, batch[1], reduction="none"
    )


@pytest.mark.parametrize("name", [*FOLLOWED, "Dinov2", "ConvNext"])
def test_gradients_of_vision_models_equal_a_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = model_of(name).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # no zeros: tokens and positions begin there
    for role, p in model.named_parameters():
        p.requires_grad_("mask_token" not in role)  # of pre-training
    if name in FOLLOWED:
        monkeypatch.setattr(rules, "fallback_gradients", None)
    size = 32 if name == "ConvNext" else 8
    batch = (torch.randn(3, 3, size, size, dtype=torch.float64), torch.tensor([0, 2, 1]))
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, 3))
