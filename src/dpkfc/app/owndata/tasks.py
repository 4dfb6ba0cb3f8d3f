"""A task of a user's own module: model, examples, loss and more, returned by one function."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.recipes.objective import CLASSIFICATION, Judged, cross_entropy, evaluate
from dpkfc.app.recipes.objective import Objective as Judgement
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.curvature.probes import Probe
from dpkfc.data.units import check_ids
from dpkfc.gradients.evaluation_mode import evaluation_mode

Loss = Callable[[nn.Module, Examples], Tensor]
Judge = Callable[[nn.Module, Examples], Judged]
Metrics = Callable[[nn.Module, Examples], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a function named by `--task module:function` returns.

    Attributes:
        model: makes the model; it is called with a public seed in force.
        train: private examples: a pair of tensors (inputs `[N, ...]`, labels `[N, ...]`), or a
            dataset of such pairs, which is read into memory.
        test: held-out examples in the same form.
        loss: maps model and batch to one loss for each example `[B]`; cross-entropy by default.
        metrics: maps model and held-out examples to figures by name. The first is the score that
            curves show; it is 1 for a perfect model. Accuracy by default.
        score: name of the score.
        probe: public source of inputs for curvature. Images and vectors have one by default.
        unit: what ε protects, such as "patient".
        units: the unit of each training example `[N]`, where a unit has several.
        max_records_per_unit: most examples of one unit that count in a step.
        classes: names of the labels, for per-class figures.
        title: name of the data for people.
    """

    model: Callable[[], nn.Module]
    train: Any
    test: Any
    loss: Loss = cross_entropy
    metrics: Metrics | None = None
    score: str = "accuracy"
    probe: Probe | None = None
    unit: str = "example"
    units: Sequence[Any] | None = None
    max_records_per_unit: int | None = None
    classes: tuple[str, ...] = ()
    title: str = ""


def find_function(target: str) -> Callable[[], object]:
    """Return the function that `module:function` names.

    Raises:
        ConfigError: no such module or function, or an error while the module is imported.
    """
    module_name, _, name = target.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{target!r} is not module:function, for example my_project.task:make")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{target}: module {module_name!r} cannot be imported ({error})"
        ) from None
    # Whatever the user's module raises becomes one line.
    except Exception as error:
        raise ConfigError(_one_line(target, error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        hint = nearest(name, [known for known in vars(module) if known[0] != "_"])
        raise ConfigError(f"{target}: {module_name} has no function {name!r}; {hint}")
    return cast("Callable[[], object]", function)


def call_function(target: str) -> object:
    """Return what the function that `module:function` names returns.

    Raises:
        ConfigError: as `find_function`; any error of the function, in one line.
    """
    return _call(target, find_function(target))


def make_model(task: Task, target: str) -> nn.Module:
    """Return the model that a task makes.

    Raises:
        ConfigError: any error of the function that makes it, in one line.
    """
    return cast("nn.Module", _call(f"{target}: model", task.model))


def _call(name: str, function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:
        raise ConfigError(f"{_one_line(name, error)}; it is called without arguments") from error


def _one_line(target: str, error: Exception) -> str:
    """Return the type of an error and its place in the user's code: its text may show a record."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = ""
    if frame is not None:
        place = f" (line {frame.tb_lineno} of {Path(frame.tb_frame.f_code.co_filename).name[-40:]})"
    return f"{target} raised {type(error).__name__}{place}; DPKFC_DEBUG=1 shows more"


@cache
def load_task(target: str) -> Task:
    """Return the task that `module:function` makes, made once a process.

    Raises:
        ConfigError: no such function, an error in it, or something else than a `Task`.
    """
    task = call_function(target)
    if not isinstance(task, Task):
        raise ConfigError(
            f"{target} returned {type(task).__name__}; it must return a"
            " dpkfc.app.owndata.tasks.Task"
        )
    if (task.units is None) != (task.max_records_per_unit is None):
        raise ConfigError(f"{target}: units and max_records_per_unit belong together; give both")
    return task


def task_examples(task: Task, target: str) -> ExampleSet:
    """Return the examples of a task as tensors.

    Raises:
        ConfigError: examples of another form, missing units, or units of another number than
            examples.
    """
    train = _tensors(task.train, f"{target}: train")
    units = None
    if task.units is not None:
        try:
            ids = check_ids(task.units)
        except ValueError as error:
            raise ConfigError(f"{target}: {error}") from None
        if len(ids) != len(train[1]):
            raise ConfigError(
                f"{target}: {len(ids)} units for {len(train[1])} training examples; give"
                " one for each"
            )
        units = torch.from_numpy(np.unique(ids, return_inverse=True)[1])
    return ExampleSet(
        train=train,
        test=_tensors(task.test, f"{target}: test"),
        source=f"the task {target}",
        units=units,
    )


def _tensors(examples: Any, where: str) -> Examples:
    if not isinstance(examples, tuple | list):
        try:
            items = [examples[row] for row in range(len(examples))]
            examples = torch.utils.data.default_collate(items)
        # Whatever the user's dataset raises becomes one line.
        except Exception as error:
            raise ConfigError(
                f"{where} cannot be read ({type(error).__name__}); give two tensors, inputs and"
                " labels, or a dataset of pairs"
            ) from error
    if len(examples) != 2 or not all(isinstance(part, Tensor) and part.dim() for part in examples):
        raise ConfigError(f"{where} must be two tensors, inputs and labels, or a dataset of pairs")
    inputs, labels = examples
    if len(inputs) != len(labels) or not len(labels):
        raise ConfigError(
            f"{where} has {len(inputs)} inputs and {len(labels)} labels; give as many"
        )
    return inputs, labels


def judgement(task: Task) -> Judgement:
    """Return loss and score of a task in the form of a recipe."""
    if task.metrics is None and task.loss is cross_entropy:
        return replace(CLASSIFICATION, score=task.score)
    judge = _judge_by(task, task.metrics or _accuracy)
    return Judgement(loss=task.loss, judge=judge, score=task.score)


def _accuracy(model: nn.Module, examples: Examples) -> Mapping[str, float]:
    return {"accuracy": evaluate(model, examples).accuracy}


_CHUNK = 250


def _judge_by(task: Task, metrics: Metrics) -> Judge:
    @torch.no_grad()
    def judge(model: nn.Module, examples: Examples) -> Judged:
        device = next(model.parameters()).device
        inputs, labels = (part.to(device) for part in examples)
        total = 0.0
        with evaluation_mode(model):
            for batch in zip(inputs.split(_CHUNK), labels.split(_CHUNK), strict=True):
                total += float(task.loss(model, batch).sum())
            figures = metrics(model, (inputs, labels))
        score = float(next(iter(figures.values())))
        # A private label must not end a run.
        return Judged(score if math.isfinite(score) else math.nan, total / len(labels))

    return judge
