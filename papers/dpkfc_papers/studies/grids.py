"""Searches whose every point runs to its end on a validation split; what wins is judged on the test
set, seed by seed.

    python -m dpkfc_papers.studies.grids --grid mlp --data-dir DIR  # resumable
    python -m dpkfc_papers.studies.grids --grid mlp --table  # the Markdown table

`mlp`: baselines along the ridge of lr · C, where twenty trials in the wide ranges of the accuracy
study find those of DP-KFC more easily than those of DP-SGD. `probes`: what curvature from pink
noise, dead leaves and private images is worth. `best`: how far MNIST at ε = 1 goes with larger
batches and schedules. `refined`, `refined-fashion`: inputs that the released model has moved, four
seeds on the validation split. `mapped`: the step along the preconditioned gradient, or along the
natural gradient. `varied`: root, interval of refreshes, labels and source of G,
each by itself, two seeds on the validation split.
`fashion`: natural gradients and baselines on Fashion-MNIST. `fashion-baselines`: grids of three
baselines that the study had left at the recipe's values. `mnist-others`, `fashion-others`: methods
that were measured on digits alone. `vit`: whitening of inputs or of both sides, on a transformer of
two blocks. `cifar`: a five-layer CNN on CIFAR-10 at ε = 2. `disk`: κ and γ of the filter, at the
rate that was tuned with 0.7 and 0.5. `imdb`: logistic regression on hashed words, where twenty
trials of the study had left six of thirteen arms with one or two that ran to their end.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc_papers.studies import harness

RESULTS = harness.RESULTS / "grids"
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Points by the name of an arm, each a method and settings over the common ones."""

    recipe: str
    arms: Mapping[str, tuple[str, Sequence[Settings]]]
    common: Settings
    seeds: tuple[int, ...] = (0, 1, 2)
    tuned_with: tuple[int, ...] = (100,)  # seeds of the points; those of tests are others

    def run(self, arm: str, point: Settings, seed: int, test: bool) -> Any:
        from dpkfc.app.tuning.runs import Run

        settings = {**self.common, **point, **({} if test else {"validation_size": 5000})}
        return Run.of(
            self.recipe,
            self.arms[arm][0],
            settings,
            seed=seed,
            evaluate_on="test" if test else "validation",
        )

    def points(self, store: Any, arm: str) -> list[tuple[Settings, list[dict[str, Any]]]]:
        """Those that have been run, with a row for each of their seeds, the best in the mean
        first.
        """
        held = []
        for point in self.arms[arm][1]:
            rows = (store.get(self.run(arm, point, seed, False)) for seed in self.tuned_with)
            held.append((point, [row for row in rows if row is not None]))
        return sorted(
            ((point, rows) for point, rows in held if rows), key=lambda one: -_mean(one[1])
        )

    def cells(self, store: Any, test: bool) -> list[tuple[str, Any]]:
        """All points, or the tests of the arms whose every point has been run; seed by seed."""
        if not test:
            return [
                (arm, self.run(arm, point, seed, False))
                for seed in self.tuned_with
                for arm, (_, points) in self.arms.items()
                for point in points
            ]
        won = {arm: self.points(store, arm)[0][0] for arm in self.arms if self.is_done(store, arm)}
        return [
            (arm, self.run(arm, point, seed, True))
            for seed in self.seeds
            for arm, point in won.items()
        ]

    def tests(self, store: Any, arm: str) -> list[dict[str, Any]]:
        """Rows of an arm's best point on the test set; empty before its points are done."""
        if not self.is_done(store, arm):
            return []
        best = self.points(store, arm)[0][0]
        rows = (store.get(self.run(arm, best, seed, True)) for seed in self.seeds)
        return [row for row in rows if row is not None]

    def is_done(self, store: Any, arm: str) -> bool:
        """Whether every point of an arm has been run with every seed."""
        found = self.points(store, arm)
        return sum(len(rows) for _, rows in found) == len(self.arms[arm][1]) * len(self.tuned_with)


def _mean(rows: Sequence[Mapping[str, Any]]) -> float:
    return statistics.mean(100 * row["accuracy"] for row in rows)


