"""The end of a run: its result, released weights, metrics, privacy card and figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dpkfc.app.assembly import Prepared
from dpkfc.app.choice import describe_choice
from dpkfc.app.count_forms import CountForm
from dpkfc.app.datasets.examples import Examples
from dpkfc.app.effects import column_effects
from dpkfc.app.methods import METHOD_LABELS
from dpkfc.app.metrics import Metrics, Row, list_unprotected
from dpkfc.app.picture_data import Curve, LayerSignal, LayerSpectra, RunFigures, spectrum_points
from dpkfc.app.private_scores import PURPOSE, count_rows, judge, noisy_scores
from dpkfc.app.recipes.objective import finite
from dpkfc.app.run_config import RunConfig
from dpkfc.app.run_folder import RunFolder, write_json, write_text
from dpkfc.app.scores import Scores, missing_score
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.report import factor_letter
from dpkfc.curvature.signal_to_noise import signal_to_noise
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.preconditioning import refresh_microbatch_size
from dpkfc.privacy.accounting import describe_extra
from dpkfc.report.card import CardFacts, build_card, dataset_size, stamp
from dpkfc.report.card_files import write_weights_and_card
from dpkfc.report.text import round_up
from dpkfc.session import Session

if TYPE_CHECKING:
    from dpkfc.audit import OneRunResult
    from dpkfc.config import Plan


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run.

    Attributes:
        folder: the run folder.
        accuracy: of the released weights on the test or validation set, in [0, 1]; the score of a
            task without classes. NaN where no example of the set has a known label.
        measured_on: which of the two.
        epsilon: spent.
        steps: releases made.
        seconds: wall time of training, evaluation left out.
        interrupted: whether the run stopped before its last step.
        curve: for plots that compare runs.
        stamp: empty where ε is certified.
        score: what the task calls `accuracy`.
        loss: mean loss on the same set, None where it was not finite.
        head: of the ledger at the end, for a later check.
        errors: figures of the task that are not among the scores, by name.
        releases: lines of the ledger then, which are more than steps where some are for bounds.
        figures: of the schema of own data: shares that were clamped, missing or unknown. PRIVATE.
        scores: of the released weights on the same set; None for a run without results, or a task
            without them.
        classes: names of the classes.
        noisy: whether the scores were released with noise, so that ε covers them.
        audit: what canaries in the released model show, None without such canaries.
        plan: of the run.
    """

    folder: Path
    accuracy: float
    measured_on: str
    epsilon: float
    steps: int
    seconds: float
    interrupted: bool
    curve: Curve
    stamp: str = ""
    score: str = "accuracy"
    loss: float | None = None
    head: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    releases: int = 0
    figures: Mapping[tuple[str, str], float] = field(default_factory=dict)
    scores: Scores | None = None
    classes: Sequence[str] = ()
    noisy: bool = False
    audit: OneRunResult | None = None
    plan: Plan | None = None


def evaluated_weights(session: Session) -> AbstractContextManager[None]:
    """Return a context with the weights that are evaluated and delivered.

    They are the average where the plan keeps one, and the last step's weights elsewhere.
    """
    if session.plan.config.weight_average and session.steps_done:
        return session.averaged_weights()
    return nullcontext()


