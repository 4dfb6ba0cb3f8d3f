"""Random changes of images: each row on its own, every window and both directions, repeatable by
the global generator.
"""

import pytest
import torch
import torch.nn.functional as F

from dpkfc.data.augment import horizontal_flip, random_crop, reflect_pad_crop_flip
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import BatchAxis
from dpkfc.tracking.tracker import Tracker

IMAGES = torch.arange(2 * 3 * 5 * 6, dtype=torch.float32).view(2, 3, 5, 6)


def windows(image, pad, mode, flips):
    """All images that pad, crop and flip can make of one."""
    padded = F.pad(image.unsqueeze(0), (pad,) * 4, mode=mode)[0]
    _, height, width = image.shape
    cuts = [
        padded[:, i : i + height, j : j + width]
        for i in range(2 * pad + 1)
        for j in range(2 * pad + 1)
    ]
    return cuts + [cut.flip(2) for cut in cuts] if flips else cuts


@pytest.mark.parametrize(
    ("augment", "pad", "mode", "flips"),
    [
        (reflect_pad_crop_flip(1), 1, "reflect", True),
        (random_crop(2), 2, "reflect", False),
        (random_crop(1, "constant"), 1, "constant", False),
    ],
)
def test_every_row_is_one_of_the_possible_windows_and_all_occur(augment, pad, mode, flips):
    many = IMAGES[1:].expand(600, -1, -1, -1)
    changed = augment(many)
    assert changed.shape == many.shape and changed.is_contiguous()
    possible = {tuple(w.flatten().tolist()) for w in windows(IMAGES[1], pad, mode, flips)}
    found = {tuple(row.flatten().tolist()) for row in changed}
    assert found == possible
    assert torch.equal(many[0], IMAGES[1])  # the images themselves are left as they are


@pytest.mark.parametrize(
    "augment", [reflect_pad_crop_flip(1), random_crop(1, "constant"), horizontal_flip()]
)
def test_every_row_is_proved_to_be_changed_on_its_own(augment):
    tracker, images = Tracker(2), IMAGES.clone()
    tracker.declare_batch(images)
    with follow(tracker):
        changed = augment(images)
    assert tracker.failure is None and tracker.state(changed) == BatchAxis(0)


def test_tuples_lists_and_dicts_keep_what_is_no_image():
    flip, labels = horizontal_flip(1.0), torch.tensor([3, 4])
    for batch in ((IMAGES, labels), [IMAGES, labels]):
        changed = flip(batch)
        assert (
            type(changed) is type(batch)
            and torch.equal(changed[0], IMAGES.flip(3))
            and changed[1] is labels
        )
    changed = flip({"labels": labels, "pixel_values": IMAGES})
    assert list(changed) == ["labels", "pixel_values"] and torch.equal(
        changed["pixel_values"], IMAGES.flip(3)
    )
    assert torch.equal(flip(IMAGES), IMAGES.flip(3))


@pytest.mark.parametrize(
    "batch", [torch.zeros(3, 4), (torch.zeros(2, 3, 4, 4).byte(),), {"ids": torch.zeros(2)}, "text"]
)
def test_no_images_are_an_error(batch):
    with pytest.raises(ValueError, match="no floating-point images"):
        reflect_pad_crop_flip()(batch)


def test_bad_settings():
    for make, message in (
        (lambda: reflect_pad_crop_flip(0), "pad must be an integer >= 1"),
        (lambda: random_crop(1.5), "pad must be an integer >= 1"),
        (lambda: random_crop(1, "edge"), "mode must be"),
        (lambda: horizontal_flip(1.5), "p must lie in"),
        (
            lambda: random_crop(5)(IMAGES),
            "pad=5 must be less than height and width of the images, 5×6",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
