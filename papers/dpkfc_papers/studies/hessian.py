"""Figure 7 of the DP-KFC paper for the Hessian of the loss itself, before and after training.

    python -m dpkfc_papers.studies.hessian --data-dir DIR  # minutes; papers/results/hessian.json
    python -m dpkfc_papers.studies.hessian --table  # the table

`kfc-fig7` has the Fisher matrix, which has no negative eigenvalue; the paper's text names the
Hessian. Networks and training are taken from the figures (`dpkfc reproduce kfc-fig7`). Labels of
noise and of images of another set are drawn from the model; private examples have their own, which
gives the Hessian that is trained on. NOT PRIVATE: a measurement for public benchmark data.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpkfc_papers.studies.harness import (
    RESULTS,
    figures,
    figures_parser,
    finish,
    hardware,
    markdown,
    now,
    read_json,
    sheet,
)

PATH = RESULTS / "hessian.json"
PICTURE = "hessian.png"
EXAMPLES, STEPS, STARTS = 128, 32, 1
MODELS = ("mnist-mlp", "mnist-cnn")
COLOURS = {
    "oracle": "black",
    "pink noise": "C1",
    "white noise": "C6",
    "public": "C0",
}


def hessian_product(
    model: nn.Module, inputs: Tensor, labels: Tensor
) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return v ↦ H v for the mean cross-entropy over the examples, and the size of v."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # The fused kernels of attention cannot be differentiated twice.
    with torch.enable_grad(), sdpa_kernel([SDPBackend.MATH]):
        loss = functional.cross_entropy(model(inputs), labels)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([slope.reshape(-1) for slope in slopes])

    def product(vector: Tensor) -> Tensor:
        curved = torch.autograd.grad(flat, parameters, vector, retain_graph=True)
        return torch.cat([piece.reshape(-1) for piece in curved])

    return product, flat.numel()


def _spectrum(model: nn.Module, inputs: Tensor, labels: Tensor | None) -> dict[str, Any]:
    """Return nodes of Lanczos quadrature, largest first, with the share that each stands for."""
    from dpkfc_papers.spectral_density import lanczos

    generator = torch.Generator().manual_seed(0)
    inputs = inputs.double()
    if labels is None:
        with torch.no_grad():
            probabilities = model(inputs).softmax(-1)
        labels = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    product, size = hessian_product(model, inputs, labels)
    nodes, weights = [], []
    for _ in range(STARTS):
        signs = 2 * torch.randint(2, (size,), generator=generator) - 1
        found, shares = lanczos(product, signs.double(), STEPS)
        nodes.append(found)
        weights.append(shares / STARTS)
    joined, share = torch.cat(nodes), torch.cat(weights)
    order = joined.argsort(descending=True)
    joined, share = joined[order], share[order]
    return {
        "largest": float(joined[0]),
        "smallest": float(joined[-1]),
        "nodes": [float(f"{node:.4g}") for node in joined],
        "above": [float(f"{count:.4g}") for count in size * share.cumsum(0)],
    }


def measure(data_dir: str) -> dict[str, Any]:
    """Return the spectra of every network, step and source."""
    from dpkfc.app.prepare import prepare
    from dpkfc.app.run_folder import RunFolder
    from dpkfc.app.train import measure as train
    from dpkfc.app.tuning.runs import Place, Run
    from dpkfc_papers.figures import MODELS as TRAINING
    from dpkfc_papers.measurements import AGAIN, ORACLE, find_sources

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            run = Run.make(name, "dp-kfc", TRAINING[name])
            prepared = prepare(run.config(threads=1, data_dir=data_dir))
            sources = find_sources(prepared, Place(Path(folder), data_dir))
            sources.pop(AGAIN)

            def look(step: int, prepared: Any = prepared, sources: Any = sources) -> None:
                model = copy.deepcopy(prepared.model).double().eval()
                for source, probe in sources.items():
                    generator = torch.Generator().manual_seed(step)
                    inputs, labels = probe.sample(EXAMPLES, generator)
                    own = labels if source == ORACLE else None
                    row = {"model": prepared.config.run.recipe, "steps": step, "source": source}
                    rows.append({**row, **_spectrum(model, inputs, own)})
                    print(row, rows[-1]["largest"], rows[-1]["smallest"], flush=True)

            look(0)
            place = RunFolder.fresh(Path(folder) / "runs", run.hash)
            result = train(prepared, place)
            look(result.steps)
    return {"hardware": hardware(1), "date": now(), "examples": EXAMPLES, "rows": rows}


def _group(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["model"], row["steps"]), {})[row["source"]] = row
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return the largest and the smallest eigenvalue by network, steps and source."""
    names = {"public": "Fashion-MNIST", "oracle": "private (NOT PRIVATE)"}
    rows = []
    ratios = []
    for (model, steps), sources in _group(results["rows"]).items():
        cells = []
        for source in COLOURS:
            row = sources[source]
            cells.append(f"{row['largest']:.3g}; {row['smallest']:.2g}")
            if "noise" in source and steps:
                ratios.append(row["largest"] / sources["oracle"]["largest"])
        rows.append([model, str(steps), *cells])
    head = ["model", "steps", *(names.get(source, source) for source in COLOURS)]
    sentence = (
        "Largest eigenvalue; smallest. After training the largest of noise is"
        f" {min(ratios):.2g} to {max(ratios):.2g} times the largest of private examples."
    )
    return f"{markdown(head, rows)}\n\n{sentence}\n\n![spectrum of the Hessian](img/{PICTURE})"


def draw(folder: Path) -> None:
    """Draw the sizes of eigenvalues by rank, if they were measured."""
    results = read_json(PATH)
    if not results:
        return
    found = _group(results["rows"])
    names = {"public": "Fashion-MNIST", "oracle": "private examples (NOT PRIVATE)"}
    figure, panels = sheet(2, 2, height=5)
    for panel, ((model, steps), sources) in zip(panels.flat, found.items(), strict=True):
        for source, colour in COLOURS.items():
            row = sources[source]
            pairs = [
                (rank, node)
                for rank, node in zip(row["above"], row["nodes"], strict=True)
                if node > 0
            ]
            ranks, nodes = zip(*pairs, strict=True)
            style = "--" if source == "oracle" else "-"
            panel.plot(ranks, nodes, style, color=colour, label=names.get(source, source))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(bottom=1e-4)
        panel.set_title(f"{model}, after {steps} steps")
    for panel in panels[1]:
        panel.set_xlabel("eigenvalues at least as large")
    for panel in panels[:, 0]:
        panel.set_ylabel("positive eigenvalue")
    finish(figure, folder / PICTURE, 2)


def main() -> int:
    return figures(figures_parser(__doc__, PATH).parse_args(), measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