def write_results(
    prepared: Prepared,
    folder: RunFolder,
    session: Session,
    metrics: Metrics,
    judged_parts: tuple[nn.Module, Examples],
) -> Scores | None:
    """Write what a finished run leaves next to settings, ledger and checkpoint.

    Args:
        prepared: the run.
        folder: of the run.
        session: at its end.
        metrics: of all steps.
        judged_parts: model and examples that scores are computed from.

    Returns:
        The scores of the released weights; None for a task without them.
    """
    recipe = prepared.recipe
    scores = None
    if prepared.counts is not None:
        scores = _release_scores(prepared, prepared.counts, folder, session)
        judged = judge(prepared.counts, scores)
        last = replace(metrics.rows[-1], accuracy=judged.accuracy, loss=judged.loss)
        metrics.add(last)
    elif recipe.task.scores is not None:
        with evaluated_weights(session):
            scores = recipe.task.scores(*judged_parts)
        content = {"measured_on": metrics.measured_on, **scores.to_json(recipe.classes)}
        write_json(folder.scores, content)
    card = build_card(prepared.plan, _facts(prepared, session, metrics, scores, folder))
    metrics.write(folder.metrics)
    write_weights_and_card(folder.path, session.released_state(), session.ledger, card)
    with evaluated_weights(session):
        found = column_effects(prepared, session)
    if found:
        content = {"effects": [effect.to_json() for effect in found]}
        write_json(folder.effects, content)
    figures = _measure_figures(prepared, session)
    write_text(folder.figures, json.dumps(figures.to_json(), ensure_ascii=False))
    return scores


def _release_scores(
    prepared: Prepared, form: CountForm, folder: RunFolder, session: Session
) -> Scores:
    """Return noisy scores on the test rows: of the one release, or as an earlier start wrote them.

    A run that was cut off between charge and file lacks them.
    """
    kind = prepared.plan.extra_release(PURPOSE)
    if not session.ledger.extra.get(PURPOSE, 0):
        with evaluated_weights(session):
            counts = count_rows(form, prepared.model, prepared.evaluation_examples)
        noisy = session.release_vector(PURPOSE, counts, form.norm)
    elif folder.scores.is_file():
        noisy = np.array(json.loads(folder.scores.read_text("utf-8"))["released"])
    else:
        noisy = np.full_like(form.add(np.zeros(prepared.recipe.num_classes), 0), math.nan)
    scores = noisy_scores(form, noisy, kind.stddev)
    names = prepared.recipe.classes
    content = {"measured_on": "test", "released": noisy.tolist(), **scores.to_json(names)}
    if np.isfinite(noisy).all():
        write_json(folder.scores, content)
    return scores


def _facts(
    prepared: Prepared,
    session: Session,
    metrics: Metrics,
    scores: Scores | None,
    folder: RunFolder,
) -> CardFacts:
    config = prepared.config
    # The folder's copy of a schema is the one with which the run began.
    own = config.change(schema=str(folder.schema)) if folder.schema.is_file() else config
    seeds = {"initial weights and probes": config.run.seed}
    if config.data.validation_size:
        seeds["validation split"] = config.data.split_seed
    ledger = session.ledger
    return CardFacts(
        title=_title(prepared),
        releases=ledger.count,
        ledger={"file": "ledger.jsonl", "releases": ledger.count, "head": ledger.head},
        assumed_public=_list_public(prepared),
        chosen_by=describe_choice(own, prepared.data.size),
        not_private={**_list_unprotected(prepared), **session.unprotected_figures},
        results=_results(prepared, metrics.select_evaluated()[-1], scores),
        seeds=seeds,
        refreshes=metrics.refreshes,
        settings={
            **_card_settings(config),
            **_early_end(prepared, metrics),
            "gradients": session.gradients,
        },
        device=config.run.device,
        receipt=session.ledger.receipt,
        declared=config.card,
        start=str(ledger.header.get("created", "")),
        extra=describe_extra(ledger.releases, prepared.plan.delta),
    )


def _early_end(prepared: Prepared, metrics: Metrics) -> dict[str, str]:
    """Return a line about a run that public examples have ended, {} for other runs."""
    last, planned = metrics.rows[-1].step, prepared.plan.steps
    if prepared.stopping is None or last >= planned:
        return {}
    measured = f"loss on {Path(prepared.config.data.public_validation).name}"
    if prepared.config.stops_privately:
        measured = "noisy evaluations"
    return {"early end": f"after step {last} by the {measured}; all {planned} steps are charged"}


