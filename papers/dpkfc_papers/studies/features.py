"""Linear heads on features without data: accuracy by features, scales and whitening.

    python -m dpkfc_papers.studies.features --data-dir DATA --out papers/results/features.json
    python -m dpkfc_papers.studies.features --data-dir DATA \
        --out papers/results/features_controls.json --controls --epochs 15
    python -m dpkfc_papers.studies.features --data-dir DATA --out papers/results/sentences.json \
        --data sst2 ag-news --epochs 15

Each arm takes its best rate and number of epochs on a validation split that is cut from the
training set. Then five seeds train on the whole training set and are measured on the test set. An
arm that is in the file already is not run again. `--folder` keeps features, which are private.

The rows of the H200 took their scales from images that were drawn on that device, by the same
generator with another stream of numbers. CIFAR-10 at ε = 3 ran with `--rates 0.25 --epochs 15`, the
setting that the row at ε = 1 had found.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import dpkfc
from dpkfc import KFAC, DeadLeaves, PinkNoise, PrivacyConfig, PublicData, Session, WhiteNoise
from dpkfc.app.datasets.sources import BREAST, CIFAR10, FASHION_MNIST, MNIST, PNEUMONIA, load_pixels
from dpkfc.app.datasets.text import IMDB, SST2, hashed_texts, load_texts
from dpkfc.app.models import mnist_cnn
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.recipes.images import LinearHead
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.recipes.text import NORM, HashedZipf, english_weights
from dpkfc.curvature import Probe
from dpkfc.features import (
    JoinedFeatures,
    Scattering,
    SyntheticEncoder,
    SyntheticImages,
    build_features,
    standardise,
)
from dpkfc.features.encoder import Encoder
from dpkfc.features.joined import ENERGY
from dpkfc.features.zipf_words import ZipfWords
from dpkfc.postprocess import DiSK, WeightEMA
from dpkfc_papers.recipes.sentences import AG_NEWS, HEAD_LENGTH, SentenceNoise, token_noise
from dpkfc_papers.sentence_vectors import minilm_vectors
from dpkfc_papers.studies.harness import half_interval, read_toml

SOURCES = {
    "cifar10": CIFAR10,
    "fashion-mnist": FASHION_MNIST,
    "mnist": MNIST,
    "pneumoniamnist": PNEUMONIA,
    "breastmnist": BREAST,
}
TEXTS = {"sst2": SST2, "ag-news": AG_NEWS}
CONTENT = read_toml(Path(__file__).with_name("features.toml"))
SEEDS = 5
DELTA = 1e-5
VALIDATION = 5000
PROBE = 1024
ACTIVATIONS = {"ReLU": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Arm:
    """Features, the images that give their scales, and how the head trains."""

    maps: tuple[str, ...]
    scales: str = "synthetic"
    method: str = "dp-sgd"
    mirror: bool = False
    activation: str = ""

    @property
    def clip(self) -> float:
        """Return C: of words and sentences it fits rows of norm 4, or rows of norm 1."""
        if not self.maps[0].startswith(("words", "sentences")):
            return 1.0
        return 0.5 if "norm 1" in self.scales else 1.5

    @property
    def kind(self) -> str:
        """Return what is trained: a linear head, that with blocks of the encoder, or a network."""
        if self.activation:
            return "network"
        return "tuned" if self.maps[0].startswith("tuned") else "head"

    @property
    def blocks(self) -> int:
        """Return how many of the encoder's last blocks train."""
        return int(self.maps[0].removeprefix("tuned"))

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """Return the model that is trained."""
        if self.kind == "head":
            return LinearHead(shape[0], classes)
        if self.kind == "tuned":
            return EncoderTail(self.blocks, classes)
        return mnist_cnn(classes, shape[0], ACTIVATIONS[self.activation])

    @property
    def name(self) -> str:
        """Return a name for tables and files."""
        parts = ["+".join(self.maps), self.activation or self.scales, self.method]
        return ", ".join([*parts, "mirrored"] if self.mirror else parts)


def read_arms(name: str) -> list[Arm]:
    """Return a list of arms by its name in `features.toml`."""
    return [Arm(**{**arm, "maps": tuple(arm["maps"])}) for arm in CONTENT[name]]


