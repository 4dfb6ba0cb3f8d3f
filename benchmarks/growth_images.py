"""Measure features of images: how long they take, and what half precision changes.

    DPKFC_DATA=DIR python benchmarks/growth.py --only images

A ridge head on 600 training images answers for 600 test images, on features in float32 and on
those that a processor with AMX makes: its encoder multiplies bfloat16.

    DPKFC_DATA=DIR DPKFC_BEFORE=CHECKOUT python benchmarks/growth.py --only "image runs"

`dpkfc train` on a folder of 20,000 MNIST images, twice with one cache that begins empty, and once
with the source of an earlier commit, whose features were not kept, and no cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpkfc.app.datasets.sources import MNIST, load_pixels
from dpkfc.app.recipes.catalogue import find_recipe, run_config
from dpkfc.app.recipes.images import image_features
from dpkfc.features.joined import FlatFeatures
from growth_files import SETTINGS, measure

SHAPE = (1, 28, 28)
IMAGES, CHUNK = 600, 50
PENALTY = 100.0
FOLDER_IMAGES = 20_000


@torch.no_grad()
def images(_: int) -> dict[str, Any]:
    """Return milliseconds an image, and accuracies of a head by precision."""
    torch.set_num_threads(1)
    settings = image_features(SHAPE)
    begun = time.process_time()
    module = settings.build()
    build = time.process_time() - begun
    found: dict[str, Any] = {"images": IMAGES, "seconds_of_scales": build, "sets": {}}
    for name in ("mnist", "fashion-mnist"):
        recipe = find_recipe(name)
        data = recipe.load(run_config({"recipe": name}))
        rows: dict[str, Any] = {}
        answers = {}
        for precision in ("float32", "bfloat16"):
            begun = time.process_time()
            train, test = (
                compute(module, split[0][:IMAGES], precision) for split in (data.train, data.test)
            )
            spent = time.process_time() - begun
            answers[precision] = answer(train, data.train[1][:IMAGES], test)
            right = answers[precision] == data.test[1][:IMAGES]
            rows[precision] = {
                "milliseconds": 1000 * spent / (2 * IMAGES),
                "accuracy": right.float().mean().item(),
            }
        same = (answers["float32"] == answers["bfloat16"]).float().mean().item()
        found["sets"][name] = {**rows, "equal_answers": same}
    return found


def compute(module: FlatFeatures, inputs: Tensor, precision: str) -> Tensor:
    """Return features as `dpkfc train` makes them: `[N, d]` in half precision."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        parts = [module(chunk).half() for chunk in inputs.split(CHUNK)]
    return torch.cat(parts)


def answer(train: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """Return the classes that a ridge regression on the training rows gives to the test rows."""
    rows = train.double()
    targets = functional.one_hot(labels).double() - 0.1
    kernel = rows @ rows.T
    kernel.diagonal().add_(PENALTY)
    return (test.double() @ (rows.T @ torch.linalg.solve(kernel, targets))).argmax(1)


def image_rows(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what was measured, with goals: two cores halve the time of one."""
    rows = []
    for name, row in found["sets"].items():
        half = row["bfloat16"]["milliseconds"] / 2
        rows.append((f"features of an image of {name}, processor ms over two cores", half, 3.0))
    return rows


def image_runs(_: int) -> dict[str, Any]:
    """Return processor seconds of a first and a second run, and of one before features were kept.

    One thread each: what runs beside adds no processor seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", FOLDER_IMAGES)
        words = ["-m", "dpkfc", "train", "--data", "images", *SETTINGS, "--out"]
        kept = {"DPKFC_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        found: dict[str, Any] = {"images": FOLDER_IMAGES}
        for run in ("first", "second"):
            found[run] = measure([*words, run], folder, **kept)
        if before := os.environ.get("DPKFC_BEFORE"):
            place = os.pathsep.join(f"{before}/{part}" for part in ("src", "papers"))
            unkept = {**kept, "DPKFC_CACHE": "", "PYTHONPATH": place}
            found["before"] = measure([*words, "before"], folder, **unkept)
    return found


def write_images(folder: Path, count: int) -> None:
    """Write images of MNIST as PNG files, in a folder for each digit."""
    from PIL import Image

    pixels, labels = load_pixels(MNIST).train
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for number in range(count):
        row = number % len(labels)
        image = Image.fromarray(pixels[row].reshape(28, 28))
        image.save(folder / str(labels[row]) / f"{number}.png")


def image_run_rows(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what was measured, with the goal."""
    second = found["second"]["processor_seconds"]
    name = f"{found['images']:,} images: processor seconds of a second run ÷"
    rows = [(f"{name} of a first one", second / found["first"]["processor_seconds"], 0.0)]
    if before := found.get("before"):
        rows.append(
            (f"{name} before features were kept", second / before["processor_seconds"], 0.4)
        )
    return rows