def _spread(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean accuracy, and of several runs its 95 % interval and their number."""
    from dpkfc_papers.studies.harness import interval

    more = f" ({len(rows)})" if len(rows) > 1 else ""
    return interval([100 * row["accuracy"] for row in rows]) + more


def _each(**values: Sequence[Any]) -> list[Settings]:
    """All combinations."""
    points: list[dict[str, Any]] = [{}]
    for name, of in values.items():
        points = [{**point, name: value} for point in points for value in of]
    return points


def _one(point: Settings) -> dict[str, tuple[Any, ...]]:
    """A point as ranges of one value each."""
    return {name: (value,) for name, value in point.items()}


SGD = _each(lr=(0.03, 0.06, 0.1, 0.2), max_grad_norm=(0.3, 1.0, 3.0))
ADAM = [
    {"lr": lr, "max_grad_norm": clip}
    for lr, clip in ((0.001, 0.3), (0.001, 1.0), (0.002, 1.0), (0.002, 2.0))
]
PROTOCOL = {"delta": 1e-5, "epochs": 5.0, "expected_batch_size": 256, "epsilon": 1.0}
LARGE = {"delta": 1e-5, "epochs": 10.0, "expected_batch_size": 1024, "epsilon": 1.0}

LEAVES = {"source": "dead-leaves", "weight_average": 0.98}

AVERAGED = {**LARGE, "lr": 0.003, "weight_average": 0.98}
REFINED = {
    "pink noise": ("dp-kfc-a", [{}]),
    "dead leaves": ("dp-kfc-a", [{"source": "dead-leaves"}]),
    "dead leaves, refined": ("dp-kfc-a", [{"source": "dead-leaves", "refine": 10}]),
    "private oracle (NOT PRIVATE)": ("dp-kfc-a", [{"source": "private-oracle"}]),
}

MAPPED = {"optimizer": "sgd", "readout": "natural"}
ALONG = {"optimizer": "sgd"}
DISCS = {"source": "dead-leaves"}
NGD = {"max_grad_norm": 17.0, "lambda_safe": 0.0018, "probe_size": 64}

VARIED: list[Settings] = [
    {},
    {"exponent": 0.375},
    {"exponent": 0.25},
    {"every": 10},
    {"every": 200},
]
OUTPUTS: list[Settings] = [
    {"labels": "uniform"},
    {"output_source": "dead-leaves"},
    {"output_source": "private-oracle"},  # the last is NOT PRIVATE
]
SMALLER = {"later_probe_size": 32, "factor_decay": 0.9}

TEXT = {
    "delta": 1e-5,
    "epochs": 20.0,
    "expected_batch_size": 512,
    "epsilon": 1.0,
    "evaluate_every": 156,
    "max_rank": 64,
}
WORDS = {"zipf_exponent": 1.5}
SMALL = {"max_grad_norm": 0.2}
IMDB = {
    "DP-SGD": (
        "dp-sgd",
        [
            *_each(lr=(0.25, 0.5, 1.0, 2.0), max_grad_norm=(0.3, 1.0)),
            *_each(lr=(1.5, 2.5, 4.0, 6.0), **_one(SMALL)),
        ],
    ),
    "normalised DP-SGD": ("dp-sgd-normalised", _each(lr=(0.4, 0.9, 2.0))),
    "DP-Adam": (
        "dp-adam",
        [
            *_each(lr=(0.005, 0.01, 0.02, 0.04)),
            *_each(lr=(0.01, 0.02, 0.03, 0.05, 0.08), **_one(SMALL)),
        ],
    ),
    "DP-AdamBC": (
        "dp-adambc",
        [
            *_each(lr=(0.003, 0.01), adam_bc_floor=(1e-6, 5e-6, 2e-5)),
            *_each(lr=(0.01, 0.02, 0.04), adam_bc_floor=(5e-5,)),
            {"lr": 0.02, "adam_bc_floor": 2e-5},
            *_each(lr=(0.005, 0.0075)),
            *_each(lr=(0.01, 0.015, 0.02, 0.03, 0.05), **_one(SMALL)),
        ],
    ),
    "DiSK": (
        "disk",
        [
            *_each(lr=(0.8, 1.6, 3.2, 6.4), disk_gamma=(0.3, 0.5), filter_kappa=(0.7,)),
            *_each(lr=(8.0, 16.0, 32.0), disk_gamma=(0.3,), filter_kappa=(0.7,), **_one(SMALL)),
        ],
    ),
    "DP-KFC, A only, random words": (
        "dp-kfc-a",
        [
            *_each(lr=(0.25, 0.5, 1.0), damping=(0.01, 0.1), **_one(WORDS)),
            {"lr": 0.5, "damping": 0.003, **WORDS},
            {"lr": 0.5, "damping": 0.01, **WORDS, "max_rank": 256},
            *_each(lr=(1.25, 2.5, 4.0), damping=(0.01,), **_one(WORDS | SMALL)),
        ],
    ),
    "DP-KFC, A only, natural gradient, random words": (
        "dp-kfc-a",
        _each(lr=(0.1, 0.2, 0.4), damping=(0.01,), readout=("natural",), **_one(WORDS)),
    ),
    "DP-KFC, both sides, random words": (
        "dp-kfc",
        [
            *_each(lr=(0.25, 0.5, 1.0), damping=(0.03, 0.1), **_one(WORDS)),
            *_each(lr=(1.25, 2.5, 4.0), damping=(0.1,), **_one(WORDS | SMALL)),
        ],
    ),
    "DP-KFC + AdamBC": (
        "dp-kfc",
        [
            *_each(
                lr=(0.01, 0.02),
                damping=(0.03,),
                adam_bc_floor=(1e-5, 5e-5),
                optimizer=("adam-bc",),
                **_one(WORDS),
            ),
            *_each(
                lr=(0.01, 0.015, 0.02, 0.03),
                damping=(0.03,),
                optimizer=("adam-bc",),
                **_one(WORDS | SMALL),
            ),
            *_each(lr=(0.005, 0.0075), damping=(0.03,), optimizer=("adam-bc",), **_one(WORDS)),
        ],
    ),
    "DP-KFC, A only + AdamBC": (
        "dp-kfc-a",
        [
            *_each(
                lr=(0.01, 0.02),
                damping=(0.01,),
                adam_bc_floor=(1e-5, 5e-5),
                optimizer=("adam-bc",),
                **_one(WORDS),
            ),
            *_each(
                lr=(0.01, 0.015, 0.02, 0.03),
                damping=(0.01,),
                optimizer=("adam-bc",),
                **_one(WORDS | SMALL),
            ),
            *_each(lr=(0.005, 0.0075), damping=(0.01,), optimizer=("adam-bc",), **_one(WORDS)),
        ],
    ),
    "AdaDPS, random words": (
        "adadps",
        [
            *_each(lr=(0.5, 1.0, 2.0), adadps_floor=(0.03, 0.1), source=("tokens",)),
            *(
                {"lr": lr, "adadps_floor": floor, "source": "tokens"}
                for lr, floor in ((0.25, 0.03), (0.5, 0.01))
            ),
            *_each(lr=(1.25, 2.5, 4.0), adadps_floor=(0.03,), source=("tokens",), **_one(SMALL)),
        ],
    ),
    "A only, same spectrum, random directions": (
        "dp-kfc-random",
        [
            *_each(lr=(0.25, 0.5, 1.0, 0.12), damping=(0.01, 0.1), sides=("input",), **_one(WORDS)),
            *_each(
                lr=(0.6, 1.25, 2.5, 4.0, 6.0),
                damping=(0.01,),
                sides=("input",),
                **_one(WORDS | SMALL),
            ),
        ],
    ),
    "DP-KFC, A only, private oracle (NOT PRIVATE)": (
        "dp-kfc-a",
        [
            *_each(lr=(0.25, 0.5), damping=(0.01, 0.1), source=("private-oracle",)),
            *_each(
                lr=(0.12, 0.25, 0.5), damping=(0.1,), source=("private-oracle",), max_rank=(256,)
            ),
            *_each(lr=(1.25, 2.5, 4.0), damping=(0.1,), source=("private-oracle",), **_one(SMALL)),
        ],
    ),
}

GEP_RATES = (0.003, 0.01, 0.03, 0.1)
OTHERS = {
    "DOPPLER": ("doppler", _each(lr=(0.1, 0.2, 0.4, 0.8, 1.6))),
}
VIT = _each(lr=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032))

SOURCES = {
    "pink noise": {},
    "dead leaves": {"source": "dead-leaves"},
    "private oracle (NOT PRIVATE)": {"source": "private-oracle"},
    "pink noise, exponent 2": {"power_exponent": 2.0},
}

GRIDS: dict[str, Grid] = {
    "mlp": Grid(
        recipe="mnist-mlp",
        common=PROTOCOL,
        arms={
            "dp-sgd": ("dp-sgd", SGD),
            "dp-adam": ("dp-adam", ADAM),
            "normalised dp-sgd": ("dp-sgd-normalised", _each(lr=(0.05, 0.1, 0.2))),
            "DP-KFC, A only, natural gradient, pink noise": (
                "dp-kfc-a",
                _each(lr=(0.03, 0.05, 0.1), **_one(MAPPED)),
            ),
        },
    ),
    "probes": Grid(
        recipe="mnist-cnn",
        common=PROTOCOL,
        arms={
            f"A only, {name}": ("dp-kfc-a", [{**own, "lr": lr} for lr in (0.002, 0.001)])
            for name, own in SOURCES.items()
        }
        | {
            f"both sides, {name}": ("dp-kfc", [{**own, "lr": lr} for lr in (0.002, 0.001)])
            for name, own in SOURCES.items()
        },
    ),
    "best": Grid(
        recipe="mnist-cnn",
        common=LARGE,
        seeds=(0, 1, 2, 3, 4),
        arms={
            "DP-KFC, A only": (
                "dp-kfc-a",
                [
                    *_each(lr=(0.001, 0.002, 0.004, 0.008), schedule=("constant", "cosine")),
                    {"lr": 0.004, "schedule": "constant", "power_exponent": 1.5},
                    {"lr": 0.004, "schedule": "constant", "max_grad_norm": 0.3},
                    {"lr": 0.004, "schedule": "constant", "power_exponent": 1.5, "damping": 0.3},
                    {"lr": 0.004, "schedule": "constant", "source": "dead-leaves"},
                    {
                        "lr": 0.004,
                        "schedule": "constant",
                        "source": "dead-leaves",
                        "weight_average": 0.98,
                    },
                    {
                        "lr": 0.006,
                        "schedule": "constant",
                        "source": "dead-leaves",
                        "weight_average": 0.99,
                    },
                    *({**LEAVES, "lr": lr} for lr in (0.003, 0.002)),
                ],
            ),
            "DP-KFC, A only, natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.04, 0.08), **_one(MAPPED | LEAVES)),
            ),
            "DP-Adam": (
                "dp-adam",
                [{"lr": lr, "weight_average": 0.98} for lr in (0.004, 0.008, 0.002)],
            ),
            "DP-KFC, A only, private oracle (NOT PRIVATE)": (
                "dp-kfc-a",
                [
                    {"lr": lr, "source": "private-oracle", "weight_average": 0.98}
                    for lr in (0.004, 0.002)
                ],
            ),
            "DP-KFC, A only, pink noise": (
                "dp-kfc-a",
                [{"lr": lr, "weight_average": 0.98} for lr in (0.004, 0.002)],
            ),
        },
    ),
    "mapped": Grid(
        recipe="mnist-cnn",
        common=PROTOCOL,
        seeds=(0, 1, 2, 3, 4),
        arms={
            "A only, dead leaves, natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.02, 0.03, 0.015), **_one(MAPPED | DISCS)),
            ),
            "A only, dead leaves refined, natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.02, 0.03, 0.015), refine=(10,), **_one(MAPPED | DISCS)),
            ),
            "A only, pink noise, natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.01, 0.02, 0.03), **_one(MAPPED)),
            ),
            "A only, dead leaves, preconditioned": (
                "dp-kfc-a",
                _each(lr=(0.03, 0.06, 0.12), **_one(ALONG | DISCS)),
            ),
            "A only, dead leaves, preconditioned, Adam": (
                "dp-kfc-a",
                _each(lr=(0.002, 0.001, 0.004), **_one(DISCS)),
            ),
            "both sides, dead leaves, natural gradient": (
                "dp-kfc",
                _each(lr=(0.01, 0.02, 0.03), **_one(MAPPED | DISCS)),
            ),
            "A only, same spectrum, random directions, natural gradient": (
                "dp-kfc-random",
                _each(lr=(0.01, 0.03, 0.06, 0.12), sides=("input",), **_one(MAPPED | DISCS)),
            ),
            "A only, private oracle (NOT PRIVATE), natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.02, 0.03, 0.015), source=("private-oracle",), **_one(MAPPED)),
            ),
        },
    ),
    "fashion": Grid(
        recipe="fashion-mnist-cnn",
        common=PROTOCOL,
        arms={
            "DP-SGD": ("dp-sgd", _each(lr=(0.06, 0.1, 0.2))),
            "A only, dead leaves, natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.02, 0.03, 0.05), **_one(MAPPED | DISCS)),
            ),
            "A only, pink noise, preconditioned, Adam": ("dp-kfc-a", _each(lr=(0.001, 0.002))),
            "A only, pink noise, natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.02, 0.03), **_one(MAPPED)),
            ),
            "A only, private oracle (NOT PRIVATE), natural gradient": (
                "dp-kfc-a",
                _each(lr=(0.02, 0.03), source=("private-oracle",), **_one(MAPPED)),
            ),
            "A only, same spectrum, random directions, natural gradient": (
                "dp-kfc-random",
                _each(lr=(0.01, 0.03), sides=("input",), **_one(MAPPED | DISCS)),
            ),
            "both sides, pink noise, preconditioned, Adam": ("dp-kfc", _each(lr=(0.001, 0.002))),
            "A only, dead leaves, preconditioned, Adam": (
                "dp-kfc-a",
                _each(lr=(0.001, 0.002), **_one(DISCS)),
            ),
            "DP-Adam": ("dp-adam", _each(lr=(0.001, 0.003))),
        },
    ),
    "fashion-baselines": Grid(
        recipe="fashion-mnist-cnn",
        common={**PROTOCOL, "max_grad_norm": 1.0},
        seeds=(0, 1, 2, 3, 4),
        arms={
            "DP-SGD": ("dp-sgd", _each(lr=(0.05, 0.1, 0.2, 0.4))),
            "DP-AdamBC": (
                "dp-adambc",
                _each(lr=(0.0015, 0.003, 0.006, 0.012, 0.024), adam_bc_floor=(1e-4,)),
            ),
            "DiSK": ("disk", _each(lr=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0))),
        },
    ),
    "mnist-others": Grid(
        recipe="mnist-cnn",
        common={**PROTOCOL, "max_grad_norm": 1.0},
        arms=OTHERS
        | {"B-GEP": ("b-gep", _each(lr=GEP_RATES, public_data=("@fashion-mnist-cnn:500",)))},
    ),
    "fashion-others": Grid(
        recipe="fashion-mnist-cnn",
        common={**PROTOCOL, "max_grad_norm": 1.0},
        arms=OTHERS | {"B-GEP": ("b-gep", _each(lr=GEP_RATES, public_data=("@mnist-cnn:500",)))},
    ),
    "vit": Grid(
        recipe="mnist-vit",
        common={**PROTOCOL, "epochs": 1.0, "max_grad_norm": 1.0},
        seeds=(0, 1, 2, 3, 4),
        arms={
            "DP-Adam": ("dp-adam", VIT),
            "A only, pink noise": ("dp-kfc-a", VIT),
            "both sides, pink noise": ("dp-kfc", VIT),
        },
    ),
    "cifar": Grid(
        recipe="cifar10-cnn",
        common={"delta": 1e-5, "epochs": 5.0, "expected_batch_size": 512, "epsilon": 2.0},
        arms={
            "DP-SGD": ("dp-sgd", _each(lr=(0.1, 0.2, 0.4, 0.8, 1.6))),
            "normalised DP-SGD": ("dp-sgd-normalised", _each(lr=(0.4, 0.8, 1.6, 3.2))),
            "A only, dead leaves, natural gradient": (
                "dp-kfc-natural",
                _each(lr=(0.03, 0.06, 0.1), **_one(DISCS)),
            ),
            "A only, pink noise, preconditioned, Adam": (
                "dp-kfc-a",
                _each(lr=(0.001, 0.002, 0.004, 0.008, 0.016)),
            ),
            "DP-Adam": ("dp-adam", _each(lr=(0.001, 0.002, 0.004, 0.008, 0.016))),
            "A only, same spectrum, random directions, natural gradient": (
                "dp-kfc-random",
                _each(lr=(0.03, 0.06, 0.12, 0.24, 0.48), sides=("input",), **_one(MAPPED | DISCS)),
            ),
            "DiSK": ("disk", _each(lr=(1.0, 2.0, 4.0, 8.0))),
            "DP-NGD, 500 public images of CIFAR-100": (
                "dp-ngd",
                _each(
                    lr=(0.00075, 0.0015, 0.003, 0.006, 0.012, 0.024, 0.048),
                    public_data=("@cifar100:500",),
                    **_one(NGD),
                ),
            ),
            "DP-NGD, dead leaves": ("dp-ngd", _each(lr=(0.024, 0.012), **_one(NGD | DISCS))),
            "A only, pink noise, natural gradient": (
                "dp-kfc-natural",
                _each(lr=(0.06, 0.03), source=("pink",)),
            ),
            "both sides, pink noise, preconditioned, Adam": (
                "dp-kfc",
                _each(lr=(0.004, 0.008)),
            ),
        },
    ),
    "disk": Grid(
        recipe="mnist-cnn",
        common={**PROTOCOL, "max_grad_norm": 1.0, "lr": 1.0},
        arms={
            "DiSK": (
                "disk",
                _each(filter_kappa=(0.5, 0.7, 0.9), disk_gamma=(0.3, 0.5, 0.7, 0.9)),
            ),
        },
    ),
    "varied": Grid(
        recipe="mnist-cnn",
        common=PROTOCOL,
        tuned_with=(100, 101),
        arms={
            "both sides, pink noise, preconditioned, Adam": (
                "dp-kfc",
                [{"lr": 0.002, **own} for own in (*VARIED, *OUTPUTS)],
            ),
            "A only, dead leaves, natural gradient": (
                "dp-kfc-natural",
                [
                    *({"lr": 0.03, **own} for own in (*VARIED, {"every": 2000}, SMALLER)),
                    {"lr": 0.06, "exponent": 0.375},
                    *({"lr": lr, "exponent": 0.25} for lr in (0.06, 0.12)),
                ],
            ),
        },
    ),
    "refined": Grid(
        recipe="mnist-cnn", common=AVERAGED, arms=REFINED, tuned_with=(100, 101, 102, 103)
    ),
    "imdb": Grid(recipe="imdb-logistic", common=TEXT, arms=IMDB),
    "refined-fashion": Grid(
        recipe="fashion-mnist-cnn", common=AVERAGED, arms=REFINED, tuned_with=(100, 101, 102, 103)
    ),
}


def table(name: str, store: Any) -> str:
    from dpkfc_papers.studies.harness import markdown

    grid, lines = GRIDS[name], []
    for arm, (_, points) in grid.arms.items():
        found = grid.points(store, arm)
        if not found:
            continue
        best, rows = found[0]
        tests = grid.tests(store, arm)
        begun = f"{len(found)}" if len(found) == len(points) else f"{len(found)} of {len(points)}"
        lines.append(
            [arm, begun, _spread(rows), _spread(tests) if tests else "–", _describe_point(best)]
        )
    tested = f"test %, ε = {grid.common['epsilon']:g} (seeds)"
    return markdown(["method", "points", "best validation %", tested, "settings"], lines)


def every_point(name: str, store: Any) -> str:
    """All points of a grid, the best of an arm first."""
    from dpkfc_papers.studies.harness import markdown

    grid = GRIDS[name]
    lines = [
        [
            arm,
            _describe_point(point),
            _spread(rows),
            f"{rows[0]['noise_multiplier']:.2f}",
            str(rows[0]["steps"]),
        ]
        for arm in grid.arms
        for point, rows in grid.points(store, arm)
    ]
    return markdown(["method", "settings", "validation %", "σ", "steps"], lines)


def _describe_point(point: Settings) -> str:
    return ", ".join(
        f"{name} = {value}" if isinstance(value, str) else f"{name} = {value:g}"
        for name, value in point.items()
    )


def main() -> int:
    from dpkfc_papers.store import Store
    from dpkfc_papers.studies.harness import cells_parser, run_cells

    parser = cells_parser(__doc__)
    parser.add_argument("--grid", choices=list(GRIDS), required=True)
    parser.add_argument(
        "--points-only", action="store_true", help="the validation split alone, no tests yet"
    )
    arguments = parser.parse_args()
    name = arguments.grid
    grid, path = GRIDS[name], arguments.results or RESULTS / f"{name}.json"
    if not arguments.table:
        points, tests = (
            (lambda store: grid.cells(store, False)),
            (lambda store: grid.cells(store, True)),
        )
        stages = [points] if arguments.points_only else [points, tests]
        if code := run_cells(stages, path, arguments.out or Path(f"runs/grid-{name}"), arguments):
            return code
    print(table(name, Store(path)))
    print(f"\n{every_point(name, Store(path))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
