"""What whitening one side or both is worth in one private step: signal, curvature and noise on
MNIST's CNN.

    python -m dpkfc_papers.studies.which_side --data-dir DIR  # a quarter of an hour
    python -m dpkfc_papers.studies.which_side --table  # the table

A step θ − η (z̄ + ξ), with z̄ the mean of examples whitened and clipped to C, and ξ the noise,
changes the loss by −η ⟨∇L, z̄⟩ + ½ η² (z̄ᵀ H z̄ + (σC/B)² tr H) to second order. Where the signal
⟨∇L, z̄⟩ is positive, the best η takes off ⟨∇L, z̄⟩² / 2 (z̄ᵀ H z̄ + (σC/B)² tr H). Where it is
negative no step lowers the loss; an earlier table squared it all the same. With C the median norm
of each metric the three numbers, over C, are comparable between metrics: what is left of the
gradient after clipping (signal), what the step meets of the curvature, and what noise meets of it.
The natural gradient steps along U (z̄ + ξ), U the whitening (`--readout natural`): there noise meets
U H U. H is the Fisher matrix at the model's own labels. Weights come from a private run (σ and B of
the study, inputs alone whitened, pink noise), gradients from private images, so the figures are NOT
PRIVATE and for the table alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from dpkfc_papers.studies.harness import (
    RESULTS,
    figures,
    figures_parser,
    markdown,
)
from dpkfc_papers.studies.layer_gradients import (
    FrozenWeights,
    Gradients,
    Metric,
    apply_metric,
    squared_norms,
)

PATH = RESULTS / "which_side.json"
SIGMA, BATCH, LR = 0.9227, 256, 0.03
STAGES = (0, 150, 600, 1100)
HELD, PROBE, CHUNK = 4096, 512, 256
BACK = ", natural gradient"


class Measured:
    """Gradients of private images at the weights of one moment."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.frozen, self.x, self.y = FrozenWeights(model), x, y
        with torch.no_grad():
            self.probabilities = model(x).softmax(1)
        self.gradient = self._summed(lambda z: torch.ones_like(norms(z)))
        generator = torch.Generator().manual_seed(0)
        self.drawn = torch.multinomial(self.probabilities, 1, generator=generator)[:, 0]
        self.plain = self.trace(None)

    def _parts(self, labels: Tensor) -> Iterator[Gradients]:
        """Per-example gradients by layer, a few hundred examples at a time."""
        for x, y in zip(self.x.split(CHUNK), labels.split(CHUNK), strict=True):
            yield self.frozen.gradients(x, y)

    def _summed(
        self, weigh: Callable[[Gradients], Tensor], metric: Metric | None = None
    ) -> Gradients:
        """The mean of weighed whitened gradients."""
        total: Gradients = {}
        for part in self._parts(self.y):
            z = apply_metric(part, metric)
            weights = weigh(z)
            for name, g in z.items():
                share = torch.tensordot(weights, g, 1) / len(self.x)
                total[name] = total.get(name, torch.zeros(())) + share
        return total

    def curvature(self, step: Gradients) -> float:
        """zᵀ H z over the images."""
        _, turned = jvp(
            lambda weights: functional_call(self.frozen.model, weights, self.x),
            (self.frozen.weights,),
            (self.frozen.split_step(step),),
        )
        p = self.probabilities
        means = (p * turned).sum(1)
        variances = (p * turned.square()).sum(1) - means.square()
        return float(variances.mean())

    def trace(self, metric: Metric | None) -> float:
        """tr U H U."""
        parts = (apply_metric(part, metric) for part in self._parts(self.drawn))
        return sum(float(norms(part).square().sum()) for part in parts) / len(self.x)

    def steps(self, metric: Metric | None) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield signal, curvature and noise in one metric, and of the natural gradient."""
        clip = float(
            torch.cat([norms(apply_metric(part, metric)) for part in self._parts(self.y)]).median()
        )
        mean = self._summed(lambda z: (clip / norms(z)).clamp(max=1) / clip, metric)
        taken = {"": (mean, self.plain)}
        if metric is not None:
            taken[BACK] = apply_metric(mean, metric), self.trace(metric)
        for suffix, (step, trace) in taken.items():
            signal = sum(float((step[name] * g).sum()) for name, g in self.gradient.items())
            curvature, noise = self.curvature(step), (SIGMA / BATCH) ** 2 * trace
            yield suffix, {"signal": signal, "curvature": curvature, "noise": noise}


def decrease(one: Mapping[str, float]) -> float | None:
    """What the best step takes off the loss; None where the signal points uphill."""
    if one["signal"] <= 0:
        return None
    return one["signal"] ** 2 / 2 / (one["curvature"] + one["noise"])


def norms(part: Gradients) -> Tensor:
    return squared_norms(part).sqrt()


def metrics(session: Any, private: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Metric | None]]:
    from dpkfc import KFAC, DeadLeaves, PinkNoise
    from dpkfc.curvature import PrivateOracle
    from dpkfc.gradients.layer_contributions import capture

    yield "none", None
    rules, shape = {layer.name: layer.rule for layer in session.layers}, (1, 28, 28)
    sources = {
        "pink noise": PinkNoise(shape),
        "dead leaves": DeadLeaves(shape),
        "private images (NOT PRIVATE)": PrivateOracle(private),
    }
    for source, probe in sources.items():
        for sides, label in (("input", "inputs"), ("output", "outputs"), ("both", "both sides")):
            kfac = KFAC(probe=probe, probe_size=PROBE, sides=sides)
            built = kfac.build(
                session.model, lambda m, loss: capture(m, session.layers, loss), 0, rules=rules
            )
            yield f"{label}, {source}", built.metric


def measure(data_dir: str) -> dict[str, Any]:
    from dpkfc import KFAC, PinkNoise, PrivacyConfig, Session
    from dpkfc.app.recipes.catalogue import find_recipe
    from dpkfc.app.recipes.objective import cross_entropy
    from dpkfc_papers.public_examples import recipe_data

    x, y = recipe_data("mnist-cnn", data_dir).train
    of_held = slice(-HELD - PROBE, -PROBE)
    held = (x[of_held], y[of_held])
    probe = (x[-PROBE:], y[-PROBE:])
    model = find_recipe("mnist-cnn").model(0)
    plan = PrivacyConfig(
        expected_batch_size=BATCH,
        steps=max(STAGES),
        max_grad_norm=1.0,
        preconditioner=KFAC(probe=PinkNoise((1, 28, 28)), sides="input"),
    ).with_noise(SIGMA, 1e-5, len(x))
    stages: dict[str, Any] = {}

    def look(session: Session) -> None:
        if session.steps_done in STAGES:
            seen = Measured(model, *held)
            label = f"after {session.steps_done} steps" if session.steps_done else "initial weights"
            stages[label] = {
                name + how: one
                for name, of in metrics(session, probe)
                for how, one in seen.steps(of)
            }
            print(label, stages[label], flush=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    with Session(plan, model, optimizer, (x, y)) as session:
        look(session)
        for batch in session.batches():
            session.step(batch, cross_entropy)
            look(session)
    return {"stages": stages}


def table(results: Mapping[str, Any]) -> str:
    """A metric a line, by stage; a signal that is not positive has no decrease."""
    lines = []
    for stage, of in results["stages"].items():
        lines.append([f"*{stage}*", *[""] * 5])
        for name, one in of.items():
            if not name.endswith(BACK):
                back = of.get(name + BACK)
                parts = [f"{1e3 * one[part]:.1f}" for part in ("signal", "curvature", "noise")]
                lines.append(
                    [name, *parts, _format_decrease(one), _format_decrease(back) if back else ""]
                )
    return markdown(
        ["whitened", "signal", "curvature", "noise", "decrease of the loss", "… natural gradient"],
        lines,
    )


def _format_decrease(one: Mapping[str, float]) -> str:
    found = decrease(one)
    return "none" if found is None else f"{1e3 * found:.1f}"


def main() -> int:
    return figures(figures_parser(__doc__, PATH).parse_args(), measure, table)


if __name__ == "__main__":
    sys.exit(main())
