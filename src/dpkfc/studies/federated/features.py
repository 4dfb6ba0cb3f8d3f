"""Frozen features of a network that was trained on public images alone, made once and kept on the disk.

    cifar10                  ResNet-20 (GroupNorm), trained on CIFAR-100
    mnist, pneumoniamnist    a small CNN, trained on Fashion-MNIST

Networks, constants and features depend on public images and a public seed; the private images are only mapped. How good the
features are is bounded by how many public images there are: a few thousand give weaker ones than the whole of CIFAR-100.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpkfc.data.augment import reflect_pad_crop_flip
from dpkfc.recipes.datasets import Normalisation, Source, load_pixels, split
from dpkfc.recipes.datasets.examples import Examples
from dpkfc.recipes.datasets.medmnist import PNEUMONIA
from dpkfc.recipes.datasets.sources import CIFAR10, CIFAR100, FASHION_MNIST, MNIST
from dpkfc.recipes.models import resnet20, seeded
from dpkfc.report.run_folder import placed

__all__ = ["TASKS", "WIDTH", "Extractor", "Features", "Task", "features_of", "small_features"]

WIDTH = 64
_SEED, _BATCH, _ROWS, _PUBLIC_ROWS = 0, 64, 500, 2000


def _grey_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A network and the public images that it is trained on. All but its last layer are the features.

    Attributes:
        name: of its file.
        title: for tables.
        public: the public images.
        normalisation: constants of the public set, for every image that is mapped.
        build: makes the network, its last layer the head that is cut off.
        steps: of SGD on batches of 64.
        augment: shifts and mirror images.
    """

    name: str
    title: str
    public: Source
    normalisation: Normalisation
    build: Callable[[], nn.Sequential]
    steps: int
    augment: bool = False


RESNET = Extractor(
    name="resnet20-cifar100", title="ResNet-20 trained on CIFAR-100", public=CIFAR100, steps=1600, augment=True,
    normalisation=Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), origin="published with CIFAR-100"),
    build=lambda: resnet20(100),
)  # fmt: skip
GREY = Extractor(
    name="cnn-fashion-mnist", title="CNN trained on Fashion-MNIST", public=FASHION_MNIST, steps=3000, build=_grey_cnn,
    normalisation=Normalisation((0.2860,), (0.3530,), origin="published with Fashion-MNIST"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """A private set, its extractor and its validation split.

    Attributes:
        name: of the cells.
        title: for tables.
        private: the private images.
        extractor: of the features.
        classes: outputs of the head.
        validation: training examples held out while settings are chosen.
    """

    name: str
    title: str
    private: Source
    extractor: Extractor
    classes: int
    validation: int


TASKS = {
    task.name: task
    for task in (
        Task(name="cifar10", title="CIFAR-10", private=CIFAR10, extractor=RESNET, classes=10, validation=5000),
        Task(name="mnist", title="MNIST", private=MNIST, extractor=GREY, classes=10, validation=5000),
        Task(name="pneumoniamnist", title="PneumoniaMNIST", private=PNEUMONIA, extractor=GREY, classes=2, validation=500),
    )
}


@dataclass(frozen=True, kw_only=True)
class Features:
    """What the clients of a study hold, and what is public.

    Attributes:
        train: PRIVATE features `[N, 64]` and labels.
        validation: PRIVATE, cut from the training set by a public seed; a run on the test set trains on both.
        test: features and labels of the test set.
        public: features of public images `[n, 64]`.
        classes: outputs of the head.
        origin: one line on the extractor.
    """

    train: Examples
    validation: Examples
    test: Examples
    public: Tensor
    classes: int
    origin: str


def small_features(task: str) -> Features:
    """Made-up features for a look at whether everything goes together: three clusters, no data set is read."""
    generator = torch.Generator().manual_seed(_SEED)
    y = torch.randint(0, TASKS[task].classes, (700,), generator=generator)
    x = torch.rand(700, WIDTH, generator=generator)
    x[torch.arange(700), y] += 1.0
    cut = [(x[a:b], y[a:b]) for a, b in ((0, 500), (500, 600), (600, 700))]
    public = torch.rand(200, WIDTH, generator=generator)
    return Features(train=cut[0], validation=cut[1], test=cut[2], public=public, classes=TASKS[task].classes, origin="made up")


def features_of(name: str, folder: Path, data_dir: str = "") -> Features:
    """The features of a task, from the disk where they are there.

    Args:
        name: in `TASKS`.
        folder: of the networks and features; both are made where they are missing (CIFAR-10: a quarter of an hour on one core).
        data_dir: folder of the data sets; empty as for `dpkfc train`.

    Raises:
        DatasetError: a set is missing or damaged.
        RunFolderError: the disk cannot take the files.
    """
    task = TASKS[name]
    network, digest = _network(task.extractor, folder, data_dir)
    path = folder / f"{name}-{digest[:12]}.safetensors"
    if not path.is_file():
        content = _mapped(task, network, data_dir)
        placed(path, lambda part: save_file(content, part), private=True)
    held = load_file(path)
    whole = held["train"], held["train_labels"]
    train, validation = split(whole, task.validation)
    return Features(
        train=train, validation=validation, test=(held["test"], held["test_labels"]), public=held["public"], classes=task.classes,
        origin=f"{task.extractor.title} ({int(held['public_images']):,} images), weights {digest[:12]}",
    )  # fmt: skip


def _network(extractor: Extractor, folder: Path, data_dir: str) -> tuple[nn.Sequential, str]:
    """The trained network without its head, and the SHA-256 of its weights."""
    path = folder / f"{extractor.name}.safetensors"
    network = seeded(extractor.build, _SEED)
    assert isinstance(network, nn.Sequential)
    if not path.is_file():
        images, labels = load_pixels(extractor.public, data_dir or None).tensors(extractor.normalisation).train
        seeded(lambda: _fit(network, extractor, images, labels), _SEED)
        placed(path, lambda part: save_file(network.state_dict(), part))
    network.load_state_dict(load_file(path))
    body = nn.Sequential(*list(network)[:-1])
    body.eval()
    return body, hashlib.sha256(path.read_bytes()).hexdigest()


def _fit(network: nn.Sequential, extractor: Extractor, images: Tensor, labels: Tensor) -> nn.Sequential:
    """SGD with Nesterov momentum and a rate that rises for a twentieth of the steps, then falls along a cosine."""
    generator, change = torch.Generator().manual_seed(_SEED), reflect_pad_crop_flip()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, extractor.steps, pct_start=0.05, cycle_momentum=False)
    rows = torch.empty(0, dtype=torch.int64)
    for _ in range(extractor.steps):
        if len(rows) < _BATCH:
            rows = torch.randperm(len(images), generator=generator)
        drawn, rows = rows[:_BATCH], rows[_BATCH:]
        x = change(images[drawn]) if extractor.augment else images[drawn]
        optimizer.zero_grad()
        F.cross_entropy(network(x), labels[drawn]).backward()
        optimizer.step()
        schedule.step()
    return network


def _mapped(task: Task, network: nn.Sequential, data_dir: str) -> dict[str, Tensor]:
    constants = task.extractor.normalisation
    private = load_pixels(task.private, data_dir or None).tensors(constants)
    public = load_pixels(task.extractor.public, data_dir or None).tensors(constants).train[0]

    def features(images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([network(part) for part in images.split(_ROWS)]).contiguous()

    return {
        "train": features(private.train[0]),
        "train_labels": private.train[1],
        "test": features(private.test[0]),
        "test_labels": private.test[1],
        "public": features(public[:_PUBLIC_ROWS]),
        "public_images": torch.tensor(len(public)),
    }
