"""Theorem 5.4 of the DP-KFC paper as printed: the least gradient norm over the number of steps.

    python -m dpkfc_papers.studies.convergence  # minutes; papers/results/convergence.json
    python -m dpkfc_papers.studies.convergence --table  # the table

With the learning rate 1 / √T the theorem bounds min over t < T of E ‖∇L(θ_t)‖² by a constant over
√T: a slope of −1/2 or less on logarithmic axes. A network of 64, 32 and 10 units with tanh learns
scikit-learn's digits in batches of 256. E is the mean over seeds. ‖∇L‖ is taken over all digits,
which are public here. The theorem holds σ; a budget does not: at a given ε, σ grows with T.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc import KFAC, PrivacyConfig, Session, WhiteNoise
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc_papers.studies.harness import (
    IMAGES,
    RESULTS,
    figures,
    figures_parser,
    finish,
    markdown,
    read_json,
    sheet,
)

PATH = RESULTS / "convergence.json"
PICTURE = IMAGES / "convergence.png"
STEPS = (256, 1024, 4096, 16384)
SEEDS = 3
BATCH = 256
# The least norm is taken over at most so many steps of a run.
LOOKS = 256
NOISES = {"σ = 1": None, "ε = 2": 2.0}
METHODS = ("dp-sgd", "dp-kfc")
NAMES = {"dp-sgd": "DP-SGD", "dp-kfc": "DP-KFC"}


def load_data() -> tuple[Tensor, Tensor]:
    """Return the digits, scaled to [0, 1]."""
    from sklearn.datasets import load_digits

    rows, labels = load_digits(return_X_y=True)
    return torch.tensor(rows / 16, dtype=torch.float32), torch.tensor(labels)


def square_norm(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return ‖∇L‖² over all data."""
    gradients = torch.autograd.grad(cross_entropy(model, data).mean(), list(model.parameters()))
    return sum(float(g.square().sum()) for g in gradients)


def measure_run(
    method: str, steps: int, epsilon: float | None, seed: int, data: tuple[Tensor, Tensor]
) -> list[float]:
    """Return ‖∇L‖² along one run, at evenly spaced steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / math.sqrt(steps))
    preconditioner = None
    if method == "dp-kfc":
        preconditioner = KFAC(probe=WhiteNoise((64,)), probe_size=256, every=50)
    config = PrivacyConfig(
        expected_batch_size=BATCH,
        steps=steps,
        max_grad_norm=1.0,
        preconditioner=preconditioner,
        accountant="rdp",
    )
    size = len(data[1])
    if epsilon is None:
        plan = config.with_noise(1.0, 1e-5, size)
    else:
        plan = config.calibrate(epsilon, 1e-5, size)
    norms = []
    with Session(plan, model, optimizer, data) as session:
        for step, batch in enumerate(session.batches()):
            if step % max(1, steps // LOOKS) == 0:
                norms.append(square_norm(model, data))
            session.step(batch, cross_entropy)
    return norms


def measure(_: str) -> dict[str, Any]:
    """Measure every cell."""
    data = load_data()
    rows: list[dict[str, Any]] = []
    for noise, epsilon in NOISES.items():
        for method in METHODS:
            for steps in STEPS:
                runs = [measure_run(method, steps, epsilon, seed, data) for seed in range(SEEDS)]
                least = min(map(statistics.mean, zip(*runs, strict=True)))
                row = {"noise": noise, "method": method, "steps": steps, "least": round(least, 6)}
                rows.append(row)
                print(row, flush=True)
    return {"seeds": SEEDS, "rows": rows}


def fit_slope(cells: dict[int, float]) -> float:
    """Return the slope of the least squares line through logarithms."""
    x = [math.log(steps) for steps in cells]
    y = [math.log(least) for least in cells.values()]
    return statistics.linear_regression(x, y).slope


def lines(results: dict[str, Any]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the least norm by steps, for each noise and method."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in results["rows"]:
        found.setdefault((row["noise"], row["method"]), {})[row["steps"]] = row["least"]
    return found


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table of the results."""
    rows = []
    for (noise, method), cells in lines(results).items():
        values = [f"{cells[steps]:.4f}" for steps in STEPS]
        rows.append([noise, NAMES[method], *values, f"{fit_slope(cells):.2f}"])
    return markdown(["noise", "method", *[f"T = {steps:,}" for steps in STEPS], "slope"], rows)


def draw(results: dict[str, Any]) -> None:
    """Draw the least norms over T beside the rate of the theorem."""
    figure, panels = sheet(1, len(NOISES), height=3, sharey=True)
    for panel, noise in zip(panels[0], NOISES, strict=True):
        for method, marker in zip(METHODS, "os", strict=True):
            cells = lines(results)[noise, method]
            panel.loglog(list(cells), list(cells.values()), marker=marker, label=NAMES[method])
        first = lines(results)[noise, METHODS[0]][STEPS[0]]
        rate = [first * math.sqrt(STEPS[0] / steps) for steps in STEPS]
        panel.loglog(STEPS, rate, "--", color="C6", label="1 / √T")
        panel.set_title(noise)
        panel.set_xlabel("steps T")
    panels[0][0].set_ylabel("least mean ‖∇L‖²")
    finish(figure, PICTURE, 3)


def main() -> int:
    """Measure, or print what has been measured; draw both."""
    status = figures(figures_parser(__doc__, PATH).parse_args(), measure, table)
    draw(read_json(PATH))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
