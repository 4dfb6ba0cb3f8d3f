"""How white a probe makes the inputs that a layer really sees: MNIST's CNN, factors of noise
against factors of private images.

    python -m dpkfc_papers.studies.probe_whitening --data-dir DIR
    python -m dpkfc_papers.studies.probe_whitening --picture docs/img/probes.png --weights MODEL
    python -m dpkfc_papers.studies.probe_whitening --table  # the table

With A of a probe, damped by a tenth of its mean eigenvalue, and A' of 2,000 private images, the
eigenvalues p of A^(-1/2) A' A^(-1/2), scaled to sum 1, have the effective rank exp(-Σ p log p): the
width of the layer where the probe whitens perfectly, 1 where one direction is left with everything.
Looked at with initial weights and after 150 and 600 steps of plain SGD, which is NOT PRIVATE and
for the figure alone. Refined dead leaves are those that the weights of the same moment have moved.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from dpkfc_papers.studies.harness import (
    RESULTS,
    figures,
    figures_parser,
    finish,
    markdown,
    sheet,
)

PATH = RESULTS / "probe_whitening.json"
EXAMPLES, HELD, STEPS, DAMPING = 512, 2000, (0, 150, 600), 0.1


def input_factors(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """E[a aᵀ] of every layer with weights, patches and a constant 1 as rows, in float64."""
    found = []
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.Conv2d | nn.Linear):
                rows = x
                if isinstance(module, nn.Conv2d):
                    rows = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1).double()
                found.append(rows.T @ rows / len(rows))
            x = module(x)
    return found


def effective_rank(probe: Tensor, true: Tensor) -> float:
    """Of the true factor, whitened by the factor of the probe."""
    values, vectors = torch.linalg.eigh(
        probe + DAMPING * probe.diagonal().mean() * torch.eye(len(probe))
    )
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    p = torch.linalg.eigvalsh(root @ true @ root).clamp(min=1e-300)
    p = p / p.sum()
    return float(torch.exp(-(p * p.log()).sum()))


def probes(data_dir: str, private: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    from dpkfc import DeadLeaves, PinkNoise, WhiteNoise
    from dpkfc_papers.public_examples import recipe_data

    shape = (1, 28, 28)
    noise = {
        "white noise": WhiteNoise(shape),
        "pink noise": PinkNoise(shape),
        "pink noise, exponent 2": PinkNoise(shape, 2.0),
        "dead leaves": DeadLeaves(shape),
    }
    other = recipe_data("fashion-mnist-cnn", data_dir).train[0]
    return {
        **{name: probe.sample(EXAMPLES, generator)[0] for name, probe in noise.items()},
        "Fashion-MNIST (public)": other[:EXAMPLES],
        "MNIST, other images (NOT PRIVATE)": private[-EXAMPLES:],
    }


def refined(model: nn.Sequential, x: Tensor, generator: torch.Generator) -> Tensor:
    """Every second image moved towards a class of the model, as a refresh moves images of its
    probe.
    """
    from dpkfc import DeadLeaves, Refined

    classes = torch.randint(10, (len(x) // 2,), generator=generator)
    probe = Refined(DeadLeaves(tuple(x.shape[1:])))
    return probe.refine(
        x, lambda x, _: F.cross_entropy(model(x), classes, reduction="none"), slice(0, len(x))
    )


def measure(data_dir: str) -> dict[str, Any]:
    from dpkfc.app.recipes.catalogue import find_recipe
    from dpkfc_papers.public_examples import recipe_data

    x, y = recipe_data("mnist-cnn", data_dir).train
    generator = torch.Generator().manual_seed(0)
    seen, model = probes(data_dir, x, generator), find_recipe("mnist-cnn").model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stages: dict[str, Any] = {}
    trained = 0
    for done in STEPS:
        for _ in range(done - trained):
            chosen = torch.randint(len(x) - EXAMPLES, (128,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        trained, true = done, input_factors(model, x[:HELD])
        seen["dead leaves, refined"] = refined(
            model, seen["dead leaves"], torch.Generator().manual_seed(1)
        )
        ranks = {}
        for name, inputs in seen.items():
            pairs = zip(input_factors(model, inputs), true, strict=True)
            ranks[name] = [effective_rank(*pair) for pair in pairs]
        stage = f"after {done} steps" if done else "initial weights"
        stages[stage] = {"widths": [len(a) for a in true], "effective_ranks": ranks}
    return {"stages": stages}


def picture(seen: Mapping[str, Tensor], path: Path) -> None:
    """Eight examples of every probe but the private one."""
    public = {name: x for name, x in seen.items() if "NOT PRIVATE" not in name}
    figure, rows = sheet(len(public), 1, height=0.85 * len(public))
    for axis, (name, x) in zip(rows[:, 0], public.items(), strict=True):
        apart = F.pad(x[:8, 0], (0, 2), value=math.nan)
        axis.imshow(torch.cat([*apart], 1), cmap="gray")
        axis.set_axis_off()
        axis.set_title(name)
    finish(figure, path)


def table(results: Mapping[str, Any]) -> str:
    lines = []
    for stage, of in results["stages"].items():
        lines.append([f"*{stage}: width*", *(f"*{width}*" for width in of["widths"])])
        noise_first = sorted(of["effective_ranks"].items(), key=lambda one: "(" in one[0])
        lines += [[name, *(f"{rank:.1f}" for rank in ranks)] for name, ranks in noise_first]
    return markdown(
        ["inputs whitened by", "convolution 1", "convolution 2", "linear 1", "linear 2"], lines
    )


def main() -> int:
    parser = figures_parser(__doc__, PATH)
    parser.add_argument(
        "--picture", type=Path, help="draw examples of the probes into this PNG and stop"
    )
    parser.add_argument(
        "--weights", type=Path, help="of a private run, whose refined images are drawn too"
    )
    arguments = parser.parse_args()
    if arguments.picture:
        from dpkfc.app.recipes.catalogue import find_recipe
        from dpkfc_papers.public_examples import recipe_data

        private = recipe_data("mnist-cnn", arguments.data_dir).train[0]
        seen = probes(arguments.data_dir, private, torch.Generator().manual_seed(0))
        if arguments.weights:
            model = find_recipe("mnist-cnn").model(0)
            model.load_state_dict(load_file(arguments.weights))
            seen["dead leaves, refined (MNIST, ε = 1)"] = refined(
                model, seen["dead leaves"], torch.Generator().manual_seed(1)
            )
        picture(seen, arguments.picture)
        return 0
    return figures(arguments, measure, table)


if __name__ == "__main__":
    sys.exit(main())
