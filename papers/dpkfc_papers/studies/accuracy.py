"""The MNIST study: DP-SGD and its controls against DP-KFC at one ε, tuned on a validation split of
the training set.

    python -m dpkfc_papers.studies.accuracy --data-dir DIR  # resumable; keeps every finished run
    python -m dpkfc_papers.studies.accuracy --table  # the table

Every arm gets the same learning-rate grid per optimizer, one tuning seed on the validation split,
then three seeds on the test set at the rate that won. Each seed has its own initialisation. Noise
is secure and never seeded.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import platform
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc_papers.studies import harness

RESULTS = harness.RESULTS / "accuracy.json"
VALIDATION, SPLIT_SEED, TUNING_SEED, SEEDS = 5000, 0, 100, (0, 1, 2)

ARMS: dict[str, dict[str, Any]] = {
    "DP-SGD, clip C=1": {"sides": None, "clipping": "flat", "max_grad_norm": 1.0},
    "DP-SGD, normalised clip": {"sides": None, "clipping": "normalised", "max_grad_norm": 0.05},
    "A only": {"sides": "input", "clipping": "flat", "max_grad_norm": 1.0},
    "G only": {"sides": "output", "clipping": "flat", "max_grad_norm": 1.0},
    "DP-KFC, pink noise": {"sides": "both", "clipping": "flat", "max_grad_norm": 1.0},
}
RATES = {"sgd": (0.03, 0.1, 0.3), "adam": (1e-3, 3e-3, 1e-2)}
COMMON: dict[str, Any] = {
    "dataset": "mnist",
    "epsilon": 1.0,
    "delta": 1e-5,
    "expected_batch_size": 256,
    "epochs": 5,
    "damping": 0.1,
    "scale": "balanced",
    "every": 50,
    "probe_size": 256,
}


def load(
    data_dir: str | None, dataset: str, evaluate_on: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(private training examples, evaluation examples); the validation split is never trained
    on.
    """
    from dpkfc.app.datasets import Normalisation, split
    from dpkfc.app.datasets.sources import FASHION_MNIST, MNIST, load_pixels

    source = {"mnist": MNIST, "fashion-mnist": FASHION_MNIST}[dataset]
    images = load_pixels(source, data_dir).tensors(Normalisation((0.1307,), (0.3081,)))
    train, validation = split(images.train, VALIDATION, SPLIT_SEED)
    return train, (validation if evaluate_on == "validation" else images.test)


def accuracy(model: nn.Module, examples: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).sum()
            for x, y in zip(*(t.split(1000) for t in examples), strict=True)
        ]
    model.train()
    return float(sum(right)) / len(examples[1])


def calibrated(settings: dict[str, Any], dataset_size: int) -> float:
    """σ of an arm: all arms of one (ε, δ, B, epochs) share it, because whitening and clipping
    change no event.
    """
    from dpkfc.config import PrivacyConfig

    config = PrivacyConfig(
        expected_batch_size=settings["expected_batch_size"], epochs=settings["epochs"]
    )
    return config.calibrate(settings["epsilon"], settings["delta"], dataset_size).noise_multiplier


def train_once(
    settings: dict[str, Any], noise_multiplier: float, data_dir: str | None
) -> dict[str, Any]:
    """One private training run; returns its settings with accuracy, σ, ε and seconds."""
    torch.set_num_threads(1)
    from dpkfc.app.models import mnist_cnn, seeded
    from dpkfc.config import PrivacyConfig
    from dpkfc.curvature.kfac import KFAC
    from dpkfc.curvature.probes import PinkNoise
    from dpkfc.session import Session

    train, evaluation = load(data_dir, settings["dataset"], settings["evaluate_on"])
    model = seeded(mnist_cnn, settings["seed"])
    kfac = None
    if settings["sides"]:
        names = ("sides", "damping", "scale", "every", "probe_size", "seed")
        kfac = KFAC(probe=PinkNoise((1, 28, 28)), **{k: settings[k] for k in names})
    names = ("expected_batch_size", "epochs", "max_grad_norm", "clipping")
    config = PrivacyConfig(preconditioner=kfac, **{k: settings[k] for k in names})
    plan = config.with_noise(noise_multiplier, settings["delta"], len(train[1]))
    if settings["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), settings["lr"], momentum=0.9
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), settings["lr"])
    started, clipped = time.perf_counter(), []
    with Session(plan, model, optimizer, train) as session:
        for batch in session.batches():
            record = session.step(
                batch, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")
            )
            clipped.append(record.clipped_fraction)
        epsilon = session.epsilon
    assert epsilon <= settings["epsilon"], (epsilon, settings["epsilon"])
    return {
        **settings,
        "accuracy": accuracy(model, evaluation),
        "noise_multiplier": plan.noise_multiplier,
        "epsilon_spent": epsilon,
        "steps": plan.steps,
        "clipped_fraction": float(np.mean(clipped)),
        "seconds": time.perf_counter() - started,
    }


