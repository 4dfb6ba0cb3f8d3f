"""Whether the clipping norm of DP-NGD is a trust region: Eq. 10 to 13 of the paper, measured.

    python -m dpkfc_papers.studies.ngd_duality --data-dir DIR  # some minutes
    python -m dpkfc_papers.studies.ngd_duality --table  # the table

A clipped example moves the weights by Δθ = −η F̃^(−1/2) ḡ, and the paper says that the predictions
move by KL = ½ Δθᵀ F Δθ = η²/2 ‖ḡ‖² ≤ η²/2 C². Whitened and Fisher norms are one thing by algebra
(Eq. 13), which is checked. The rest is measured: KL of the network's own predictions, before and
after the move, over the Kronecker formula. Weights come from a private run of `ngd_ablation.py`,
gradients from private images, so the figures are NOT PRIVATE and for the table alone.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpkfc_papers.studies.harness import (
    RESULTS,
    figures,
    figures_parser,
    markdown,
)
from dpkfc_papers.studies.layer_gradients import (
    FrozenWeights,
    Gradients,
    apply_metric,
    squared_norms,
)

PATH = RESULTS / "ngd_duality.json"
RECIPE, PUBLIC_RECIPE = "fashion-mnist-cnn", "mnist-cnn"
# The best point of `ngd_ablation.py`.
STEPS, BATCH, SIGMA, LR, CLIP, FLOOR = 96, 256, 0.735, 0.02, 10.0, 0.0025
STAGES, SINGLE, HELD, CHUNK = (0, 95), 32, 512, 32
# Part of a step that is short enough for the quadratic formula.
SHORT = 0.1


class Moved:
    """A network whose weights can be moved, with inputs on which predictions are compared."""

    def __init__(self, model: nn.Module, held: Mapping[str, Tensor]) -> None:
        self.frozen, self.held = FrozenWeights(model), held
        weights = self.frozen.weights
        self.before = {name: self._log_probabilities(weights, x) for name, x in held.items()}

    def _log_probabilities(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            return functional_call(self.frozen.model, dict(weights), x).log_softmax(1)

    def divergences(self, step: Gradients) -> dict[str, float]:
        """Return the mean KL(p_θ ‖ p_(θ + step)) on each set of inputs."""
        weights = dict(self.frozen.weights)
        for name, moved in self.frozen.split_step(step).items():
            weights[name] = weights[name] + moved
        found = {}
        for name, x in self.held.items():
            after = self._log_probabilities(weights, x)
            ratio = self.before[name] - after
            found[name] = float((self.before[name].exp() * ratio).sum(1).mean())
        return found


def look(model: nn.Module, ngd: Any, capture: Any, step: int, data: Any) -> dict[str, Any]:
    """Return what single clipped examples and a whole step do to the predictions.

    Args:
        model: at the weights of one moment.
        ngd: the preconditioner.
        capture: as of `NGD.build`.
        step: of the run, for the floor.
        data: private inputs and labels, then the inputs of `Moved`.
    """
    from dpkfc.curvature.fisher import clamp_eigenvalues

    (x, y), held = data
    state, floor = ngd.build(model, capture, step), ngd.floor(step)

    def power(exponent: float) -> dict[str, Any]:
        return {
            name: clamp_eigenvalues(entry, state.spectra[name], floor, exponent)
            for name, entry in state.metric.items()
        }

    root, inverse, fisher = power(0.5), power(1.0), power(-1.0)
    moved = Moved(model, held)
    total: Gradients = {}
    errors: list[float] = []
    single: list[dict[str, float]] = []
    for begin in range(0, BATCH, CHUNK):
        g = moved.frozen.gradients(x[begin : begin + CHUNK], y[begin : begin + CHUNK])
        whitened = apply_metric(g, root)
        norms = squared_norms(whitened).sqrt()
        factors = (CLIP / norms).clamp(max=1)
        clipped = {name: z * factors[:, None, None] for name, z in whitened.items()}
        for name, z in clipped.items():
            total[name] = total.get(name, torch.zeros(())) + z.sum(0)
        if begin >= SINGLE:
            continue
        # Eq. 13, with the inverse made by itself.
        natural = apply_metric(g, inverse)
        products = sum((g[name] * natural[name]).flatten(1).sum(1) for name in g)
        errors += ((products - norms.square()).abs() / norms.square()).tolist()
        steps = {name: -LR * z for name, z in apply_metric(clipped, root).items()}
        curved = apply_metric(steps, fisher)
        quadratic = sum((steps[name] * curved[name]).flatten(1).sum(1) for name in steps) / 2
        for number in range(len(norms)):
            one = {name: z[number] for name, z in steps.items()}
            short = moved.divergences({name: SHORT * z for name, z in one.items()})
            single.append(
                {
                    "formula": LR**2 / 2 * float(norms[number] * factors[number]) ** 2,
                    "quadratic": float(quadratic[number]),
                    **moved.divergences(one),
                    **{f"short {name}": of / SHORT**2 for name, of in short.items()},
                }
            )
    noise = {name: SIGMA * CLIP * torch.randn_like(z) for name, z in total.items()}
    parts = {
        "signal": total,
        "noise": noise,
        "both": {name: z + noise[name] for name, z in total.items()},
    }
    whole = {}
    for label, sums in parts.items():
        mean = {name: z / BATCH for name, z in sums.items()}
        step_of = {
            name: -LR * root[name].apply(z[None].contiguous())[0] for name, z in mean.items()
        }
        length = sum(float(z.square().sum()) for z in mean.values())
        whole[label] = {"formula": LR**2 / 2 * length, **moved.divergences(step_of)}
    return {"eq13_error": max(errors), "single": single, "whole": whole, "floor": floor}


def measure(data_dir: str) -> dict[str, Any]:
    from dpkfc import NGD, PrivacyConfig, PublicData, Session
    from dpkfc.app.recipes.catalogue import find_recipe
    from dpkfc.app.recipes.objective import cross_entropy
    from dpkfc.gradients.layer_contributions import capture
    from dpkfc_papers.public_examples import recipe_data

    private, public = recipe_data(RECIPE, data_dir), recipe_data(PUBLIC_RECIPE, data_dir)
    x, y = private.train
    held = {"public": public.train[0][-HELD:], "private": private.test[0][:HELD]}
    model = find_recipe(RECIPE).model(0)
    ngd = NGD(
        probe=PublicData(public.train[0][:500], provenance="MNIST"),
        lambda_safe=FLOOR,
        steps=STEPS,
        every=8,
    )
    plan = PrivacyConfig(
        expected_batch_size=BATCH,
        steps=STEPS,
        max_grad_norm=CLIP,
        preconditioner=ngd,
        readout="natural",
        accountant="rdp",
    ).with_noise(SIGMA, 1e-5, len(x))
    stages: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with Session(plan, model, optimizer, (x, y)) as session:

        def look_now() -> None:
            step = session.steps_done
            if step in STAGES:
                stages[str(step)] = look(
                    model,
                    ngd,
                    lambda m, loss: capture(m, session.layers, loss),
                    step,
                    ((x[:BATCH], y[:BATCH]), held),
                )

        look_now()
        for batch in session.batches():
            session.step(batch, cross_entropy)
            look_now()
    return {
        "lr": LR,
        "clip": CLIP,
        "sigma": SIGMA,
        "stages": stages,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return a row for each number of steps: KL over the formula, with quartiles over examples."""
    bound = results["lr"] ** 2 / 2 * results["clip"] ** 2
    rows = []
    for step, of in results["stages"].items():
        cells = [f"{of['eq13_error']:.0e}"]
        for key in ("short public", "short private", "public", "private"):
            ratios = [one[key] / one["formula"] for one in of["single"]]
            # An example that is fitted has a gradient of almost nothing, and a ratio of rounding.
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{_round_to_two(middle)} ({_round_to_two(low)} … {_round_to_two(high)})")
        within = sum(one["private"] <= bound for one in of["single"])
        cells.append(f"{within} of {len(of['single'])}")
        for part in ("signal", "noise", "both"):
            cells.append(_round_to_two(of["whole"][part]["private"] / bound))
        rows.append([step, *cells])
    head = [
        "after steps",
        "Eq. 13, largest relative error",
        "KL ÷ formula of a tenth of the step of one example, public images",
        "… private task (NOT PRIVATE)",
        "of the whole step, public images",
        "… private task (NOT PRIVATE)",
        "examples within η²C²/2",
        "KL ÷ η²C²/2 of the step of a batch: signal",
        "noise",
        "both",
    ]
    return markdown(head, rows)


def _round_to_two(value: float) -> str:
    """Return a number to two digits, without an exponent where it is large."""
    return f"{float(f'{value:.2g}'):g}"


def main() -> int:
    return figures(figures_parser(__doc__, PATH).parse_args(), measure, table)


if __name__ == "__main__":
    sys.exit(main())