GREY = (1, 28, 28)


class EncoderTail(nn.Module):
    """The last blocks of the encoder, which train, and a head, for grey images of 28 × 28.

    Its inputs are what the blocks before return, since those never change.
    """

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        settings = JoinedFeatures((SyntheticEncoder(GREY),))
        scaled_encoder = copy.deepcopy(build_features(settings)).parts[0]
        scaled_encoder.features.unfreeze(blocks)
        self.blocks, self.norm = encoder_parts(scaled_encoder.features.encoder, blocks)[1:]
        scaled_encoder.features = nn.AdaptiveAvgPool2d(2)
        self.scaled = scaled_encoder
        self.head = LinearHead(*settings.feature_shape, classes)

    def train(self, mode: bool = True) -> EncoderTail:
        """Keep the statistics of the synthetic images in training mode too."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]` of what the blocks before return."""
        rows = self.scale_by(functional.relu(self.norm(self.blocks(x.float())))).flatten(1)
        logits: Tensor = self.head(rows * math.sqrt(ENERGY / rows.shape[1]))
        return logits


def encoder_parts(encoder: Encoder, blocks: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return what stands before the last blocks, these, and the norm behind them."""
    layers = nn.Sequential(encoder.stem, *encoder.blocks)
    first = 0 if blocks == len(encoder.blocks) else len(layers) - blocks
    return layers[:first], layers[first:], encoder.norm


class Sentences:
    """Vectors `[n, 384]` of norm 4 by the frozen public encoder, computed once."""

    has_validation = False

    def __init__(self, name: str, data_dir: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._texts = load_texts(TEXTS[name], data_dir)

    def labels(self, part: str) -> Tensor:
        """Return the labels of a part, without training texts that the test split has too."""
        return torch.as_tensor([label for _, label in self._rows(part)])

    def inputs(self, arm: Arm, part: str) -> Tensor:
        """Return the vectors of a part, or of random tokens."""
        if part == "probe":
            config = run_config({"recipe": "stackoverflow-head"})
            noise = SentenceNoise(token_noise(config, HEAD_LENGTH))
            return NORM * noise.sample(PROBE, torch.Generator().manual_seed(1))[0]
        path = self._folder / f"{self._name}-sentences-{part}.safetensors"
        if not path.exists():
            lines = [line for line, _ in self._rows(part)]
            save_file({"vectors": minilm_vectors(lines, HEAD_LENGTH)}, path)
        return NORM * load_file(path)["vectors"]

    def _rows(self, part: str) -> list[tuple[str, int]]:
        """Each text is compared with the public test split alone."""
        rows = list(zip(*getattr(self._texts, part), strict=True))
        seen = set(self._texts.test[0]) if part == "train" else set()
        return [row for row in rows if row[0] not in seen]


class Words:
    """Hashed words of IMDB's reviews."""

    has_validation = False

    def __init__(self, data_dir: str) -> None:
        self._texts = load_texts(IMDB, data_dir)
        self._kept: tuple[Any, Tensor] = ((), torch.empty(0))

    def labels(self, part: str) -> Tensor:
        """Return the labels of a part."""
        return torch.as_tensor(getattr(self._texts, part)[1]).long()

    def inputs(self, arm: Arm, part: str) -> Tensor:
        """Return rows `[n, columns]` in half precision."""
        columns = int(arm.maps[0].removeprefix("words"))
        weights = None if arm.scales == "none" else english_weights()
        norm = 1.0 if "norm 1" in arm.scales else NORM
        if part == "probe":
            probe = HashedZipf(columns, ZipfWords(), weighted=True)
            return probe.sample(PROBE, torch.Generator().manual_seed(1))[0].half()
        key = (columns, arm.scales, part)
        if part == "test" or self._kept[0] != key:
            lines = getattr(self._texts, part)[0]
            rows = norm * hashed_texts(lines, columns, weights=weights)
            if part == "test":
                return rows.half()
            self._kept = (key, rows.half())
        return self._kept[1]


class Features:
    """The features of one data set, computed once and kept in half precision."""

    def __init__(self, name: str, data_dir: str, folder: Path, device: str) -> None:
        self._name, self._folder, self._device = name, folder, device
        self.pixels = load_pixels(SOURCES[name], data_dir)
        self.has_validation = self.pixels.validation is not None
        height, width = self.pixels.train[0].shape[1:3]
        channels = 1 if self.pixels.train[0].ndim == 3 else self.pixels.train[0].shape[3]
        self.shape = (channels, height, width)

    def build(self, map_: str) -> nn.Module:
        """Return a feature map by name."""
        if map_ == "scattering":
            return Scattering(self.shape).build()
        if map_.startswith("tuned"):
            encoder = SyntheticEncoder(self.shape).build().encoder
            return encoder_parts(encoder, int(map_.removeprefix("tuned")))[0]
        return SyntheticEncoder(self.shape, pool=int(map_[-1])).build()

    def probe(self, scales: str) -> Probe:
        """Return the images that give the scales."""
        kinds = {"leaves": DeadLeaves, "pink": PinkNoise, "white": WhiteNoise}
        return kinds.get(scales, SyntheticImages)(self.shape)

    def labels(self, part: str) -> Tensor:
        """Return the labels of a part."""
        return torch.as_tensor(getattr(self.pixels, part)[1]).long().flatten()

    def scales_of(self, map_: str, scales: str) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each channel over synthetic images."""
        path = self._folder / f"{self._name}-{map_}-{scales}.safetensors"
        if not path.exists():
            found = standardise(self.build(map_), self.probe(scales), size=2000)
            save_file({"mean": found.mean, "deviation": found.deviation}, path)
        saved = load_file(path)
        return saved["mean"], saved["deviation"]

    @torch.no_grad()
    def raw(self, map_: str, part: str, mirror: bool = False) -> Tensor:
        """Return features of a part; with `mirror`, averaged with the features of mirrored
        images.
        """
        path = self._folder / f"{self._name}-{map_}-{part}{'-mirror' * mirror}.safetensors"
        if path.exists():
            return load_file(path)["features"]
        features = self.build(map_).to(self._device)
        found = []
        for chunk in self.images(part).split(250):
            x = scale_pixels(chunk.to(self._device))
            if map_.startswith("tuned"):
                x = x.expand(-1, 3, -1, -1)
            y = features(x)
            if mirror:
                y = (y + features(x.flip(3)).flip(3)) / 2
            found.append(y.half().cpu())
        together = torch.cat(found).contiguous()
        save_file({"features": together}, path)
        return together

    def images(self, part: str) -> Tensor:
        """Return images `[n, channels, height, width]`, as bytes where they are private."""
        if part == "probe":
            return self.probe("synthetic").sample(PROBE, torch.Generator().manual_seed(1))[0]
        pixels = torch.as_tensor(getattr(self.pixels, part)[0])
        return (pixels if pixels.dim() == 4 else pixels.unsqueeze(-1)).permute(0, 3, 1, 2)

    def inputs(self, arm: Arm, part: str) -> Tensor:
        """Return the inputs of the model: pixels from -1 to 1 for a network.

        Features of a head are `[n, d]` in half precision, and every map has equal energy.
        """
        if arm.kind == "network":
            return scale_pixels(self.images(part)).to(self._device)
        if arm.kind == "tuned":
            return self.raw(arm.maps[0], part).to(self._device)
        return torch.cat([self._scale_map(arm, map_, part) for map_ in arm.maps], 1)

    def _scale_map(self, arm: Arm, map_: str, part: str) -> Tensor:
        """Return the features of one map of a head."""
        x = self.raw(map_, part, arm.mirror)
        mean, deviation = self.scales_of(map_, "synthetic" if arm.scales == "none" else arm.scales)
        if arm.scales == "none":
            # One number for all channels, so that rates are comparable.
            deviation = (deviation.square() + mean.square()).mean().sqrt().expand_as(deviation)
            mean = torch.zeros_like(mean)
        mean = mean.to(self._device).view(1, -1, 1, 1)
        deviation = deviation.to(self._device).view(1, -1, 1, 1)
        energy = ENERGY / x[0].numel() / len(arm.maps)
        rows = []
        for chunk in x.split(2000):
            scaled = (chunk.to(self._device).float() - mean) / deviation
            rows.append((scaled.flatten(1) * math.sqrt(energy)).half())
        return torch.cat(rows)


Source = Features | Words | Sentences


def scale_pixels(images: Tensor) -> Tensor:
    """Return images as numbers from -1 to 1."""
    return images if images.is_floating_point() else images.float() / 127.5 - 1


def find_rates(arm: Arm) -> Sequence[float]:
    """Return the learning rates of a search."""
    for part in (arm.scales, arm.kind):
        rates = CONTENT["rates_of"].get(part, {})
        if arm.method in rates:
            return rates[arm.method]
    return CONTENT["rates"]


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy."""
    right = 0
    for inputs, labels in zip(x.split(2000), y.split(2000), strict=True):
        right += int((model(inputs).argmax(1) == labels).sum())
    return right / len(y)


@dataclass(frozen=True)
class Setting:
    """What the search chooses."""

    rate: float
    epochs: int


def train(
    arm: Arm,
    data: tuple[Tensor, Tensor],
    probe: Tensor | None,
    held_out: tuple[Tensor, Tensor],
    setting: Setting,
    epsilon: float,
    seed: int,
    batch: int,
) -> float:
    """Train one head and return the accuracy of the average of its weights."""
    torch.manual_seed(seed)
    x, y = data
    model = arm.build(x.shape[1:], int(y.max()) + 1).to(x.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    momentum = 0.0 if arm.method == "disk" else 0.9
    optimizer = torch.optim.SGD(trained, lr=setting.rate, momentum=momentum)
    if arm.method == "without privacy":
        return _train_without_privacy(model, optimizer, data, held_out, setting.epochs)
    config: dict[str, Any] = {}
    if arm.method == "disk":
        config = {"postprocess": (DiSK(0.7, 0.5),)}
    if probe is not None:
        kfac = KFAC(
            probe=PublicData(probe.float().cpu(), provenance="features of synthetic images"),
            probe_size=PROBE,
            sides="input",
            every=50 if arm.kind == "network" else 10**6,
            control="random" if "random" in arm.method else "none",
        )
        config = {"preconditioner": kfac}
        if "preconditioned" not in arm.method:
            config["readout"] = "natural"
    plan = PrivacyConfig(
        expected_batch_size=batch,
        epochs=setting.epochs,
        max_grad_norm=arm.clip,
        weight_average=WeightEMA(0.9),
        **config,
    ).calibrate(epsilon=epsilon, delta=DELTA, dataset_size=len(y))
    with Session(plan, model, optimizer, data) as session:
        for step in session.batches():
            session.step(step, cross_entropy)
        with session.averaged_weights():
            return score(model, *held_out)


def _train_without_privacy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    epochs: int,
) -> float:
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1]), device=data[1].device).split(256):
            optimizer.zero_grad()
            cross_entropy(model, (data[0][rows], data[1][rows])).mean().backward()
            optimizer.step()
    return score(model, *held_out)


