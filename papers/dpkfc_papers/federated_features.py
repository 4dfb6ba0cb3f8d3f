"""Frozen features of a network that was trained on public images only.

They are made once and stored on the disk.

    cifar10                  ResNet-20 (GroupNorm), trained on CIFAR-100
    mnist, pneumoniamnist    a small CNN, trained on Fashion-MNIST

Networks, constants and features depend on public images and a public seed; the network only maps
the private images. A few thousand public images give weaker features than all of CIFAR-100.
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

from dpkfc.app.datasets.examples import Examples, split
from dpkfc.app.datasets.pixels import Normalisation
from dpkfc.app.datasets.sources import (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    MNIST,
    PNEUMONIA,
    Source,
    load_pixels,
)
from dpkfc.app.models import build_seeded, two_convolutions
from dpkfc.app.run_folder import write_atomically
from dpkfc.data.augment import reflect_pad_crop_flip
from dpkfc_papers.recipes.networks import resnet20

WIDTH = 64
_SEED = 0
_BATCH = 64
_ROWS = 500
_PUBLIC_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A network and the public images that it is trained on.

    All but its last layer are the features.

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
    name="resnet20-cifar100",
    title="ResNet-20 trained on CIFAR-100",
    public=CIFAR100,
    normalisation=Normalisation(
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), origin="published with CIFAR-100"
    ),
    build=lambda: resnet20(100),
    steps=1600,
    augment=True,
)
GREY = Extractor(
    name="cnn-fashion-mnist",
    title="CNN trained on Fashion-MNIST",
    public=FASHION_MNIST,
    normalisation=Normalisation((0.2860,), (0.3530,), origin="published with Fashion-MNIST"),
    build=lambda: two_convolutions(1, 32 * 7 * 7, WIDTH, 10),
    steps=3000,
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A private set, its extractor and its validation split.

    Attributes:
        name: of the runs.
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


_TASKS = (
    Task(
        name="cifar10",
        title="CIFAR-10",
        private=CIFAR10,
        extractor=RESNET,
        classes=10,
        validation=5000,
    ),
    Task(name="mnist", title="MNIST", private=MNIST, extractor=GREY, classes=10, validation=5000),
    Task(
        name="pneumoniamnist",
        title="PneumoniaMNIST",
        private=PNEUMONIA,
        extractor=GREY,
        classes=2,
        validation=500,
    ),
)
TASKS = {task.name: task for task in _TASKS}


@dataclass(frozen=True, kw_only=True)
class Features:
    """The records of the clients of a study, and public data.

    Attributes:
        train: PRIVATE features `[N, 64]` and labels.
        validation: PRIVATE, cut from the training set by a public seed; a run on the test set
            trains on both.
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

    def choose_rows(self, evaluate_on: str) -> tuple[Examples, Examples]:
        """Return what a run trains on and what it is evaluated on."""
        if evaluate_on != "test":
            return self.train, self.validation
        x, y = map(torch.cat, zip(self.train, self.validation, strict=True))
        return (x, y), self.test


def small_features(task: str) -> Features:
    """Return made-up features for a smoke test: one cluster per class; no data set is read."""
    generator = torch.Generator().manual_seed(_SEED)
    y = torch.randint(0, TASKS[task].classes, (700,), generator=generator)
    x = torch.rand(700, WIDTH, generator=generator)
    x[torch.arange(700), y] += 1.0
    return Features(
        train=(x[:500], y[:500]),
        validation=(x[500:600], y[500:600]),
        test=(x[600:], y[600:]),
        public=torch.rand(200, WIDTH, generator=generator),
        classes=TASKS[task].classes,
        origin="made up",
    )


def load_features(name: str, folder: Path, data_dir: str = "") -> Features:
    """Return the features of a task; make them if they are not on the disk.

    Args:
        name: in `TASKS`.
        folder: of the networks and features (CIFAR-10 takes a quarter of an hour on one core).
        data_dir: folder of the data sets; empty as for `dpkfc train`.

    Raises:
        DatasetError: a set is missing or damaged.
        RunFolderError: the disk cannot take the files.
    """
    task = TASKS[name]
    network, digest = _network(task.extractor, folder, data_dir)
    path = folder / f"{name}-{digest[:12]}.safetensors"
    if not path.is_file():
        content = _compute_features(task, network, data_dir)
        write_atomically(path, lambda part: save_file(content, part), private=True)
    stored = load_file(path)
    train, validation = split((stored["train"], stored["train_labels"]), task.validation)
    return Features(
        train=train,
        validation=validation,
        test=(stored["test"], stored["test_labels"]),
        public=stored["public"],
        classes=task.classes,
        origin=f"{task.extractor.title} ({int(stored['public_images']):,} images),"
        f" weights {digest[:12]}",
    )


def _network(extractor: Extractor, folder: Path, data_dir: str) -> tuple[nn.Sequential, str]:
    """Return the trained network without its head, and the SHA-256 of its weights."""
    path = folder / f"{extractor.name}.safetensors"
    network = build_seeded(extractor.build, _SEED)
    assert isinstance(network, nn.Sequential)
    if not path.is_file():
        pixels = load_pixels(extractor.public, data_dir or None)
        images, labels = pixels.tensors(extractor.normalisation).train
        build_seeded(lambda: _fit(network, extractor, images, labels), _SEED)
        write_atomically(path, lambda part: save_file(network.state_dict(), part))
    network.load_state_dict(load_file(path))
    body = nn.Sequential(*list(network)[:-1])
    body.eval()
    return body, hashlib.sha256(path.read_bytes()).hexdigest()


def _fit(
    network: nn.Sequential, extractor: Extractor, images: Tensor, labels: Tensor
) -> nn.Sequential:
    """Train with Nesterov momentum; the rate rises for 5 % of the steps, then falls as a cosine."""
    generator = torch.Generator().manual_seed(_SEED)
    augment = reflect_pad_crop_flip()
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, extractor.steps, pct_start=0.05, cycle_momentum=False
    )
    rows = torch.empty(0, dtype=torch.int64)
    for _ in range(extractor.steps):
        if len(rows) < _BATCH:
            rows = torch.randperm(len(images), generator=generator)
        batch, rows = rows[:_BATCH], rows[_BATCH:]
        x = images[batch]
        if extractor.augment:
            x = augment(x)
        optimizer.zero_grad()
        F.cross_entropy(network(x), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return network


def _compute_features(task: Task, network: nn.Sequential, data_dir: str) -> dict[str, Tensor]:
    """Return the features of all images of a task, PRIVATE ones included."""
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
