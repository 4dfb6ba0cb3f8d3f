"""The end of a run: released weights, metrics, privacy card and plots."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from safetensors.torch import save_file
from torch import nn

from dpkfc.app import plots
from dpkfc.app.assembly import describe_choice, make_kfac
from dpkfc.app.plots import FILE, Curve, Figures, LayerSignal, LayerSpectra
from dpkfc.app.preparation import LABELS, Prepared
from dpkfc.app.recipes.recipe import Judged
from dpkfc.app.run_folder import LAST_PLOT, Metrics, Row, RunFolder, not_private, placed
from dpkfc.app.settings import RunConfig
from dpkfc.checkpoint import file_digest
from dpkfc.curvature.diagnostics import signal_to_noise
from dpkfc.curvature.kfac import KFAC, Preconditioner
from dpkfc.gradients.clipped_sum import capture
from dpkfc.gradients.discovery import find_layers
from dpkfc.preconditioning import at_once
from dpkfc.report.card import CardFacts, build_card, dataset_size, stamp, to_markdown
from dpkfc.report.numbers import rounded_up
from dpkfc.session import Session

_LOG = logging.getLogger(__name__)
_EPSILON_POINTS = 32


def evaluated_weights(session: Session) -> AbstractContextManager[None]:
    """The weights that are evaluated and delivered: the average where the plan keeps one, else those of the last step."""
    return session.averaged_weights() if session.plan.config.weight_average and session.steps_done else nullcontext()


def write_results(prepared: Prepared, folder: RunFolder, session: Session, metrics: Metrics) -> None:
    """Everything that a finished run leaves in its folder beside settings, ledger and checkpoint."""
    facts = _facts(prepared, session, metrics)
    with evaluated_weights(session):
        _save_model(prepared.model, folder, build_card(prepared.plan, facts))
    weights = {"file": folder.model.name, "sha256": file_digest(folder.model)}
    card = build_card(prepared.plan, dataclasses.replace(facts, weights=weights))
    metrics.write(folder.metrics)
    folder.write_json(folder.card, card)
    folder.write_text(folder.card.with_suffix(".md"), to_markdown(card))
    plots.save(plots.history(curve_of(prepared, metrics)), folder.plots / "accuracy_and_epsilon.png")
    _plot_curvature(prepared, folder, session)


def _save_model(model: nn.Module, folder: RunFolder, card: dict[str, Any]) -> None:
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    promise = card["guarantee"]
    metadata = {"epsilon": str(promise["epsilon"]), "delta": str(promise["delta"]), "plan_hash": card["plan_hash"]}
    metadata |= {"certified": str(promise["certified"]), "stamp": card["stamp"] or ""}
    placed(folder.model, lambda part: save_file(tensors, part, metadata=metadata))


def _facts(prepared: Prepared, session: Session, metrics: Metrics) -> CardFacts:
    config, task, judged = prepared.config, prepared.recipe.task, metrics.evaluated()[-1]
    seeds = {"initial weights and probes": config.seed}
    if config.validation_size:
        seeds["validation split"] = config.split_seed
    return CardFacts(
        title=_title(prepared),
        releases=session.steps_done,
        ledger={"file": "ledger.jsonl", "releases": session.ledger.count, "head": session.ledger.head},
        assumed_public=_assumed_public(prepared),
        chosen_by=describe_choice(config),
        not_private=_unprotected(prepared),
        results={
            f"{task.score} on the {config.eval_on} set": judged.accuracy,
            f"{task.mean_loss} on the {config.eval_on} set": judged.loss,
            **_also(prepared, judged),
            f"{config.eval_on} examples": len(_held_out(prepared)),
        },
        seeds=seeds,
        refreshes=metrics.refreshes,
        settings={
            "method": LABELS[config.method],
            "optimizer": config.optimizer,
            "lr": config.lr,
            **({"momentum": config.momentum} if config.optimizer == "sgd" else {}),
            "weight_decay": config.weight_decay,
            **({"schedule": config.schedule, "warmup_steps": config.warmup_steps} if _scheduled(config) else {}),
            **({"augment": config.augment, "augmentations": config.augmentations} if config.augment else {}),
            "gradients": session.gradients,
        },
        device=config.device,
    )


def _also(prepared: Prepared, judged: Row) -> dict[str, float]:
    """Figures that the task makes of score and mean loss."""
    task = prepared.recipe.task
    if task.also is None or judged.accuracy is None or judged.loss is None:
        return {}
    made = task.also(Judged(judged.accuracy, judged.loss))
    return {f"{name} on the {prepared.config.eval_on} set": value for name, value in made.items()}


def _scheduled(config: RunConfig) -> bool:
    return config.schedule != "constant" or config.warmup_steps > 0


def _title(prepared: Prepared) -> str:
    smoke = ", smoke run: a few steps on a slice of the data" if prepared.config.smoke else ""
    return f"{LABELS[prepared.config.method]} on {prepared.recipe.title}{smoke}"


def _held_out(prepared: Prepared) -> Any:
    data = prepared.data
    on_validation = prepared.config.eval_on == "validation" and data.validation is not None
    return (data.validation if on_validation and data.validation else data.test)[1]


def _assumed_public(prepared: Prepared) -> dict[str, tuple[Any, str]]:
    recipe, plan = prepared.recipe, prepared.plan
    return {
        "data set": (f"{recipe.title}, {prepared.data.source}", "which data a model was trained on is stated"),
        **dataset_size(plan),
        "number of classes": (recipe.num_classes, "the shape of the model's output"),
        "input shape": (list(recipe.input_shape), "the shape of the model's input and of the probe"),
        **recipe.constants,
        "hyper-parameters": ("see below", "their choice is not accounted for"),
        "model and initial weights": (f"{_size(prepared.model):,} parameters", "architecture and seed are public"),
        **({"pre-training": (prepared.start, "the public data are declared so by their user")} if prepared.start else {}),
    }


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _unprotected(prepared: Prepared) -> dict[str, str]:
    listed = {f"metrics.parquet: {name}": why for name, why in not_private(prepared.config.eval_on).items()}
    listed["progress bar: clipped fraction, examples/s"] = "computed from private examples before noise"
    judged = next(why for name, why in not_private(prepared.config.eval_on).items() if name == "accuracy")
    return listed | {"this card: results; plots/accuracy_and_epsilon.png: accuracy": judged}


def curve_of(prepared: Prepared, metrics: Metrics) -> Curve:
    """Accuracy and ε of a run for plots; ε is computed at a few dozen steps and is exact there."""
    plan, judged = prepared.plan, metrics.evaluated()
    done = metrics.rows[-1].step if metrics.rows else 0
    points = sorted({round(done * (i / _EPSILON_POINTS) ** 1.5) for i in range(_EPSILON_POINTS + 1)})
    epsilon = [plan.epsilon(step) for step in points]
    finite = [(step, value) for step, value in zip(points, epsilon, strict=True) if math.isfinite(value)]
    relation = "added or removed" if plan.neighbouring_relation == "add_or_remove_one" else "replaced"
    return Curve(
        label=_title(prepared),
        steps=[row.step for row in judged],
        accuracy=[row.accuracy or 0.0 for row in judged],
        epsilon_steps=[step for step, _ in finite],
        epsilon=[value for _, value in finite],
        target_epsilon=plan.target_epsilon,
        caption=(
            f"ε = {rounded_up(plan.epsilon(done))}, δ = {plan.delta:g}, one example {relation}; {done:,} steps of "
            f"{plan.expected_batch_size:,} expected examples, σ = {plan.noise_multiplier:.3g}"
        ),
        measured_on=prepared.config.eval_on,
        stamp=stamp(plan),
        score=prepared.recipe.task.score,
    )


def _plot_curvature(prepared: Prepared, folder: RunFolder, session: Session) -> None:
    """Signal-to-noise ratio and spectra, measured on the probe at the released weights: public figures.

    A method without K-FAC is shown with the factors that the settings describe.
    """
    plan, model = prepared.plan, prepared.model
    layers = find_layers(model)
    capture_layers = functools.partial(_capture, layers)
    settings, probe = _shown(prepared)
    settings = dataclasses.replace(settings, chunk=at_once(settings, plan.config.refresh_rows()[0]))  # as in the run
    rules = {layer.name: layer.rule for layer in layers}
    built = settings.build(model, capture_layers, session.steps_done, rules=rules)
    where = f"at the released weights, on {probe}"
    if not prepared.config.uses_preconditioner:
        where += "; preconditioner not used"
    signal: list[LayerSignal] = []
    if plan.noise_multiplier > 0:
        ratios = signal_to_noise(
            settings,
            model,
            capture_layers,
            built,
            max_grad_norm=plan.max_grad_norm,
            noise_multiplier=plan.noise_multiplier,
        )
        amplitude = plan.expected_batch_size
        signal = [
            LayerSignal(
                name=_layer_name(model, name),
                plain=amplitude * math.sqrt(ratio.plain),
                preconditioned=amplitude * math.sqrt(ratio.preconditioned),
            )
            for name, ratio in ratios.items()
        ]
        caption = f"{_title(prepared)}, {where}; {amplitude:,} examples"
        plots.save(plots.signal_to_noise(signal, caption, stamp(plan)), folder.plots / "signal_to_noise.png")
    spectra = _spectra(model, settings, built)
    Figures(measured=f"{_title(prepared)}, {where}", spectra=spectra, signal_to_noise=signal).write(folder.path / FILE)
    plots.save(plots.spectra(spectra, f"{_title(prepared)}, {where}", stamp(plan)), folder.plots / LAST_PLOT)


def _shown(prepared: Prepared) -> tuple[KFAC, str]:
    """The factors of the figures, and what they are measured on.

    Those that the plan does not use are measured on noise: nothing has looked whether their source is public and disjoint from
    the private examples.
    """
    config, recipe, used = prepared.config, prepared.recipe, prepared.plan.config.preconditioner
    if isinstance(used, KFAC):
        return used, "the probe"
    sources = ("tokens",) if recipe.probe else ("pink", "dead-leaves", "white")
    config = dataclasses.replace(config, refine=0)
    other = config.source not in sources or config.output_source not in ("", *sources)
    if other:
        config = dataclasses.replace(config, source=sources[0], output_source="")
    if config.labels == "given":
        config = dataclasses.replace(config, labels="model")
    return make_kfac(config, recipe.input_shape, recipe_probe=recipe.probe), "noise" if other else "the probe"


def _capture(layers: Any, model: nn.Module, loss: Any) -> Any:
    return capture(model, layers, loss)


def _layer_name(model: nn.Module, name: str) -> str:
    """The path of a layer and what it is, since a path like `3` says nothing."""
    return f"{name or '(root)'} · {type(model.get_submodule(name)).__name__}"


def _spectra(model: nn.Module, settings: KFAC, built: Preconditioner) -> list[LayerSpectra]:
    """Undamped eigenvalues with what damping adds, for layers that have both factors."""
    shown = []
    short = {"input": "A", "output": "G"}
    traces = {(row["layer"], short.get(row["side"], row["side"])): row["trace"] for row in built.report}
    for name, sides in built.spectra.items():
        if set(sides) != {"A", "G"}:
            continue
        shapes = built.shapes[name]
        sizes = {"A": math.prod(shapes["input"]), "G": math.prod(shapes["output"])}
        means = {side: traces[name, side] / sizes[side] for side in sides}
        relative = settings.damping_mode == "relative"
        shown.append(
            LayerSpectra(
                name=_layer_name(model, name),
                values={side: values.tolist() for side, values in sides.items()},
                sizes=sizes,
                damping={
                    side: settings.damping * mean if relative else settings.damping + settings.gamma
                    for side, mean in means.items()
                },
            )
        )
    return shown