def _results(prepared: Prepared, last: Row, scores: Scores | None) -> dict[str, Any]:
    """Return score, mean loss, the further figures of the task, and all scores, by name."""
    measured_on = prepared.config.run.eval_on
    figures: dict[str, Any] = dict(prepared.recipe.task.figures(last.accuracy, last.loss))
    if finite(last.accuracy) is None:
        figures[prepared.recipe.task.score] = missing_score(scores, measured_on)
    rows = {f"{name} on the {measured_on} set": value for name, value in figures.items()}
    count = prepared.data.tested or len(prepared.evaluation_examples[1])
    rows[f"{measured_on} examples"] = count
    return rows | (scores.card_rows(measured_on, prepared.recipe.classes) if scores else {})


def _card_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that the card lists as hyper-parameters."""
    optimizer = config.optimizer
    settings: dict[str, Any] = {
        "method": METHOD_LABELS[config.run.method],
        "optimizer": optimizer.optimizer,
        "lr": optimizer.lr,
    }
    if optimizer.optimizer == "sgd":
        settings["momentum"] = optimizer.momentum
    settings["weight_decay"] = optimizer.weight_decay
    if optimizer.schedule != "constant" or optimizer.warmup_steps > 0:
        settings |= {"schedule": optimizer.schedule, "warmup_steps": optimizer.warmup_steps}
    if config.data.augment:
        settings |= {"augment": config.data.augment, "augmentations": config.privacy.augmentations}
    return settings


def _title(prepared: Prepared) -> str:
    title = f"{METHOD_LABELS[prepared.config.run.method]} on {prepared.recipe.title}"
    if prepared.config.run.smoke:
        title += ", smoke run: a few steps on a slice of the data"
    return title


def _list_public(prepared: Prepared) -> dict[str, tuple[Any, str]]:
    """Return what is taken as public, with the reason."""
    recipe = prepared.recipe
    outputs = "number of classes" if recipe.num_classes > 1 else "number of outputs"
    size = sum(p.numel() for p in prepared.model.parameters())
    public: dict[str, tuple[Any, str]] = {
        "data set": (
            ", ".join(dict.fromkeys((recipe.title, prepared.data.source))),
            "which data a model was trained on is stated",
        ),
        **dataset_size(prepared.plan),
        outputs: (recipe.num_classes, "the shape of the model's output"),
        "input shape": (
            list(recipe.input_shape),
            "the shape of the model's input and of the probe",
        ),
        **recipe.constants,
        "hyper-parameters": ("annex 2 of the card", "their choice is not accounted for"),
        "model and initial weights": (
            f"{size:,} parameters",
            "architecture and seed are public",
        ),
    }
    if prepared.config.stops_privately:
        held_out = prepared.config.data.validation_size
        public["evaluations that may end the run"] = (
            f"{prepared.config.run.stop_on} on {held_out:,} held-out examples",
            "noisy, in the ledger; composed with the steps, as if each example were trained on and"
            " held out",
        )
    if prepared.start:
        reason = "the public data are declared so by their user"
        public["pre-training"] = (prepared.start, reason)
    return public


def _list_unprotected(prepared: Prepared) -> dict[str, str]:
    """Return the figures that ε does not protect, with the reason."""
    columns = list_unprotected(prepared.config.run.eval_on)
    figures = {f"metrics.parquet: {name}": why for name, why in columns.items()}
    if prepared.config.data.data:
        figures["metrics.parquet: digest of the data"] = "computed from private examples"
    figures["progress bar: clipped fraction, examples/s"] = (
        "computed from private examples before noise"
    )
    if prepared.counts is not None:
        # Released with noise.
        return {name: why for name, why in figures.items() if not name.endswith(_RELEASED)}
    return {**figures, "this card: results; all of scores.json": columns["accuracy"]}


_RELEASED = (": accuracy", ": loss")


def make_curve(prepared: Prepared, metrics: Metrics) -> Curve:
    """Return the accuracy of a run for plots."""
    plan = prepared.plan
    evaluated = [row for row in metrics.select_evaluated() if finite(row.accuracy) is not None]
    done = metrics.rows[-1].step
    added = plan.neighbouring_relation == "add_or_remove_one"
    return Curve(
        label=_title(prepared),
        steps=[row.step for row in evaluated],
        accuracy=[row.accuracy or 0.0 for row in evaluated],
        caption=(
            f"ε = {round_up(plan.epsilon(done))}, δ = {plan.delta:g}, "
            f"one example {'added or removed' if added else 'replaced'}; {done:,} steps of "
            f"{plan.expected_batch_size:,} expected examples, σ = {plan.noise_multiplier:.3g}"
        ),
        measured_on=prepared.config.run.eval_on,
        stamp=stamp(plan),
        score=prepared.recipe.task.score,
    )


def _measure_figures(prepared: Prepared, session: Session) -> RunFigures:
    """Measure signal-to-noise ratio and spectra on the probe of K-FAC, at the released weights.

    Both are public figures.
    """
    plan, model = prepared.plan, prepared.model
    title = _title(prepared)
    figures = RunFigures(
        label=title,
        stamp=stamp(plan),
        caption=f"{title}, at the released weights, on the probe",
        batch_size=plan.expected_batch_size,
    )
    kfac = plan.config.preconditioner
    if not isinstance(kfac, KFAC):
        return figures
    layers = find_layers(model)

    def capture_layers(model: nn.Module, loss: Any) -> Any:
        return capture(model, layers, loss)

    # Take the probe in pieces as small as the run's.
    rows = refresh_microbatch_size(kfac, plan.config.refresh_rows().most)
    kfac = dataclasses.replace(kfac, chunk=rows or kfac.chunk)
    rules = {layer.name: layer.rule for layer in layers}
    state = kfac.build(model, capture_layers, session.steps_done, rules=rules)
    signal: list[LayerSignal] = []
    if plan.noise_multiplier > 0:
        ratios = signal_to_noise(
            kfac,
            model,
            capture_layers,
            state,
            max_grad_norm=plan.max_grad_norm,
            noise_multiplier=plan.noise_multiplier,
        )
        batch_size = plan.expected_batch_size
        for name, ratio in ratios.items():
            layer_signal = LayerSignal(
                name=_layer_name(model, name),
                plain=batch_size * math.sqrt(ratio.plain),
                preconditioned=batch_size * math.sqrt(ratio.preconditioned),
            )
            signal.append(layer_signal)
    return replace(figures, signal=signal, spectra=_spectra(model, kfac, state))


def _layer_name(model: nn.Module, name: str) -> str:
    """Return the path of a layer and its class, since a path like `3` says nothing."""
    return f"{name or '(root)'} · {type(model.get_submodule(name)).__name__}"


def _spectra(model: nn.Module, kfac: KFAC, state: PreconditionerState) -> list[LayerSpectra]:
    """Return undamped eigenvalues and what damping adds, for layers that have both factors."""
    rows = {(row["layer"], factor_letter(row["side"])): row for row in state.report}
    spectra = []
    for name, eigenvalues in state.spectra.items():
        if set(eigenvalues) != {"A", "G"}:
            continue
        sizes = {side: rows[name, side]["dim"] for side in eigenvalues}
        damping = {}
        for side in eigenvalues:
            if kfac.damping_mode == "relative":
                damping[side] = kfac.damping * (rows[name, side]["trace"] / sizes[side])
            else:
                damping[side] = kfac.damping + kfac.gamma
        layer = LayerSpectra(
            name=_layer_name(model, name),
            points={
                side: spectrum_points(values.tolist(), sizes[side])
                for side, values in eigenvalues.items()
            },
            damping=damping,
        )
        spectra.append(layer)
    return spectra