def split(
    arm: Arm, source: Source, data: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the examples that a search trains on, and the validation examples."""
    x, y = data
    if source.has_validation:
        return data, (source.inputs(arm, "validation"), source.labels("validation").to(y.device))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).to(y.device)
    size = min(VALIDATION, len(y) // 5)
    rest, cut = order[size:], order[:size]
    return (x[rest], y[rest]), (x[cut], y[cut])


def validate_arm(arm: Arm, source: Source, device: str, row: dict[str, Any]) -> None:
    """Train the setting of a row with five seeds, and add what they reach on validation.

    A default is chosen by these figures, so that the test set takes no part in it.
    """
    data = source.inputs(arm, "train"), source.labels("train").to(device)
    probe = source.inputs(arm, "probe") if arm.method.startswith("dp-kfc") else None
    search, held_out = split(arm, source, data)
    setting = Setting(row["rate"], row["epochs"])
    values = [
        train(arm, search, probe, held_out, setting, row["epsilon"], seed, row["batch"])
        for seed in range(SEEDS)
    ]
    row["validation of seeds"] = [round(value, 4) for value in values]


def run_arm(
    name: str,
    arm: Arm,
    source: Source,
    device: str,
    known: Collection[float],
    grid: Sequence[Setting],
    wanted: Sequence[float],
) -> Iterator[dict[str, Any]]:
    """Search on the validation split, then measure five seeds on the test set."""
    if "without" in arm.method:
        wanted = (math.inf,)
    wanted = tuple(epsilon for epsilon in wanted if epsilon not in known)
    if not wanted:
        return
    data = source.inputs(arm, "train"), source.labels("train").to(device)
    test = source.inputs(arm, "test"), source.labels("test").to(device)
    probe = source.inputs(arm, "probe") if arm.method.startswith("dp-kfc") else None
    search, held_out = split(arm, source, data)
    largest = 1024 if arm.kind == "network" or name == "imdb" else 4096
    batch = min(largest, len(data[1]) // 4)
    for epsilon in wanted:
        began = time.perf_counter()
        tried = {
            setting: train(arm, search, probe, held_out, setting, epsilon, 0, batch)
            for setting in grid
        }
        best = max(tried, key=tried.__getitem__)
        values, seconds = [], []
        for seed in range(SEEDS):
            at = time.perf_counter()
            values.append(train(arm, data, probe, test, best, epsilon, seed, batch))
            seconds.append(time.perf_counter() - at)
        yield {
            "data": name,
            "arm": arm.name,
            "epsilon": epsilon,
            "rate": best.rate,
            "epochs": best.epochs,
            "batch": batch,
            "validation": [[one.rate, one.epochs, round(tried[one], 4)] for one in tried],
            "test": [round(v, 4) for v in values],
            "mean": round(sum(values) / SEEDS, 4),
            "interval": round(half_interval(values), 4),
            "seconds a run": round(min(seconds), 1),
            "seconds in all": round(time.perf_counter() - began, 1),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        }


def main() -> None:
    """Run the arms that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for features; they are private")
    parser.add_argument("--data", nargs="*", default=[*SOURCES, "imdb"])
    parser.add_argument("--controls", action="store_true", help="what each part contributes")
    parser.add_argument("--arms", nargs="*", type=int, help="numbers of the list of arms")
    parser.add_argument("--epsilons", nargs="*", type=float)
    parser.add_argument(
        "--validate", action="store_true", help="measure five seeds of known rows on validation"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rates", nargs="*", type=float)
    parser.add_argument("--epochs", nargs="*", type=int, default=CONTENT["epochs"])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    content: dict[str, Any] = {"rows": []}
    if arguments.out.exists():
        content = json.loads(arguments.out.read_text("utf-8"))
    rows = content["rows"]
    for name in arguments.data:
        source: Source
        if name == "imdb":
            arms = read_arms("words")
            source = Words(arguments.data_dir)
        elif name in TEXTS:
            arms = read_arms("sentences")
            source = Sentences(name, arguments.data_dir, arguments.folder)
        else:
            arms = read_arms("controls" if arguments.controls else "arms")
            source = Features(name, arguments.data_dir, arguments.folder, arguments.device)
        if arguments.arms is not None:
            arms = [arms[number] for number in arguments.arms]
        for arm in arms:
            rates = arguments.rates or find_rates(arm)
            grid = [Setting(rate, epochs) for epochs in arguments.epochs for rate in rates]
            wanted = arguments.epsilons or CONTENT["epsilons"].get(name, (1.0,))
            known = {
                row["epsilon"] for row in rows if (row["data"], row["arm"]) == (name, arm.name)
            }
            if arguments.validate:
                for row in rows:
                    is_wanted = (row["data"], row["arm"]) == (name, arm.name)
                    if is_wanted and "validation of seeds" not in row:
                        validate_arm(arm, source, arguments.device, row)
                        print(
                            name, arm.name, row["epsilon"], row["validation of seeds"], flush=True
                        )
                        arguments.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
                continue
            for row in run_arm(name, arm, source, arguments.device, known, grid, wanted):
                rows.append(row)
                print(name, arm.name, row["epsilon"], row["mean"], row["interval"], flush=True)
                content["dpkfc"] = dpkfc.__version__
                arguments.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