def key(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def hardware() -> dict[str, Any]:
    cpu = next(
        (x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "threads_a_run": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}


def run_all(jobs: list[dict[str, Any]], data_dir: str | None, workers: int) -> None:
    """Run what is not there yet, side by side; every finished run is written at once."""
    results = read()
    todo = [job for job in jobs if key(job) not in results["runs"]]
    if not todo:
        return
    private = len(load(data_dir, COMMON["dataset"], "test")[0][1])
    noise = calibrated(COMMON, private)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(train_once, job, noise, data_dir): job for job in todo}
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            row = future.result()
            results["runs"][key(futures[future])] = row
            results["hardware"] = hardware()
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True))
            shown = {
                k: row[k]
                for k in ("arm", "optimizer", "lr", "seed", "evaluate_on", "accuracy", "seconds")
            }
            print(f"{done}/{len(todo)}", shown, flush=True)


def tuning_jobs() -> list[dict[str, Any]]:
    return [
        {
            **COMMON,
            **arm,
            "arm": name,
            "optimizer": o,
            "lr": lr,
            "seed": TUNING_SEED,
            "evaluate_on": "validation",
        }
        for o, rates in reversed(RATES.items())
        for lr in rates
        for name, arm in reversed(ARMS.items())
    ]


def best_rate(runs: list[dict[str, Any]], arm: str, optimizer: str) -> dict[str, Any] | None:
    mine = [
        r
        for r in runs
        if (r["arm"], r["optimizer"], r["evaluate_on"]) == (arm, optimizer, "validation")
    ]
    return max(mine, key=lambda r: r["accuracy"]) if mine else None


def final_jobs() -> list[dict[str, Any]]:
    runs = list(read()["runs"].values())
    jobs = []
    for seed in SEEDS:
        for optimizer in RATES:
            for name, arm in ARMS.items():
                best = best_rate(runs, name, optimizer)
                assert best is not None
                jobs.append(
                    {
                        **COMMON,
                        **arm,
                        "arm": name,
                        "optimizer": optimizer,
                        "lr": best["lr"],
                        "seed": seed,
                        "evaluate_on": "test",
                    }
                )
    return jobs


def table() -> str:
    """Mean and 95 % interval over the seeds, with the tuned rate and the validation accuracy that
    chose it.
    """
    from dpkfc_papers.studies.harness import interval

    results = read()
    runs = list(results["runs"].values())
    lines = [
        "| method | optimizer | lr | validation % (tuning seed) | test % | seeds | clipped | σ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for optimizer in RATES:
        for name in ARMS:
            best = best_rate(runs, name, optimizer)
            if best is None:
                continue
            test = [
                r
                for r in runs
                if (r["arm"], r["optimizer"], r["lr"], r["evaluate_on"])
                == (name, optimizer, best["lr"], "test")
            ]
            if not test:
                continue
            spread = interval([100 * r["accuracy"] for r in test])
            label = {"sgd": "SGD, momentum 0.9", "adam": "Adam"}[optimizer]
            lines.append(
                f"| {name} | {label} | {best['lr']:g} | {100 * best['accuracy']:.2f} | {spread} |"
                f" {len(test)} | "
                f"{100 * np.mean([r['clipped_fraction'] for r in test]):.0f} % |"
                f" {test[0]['noise_multiplier']:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with the data sets; default: $DPKFC_DATA")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the committed results and stop"
    )
    arguments = parser.parse_args()
    if not arguments.table:
        run_all(tuning_jobs(), arguments.data_dir, arguments.jobs)
        run_all(final_jobs(), arguments.data_dir, arguments.jobs)
    print(table())


if __name__ == "__main__":
    main()
