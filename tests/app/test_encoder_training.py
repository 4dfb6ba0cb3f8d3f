"""Synthetic images, views of them, and the training of an encoder on nothing else."""

import hashlib
import json

import torch
from torch.nn import functional

from dpkfc.features import SyntheticEncoder, SyntheticImages, draw_images
from dpkfc_papers.encoder import SIDE, change_view, contrast
from tests.command_line import call


def stream(seed):
    return torch.Generator().manual_seed(seed)


def test_images_repeat_with_the_seed_and_differ_among_each_other():
    one, two = draw_images(6, 20, stream(0)), draw_images(6, 20, stream(0))
    assert torch.equal(one, two) and one.shape == (6, 3, 20, 20)
    assert one.min() >= 0 and one.max() <= 1
    assert not torch.equal(one, draw_images(6, 20, stream(1)))
    distances = torch.cdist(one.flatten(1), one.flatten(1))
    assert (distances + torch.eye(6) > 0.5).all()


def test_a_probe_gives_images_of_its_shape_in_the_range_of_the_format():
    for shape in ((1, 12, 20), (3, 20, 12)):
        inputs, labels = SyntheticImages(shape).sample(5, stream(0))
        assert inputs.shape == (5, *shape) and labels is None
        assert inputs.min() >= -1 and inputs.max() <= 1
    assert SyntheticImages((1, 8, 8)).describe()["source"] == "synthetic"


def test_views_change_each_image_by_itself_and_stay_in_range():
    x = draw_images(4, SIDE + 8, stream(0))
    found = change_view(x, stream(1))
    assert found.shape == (4, 3, SIDE, SIDE) and found.min() >= 0 and found.max() <= 1
    other = x.clone()
    other[2] = 1 - other[2]
    changed = change_view(other, stream(1))
    assert torch.equal(found[[0, 1, 3]], changed[[0, 1, 3]])
    assert not torch.equal(found[2], changed[2])


def test_the_loss_is_the_formula():
    u = functional.normalize(torch.randn(3, 5, generator=stream(0), dtype=torch.float64), dim=1)
    v = functional.normalize(torch.randn(3, 5, generator=stream(1), dtype=torch.float64), dim=1)
    rows = [*u, *v]
    total = 0.0
    for i in range(6):
        similar = torch.stack([(rows[i] @ rows[j] / 0.2).exp() for j in range(6) if j != i])
        total -= torch.log((rows[i] @ rows[(i + 3) % 6] / 0.2).exp() / similar.sum())
    torch.testing.assert_close(contrast(u, v), total / 6)


def test_the_command_writes_weights_that_the_encoder_takes(tmp_path):
    path = tmp_path / "own.safetensors"
    words = ["pretrain-encoder", str(path), "--steps", "2", "--batch-size", "4"]
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert hashlib.sha256(path.read_bytes()).hexdigest() in result.output.replace("\n", "")
    log = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert log["steps"] == 2 and [step for step, _ in log["losses"]] == [2]
    found = SyntheticEncoder((1, 16, 16), weights=str(path)).build()
    assert found(torch.zeros(1, 1, 16, 16)).isfinite().all()
    refused = call(*words[:2], "--steps", "0")
    assert refused.exit_code == 2 or "at least 2" in str(refused.exception)
