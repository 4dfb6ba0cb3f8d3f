"""The methods of the papers side by side on one model: rates on validation rows, then five seeds.

C is the median norm of gradients of records that are not data, at the initial weights. Every method
has its rates, tried at ε = 1 on validation rows; the most accurate is judged on the test split,
seed by seed, at each ε.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc import KFAC, AdamBC, DiSK, Plan, PrivacyConfig, PublicData, Session
from dpkfc.app.models import build_seeded
from dpkfc_papers.studies.harness import markdown, seeds_cell
from dpkfc_papers.studies.language import DELTA
from dpkfc_papers.studies.rows import RowFile, Stopwatch, median_gradient_norm

EPSILONS, SEEDS = (1.0, 8.0), 5
TUNED_AT, TUNING_SEED = 1.0, 100
CLIP_ROWS = 64
# The row of the initial weights.
START = "start"

Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class Method:
    """A method of the papers.

    Attributes:
        title: in the table.
        rates: tried on the validation rows.
        adam: whether Adam steps, or SGD.
        momentum: of SGD.
        postprocess: of the releases.
        sides: of K-FAC; empty without a preconditioner.
        readout: of K-FAC.
    """

    title: str
    rates: tuple[float, ...]
    adam: bool = False
    momentum: float = 0.0
    postprocess: tuple[Any, ...] = ()
    sides: str = ""
    readout: str = "whitened"


def make_methods(
    adam: tuple[float, ...], sgd: tuple[float, ...], natural: tuple[float, ...]
) -> dict[str, Method]:
    """Return the methods by name, with the rates of Adam, SGD and the natural read-out."""
    natural_sgd = Method("DP-KFC, natural", natural, momentum=0.9, sides="input", readout="natural")
    return {
        "dp-sgd": Method("DP-SGD", sgd, momentum=0.9),
        "dp-adam": Method("DP-Adam", adam, adam=True),
        "dp-adambc": Method("DP-AdamBC", adam, postprocess=(AdamBC(),)),
        "disk": Method("DiSK", sgd, postprocess=(DiSK(),)),
        "kfc-inputs": Method("DP-KFC, inputs", adam, adam=True, sides="input"),
        "kfc-both": Method("DP-KFC, both sides", adam, adam=True, sides="both"),
        "kfc-natural": natural_sgd,
    }


@dataclass(frozen=True)
class Data:
    """Rows of a task.

    Attributes:
        train, validation: parts of the training split.
        test: the test split.
    """

    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True)
class Comparison:
    """What the methods are compared on.

    Attributes:
        path: of the rows of the results.
        methods: by name.
        model: makes the model.
        loss_fn: losses `[N]` of a model and a batch.
        read: reads the data from a folder.
        draw_inputs: inputs that are not data, for the preconditioner.
        draw_batch: a batch that is not data, for C.
        score: figures of a model on rows; `accuracy` in percent is among them.
        figures: those that the table shows, with their titles.
        batch, steps, every: expected batch size, steps, steps between refreshes.
    """

    path: Path
    methods: Mapping[str, Method]
    model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    read: Callable[[str], Data]
    draw_inputs: Callable[[], Tensor]
    draw_batch: Callable[[], Rows]
    score: Callable[[nn.Module, Rows], Mapping[str, float]]
    figures: Mapping[str, str]
    batch: int
    steps: int
    every: int

    def make_plan(self, method: Method, epsilon: float, rows: int, clip: float) -> Plan:
        """Return the plan of a method."""
        kfac = None
        if method.sides:
            inputs = self.draw_inputs()
            probe = PublicData(inputs, provenance="texts drawn by Zipf's law")
            kfac = KFAC(probe=probe, probe_size=len(inputs), sides=method.sides, every=self.every)
        config = PrivacyConfig(
            expected_batch_size=self.batch,
            steps=self.steps,
            max_grad_norm=clip,
            preconditioner=kfac,
            readout=method.readout,
            postprocess=method.postprocess,
        )
        noise = noise_multiplier(self.batch, self.steps, epsilon, rows)
        return config.with_noise(noise, DELTA, rows)

    def find_clip(self, model: nn.Module) -> float:
        """Return the median norm of gradients of records that are not data."""
        drawn = self.draw_batch()
        rows = range(min(CLIP_ROWS, len(drawn[0])))
        batches = [tuple(part[row : row + 1] for part in drawn) for row in rows]
        return median_gradient_norm(model, self.loss_fn, batches)

    def execute(self, name: str, epsilon: float, rate: float, seed: int, rows: Rows, judged: Rows):
        """Train from the initial weights of a seed, and return the row of the results."""
        watch = Stopwatch()
        method = self.methods[name]
        model = build_seeded(self.model, seed)
        clip = self.find_clip(model)
        plan = self.make_plan(method, epsilon, len(rows[0]), clip)
        if method.adam:
            optimizer: Any = torch.optim.Adam(model.parameters(), lr=rate)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=method.momentum)
        # The check on public rows is of the model, which tests make; passes are proved either way.
        with Session(plan, model, optimizer, rows, verify=False) as session:
            for batch in session.batches():
                session.step(batch, self.loss_fn)
            spent = session.epsilon
        return {
            "method": name,
            "epsilon": epsilon,
            "spent": spent,
            "rate": rate,
            "seed": seed,
            **self.score(model.eval(), judged),
            "clip": clip,
            "noise": plan.noise_multiplier,
            "steps": plan.steps,
            "rows": len(rows[0]),
            **watch.read(),
        }

    def find_rate(self, file: RowFile, name: str) -> float | None:
        """Return the most accurate rate on the validation rows; None before all ran."""
        return file.best_rate(f"validation/{name}/{rate:g}" for rate in self.methods[name].rates)

    def run(self, data_dir: str, names: Sequence[str], seeds: int) -> None:
        """Run what is missing: rates first, then tests, seed by seed."""
        data = self.read(data_dir)
        file = RowFile(self.path)
        file.fill(START, lambda: {"method": START, **self.score(self.model().eval(), data.test)})
        for name in names:
            for rate in self.methods[name].rates:
                settings = (name, TUNED_AT, rate, TUNING_SEED)
                trial = functools.partial(self.execute, *settings, data.train, data.validation)
                file.fill(f"validation/{name}/{rate:g}", trial)
        for seed in range(seeds):
            for epsilon in EPSILONS:
                for name in names:
                    rate = self.find_rate(file, name)
                    if rate is not None:
                        settings = (name, epsilon, rate, seed)
                        judge = functools.partial(self.execute, *settings, data.train, data.test)
                        file.fill(f"{name}/{epsilon:g}/{seed}", judge)

    def table(self) -> str:
        """Return the figures by method and ε; "" before anything was run."""
        file = RowFile(self.path)
        lines = []
        if start := file.rows.get(START):
            cells = [f"{start[figure]:.2f}" for figure in self.figures for _ in EPSILONS]
            lines.append(["no training", *cells, "–", "–"])
        for name, method in self.methods.items():
            made = [row for row in file.rows.values() if row["method"] == name]
            if not made:
                continue
            cells = []
            for figure in self.figures:
                for epsilon in EPSILONS:
                    start = f"{name}/{epsilon:g}/"
                    tests = [row for key, row in file.rows.items() if key.startswith(start)]
                    cells.append(seeds_cell([row[figure] for row in tests]))
            rate = self.find_rate(file, name)
            shown = "–" if rate is None else f"{rate:g}"
            seconds = statistics.mean(row["processor_seconds"] for row in made)
            lines.append([method.title, *cells, shown, f"{seconds:.1f}"])
        if not lines:
            return ""
        head = [
            f"{title}, ε = {epsilon:g} (seeds)"
            for title in self.figures.values()
            for epsilon in EPSILONS
        ]
        return markdown(["method", *head, "rate", "processor seconds"], lines)


@functools.cache
def noise_multiplier(batch: int, steps: int, epsilon: float, rows: int) -> float:
    """Return the noise multiplier of the steps."""
    config = PrivacyConfig(expected_batch_size=batch, steps=steps)
    return config.calibrate(epsilon, DELTA, rows).noise_multiplier


def split_rows(rows: Rows, validation: int) -> tuple[Rows, Rows]:
    """Return training and validation rows of a training split, in a fixed random order."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(0))
    held, kept = order[:validation], order[validation:]
    return tuple(part[kept] for part in rows), tuple(part[held] for part in rows)
