"""Read data, make the plan and build the model of a run, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dpkfc._errors import first_line
from dpkfc.app.assembly import Prepared, learning_rate, make_augment
from dpkfc.app.curvature_settings import Facts, library_errors
from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.plan_settings import make_plan, settle
from dpkfc.app.pretraining import pretrain
from dpkfc.app.private_scores import make_form
from dpkfc.app.public_data import read_labelled
from dpkfc.app.recipes.catalogue import recipe_of
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError, nearest
from dpkfc.curvature.second_moments import split_head
from dpkfc.distributed.context import DistributedContext
from dpkfc.early_stopping import EarlyStopping, PrivateEarlyStopping
from dpkfc.integrations.loggers import check_logger

# What torch is built for, by the names of its devices.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla")


def prepare(
    config: RunConfig,
    data: ExampleSet | None = None,
    *,
    recipe: Recipe | None = None,
    may_find_bounds: bool = False,
) -> Prepared:
    """Read data, make the plan, and build the model of a run.

    Args:
        config: settings.
        data: the examples, if `Recipe.data` has read them already.
        recipe: of the settings, where it has been made.
        may_find_bounds: whether the caller will find the bounds that the schema leaves out.

    Returns:
        Everything the run needs.

    Raises:
        DatasetError: missing or damaged data.
        ConfigError: settings that do not go together, or an unreachable budget.
    """
    run = config.run
    if run.threads:
        torch.set_num_threads(run.threads)
    try:
        check_logger(run.log)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    recipe = (recipe or recipe_of(config)).start_from(config.model.pretrained)
    if config.data.bounds and not recipe.private_bounds:
        raise ConfigError(
            "bounds = 'private' is for numbers of a table whose bounds the schema leaves out,"
            f" and {recipe.title[:40]!r} has none: leave it out"
        )
    if recipe.find_bounds and not may_find_bounds:
        raise ConfigError(
            "bounds = 'private' is for dpkfc train on one process; elsewhere give bounds in the"
            " schema, or the folder of such a run"
        )
    # Refuse a wrong augmentation before data are read.
    make_augment(config, recipe.input_shape)
    if data is None:
        data = recipe.data(config, is_training=True)
    config = settle(config, data.size)
    model = recipe.model(run.seed)
    private = (
        data.train
        if "private-oracle" in (config.preconditioner.source, config.preconditioner.output_source)
        else None
    )
    counts = None
    if config.privacy.private_scores:
        counts = make_form(recipe, config)
        if DistributedContext.current().world_size > 1:
            raise ConfigError("private_scores is for one process; leave it out")
    facts = Facts(
        recipe.input_shape,
        data.size,
        probe=recipe.probe,
        private=private,
        unit=recipe.unit,
        max_records_per_unit=recipe.max_records_per_unit,
        private_bounds=recipe.private_bounds,
        scores_norm=counts.norm if counts else 0.0,
        head_inputs=_head_inputs(config, recipe, model),
    )
    plan = make_plan(config, facts)
    canaries = run.audit
    if canaries:
        from dpkfc.audit.one_run import check_settings, is_harmless

        with library_errors():
            check_settings(plan, canaries)
        canaries *= is_harmless(plan, model, canaries)
        plan = make_plan(config, replace(facts, dataset_size=data.size + canaries))
        with library_errors():
            # More records may change what noise = "auto" chooses.
            check_settings(plan, run.audit)
    # Refuse a schedule longer than the plan.
    learning_rate(config, 0, plan.steps)
    kind = run.device.partition(":")[0]
    if kind not in _DEVICES:
        raise ConfigError(f"unknown device {run.device!r:.40}; {nearest(kind, _DEVICES)}")
    try:
        model = model.to(torch.device(run.device))
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)[:60]
        raise ConfigError(f"device {run.device!r} cannot be used ({reason}); try cpu") from None
    start = ""
    if config.model.pretrain_epochs:
        start = pretrain(config, model, recipe.input_shape)
    return Prepared(
        config=config,
        recipe=recipe,
        data=data,
        model=model,
        plan=plan,
        start=start,
        stopping=_make_stopping(config, recipe, data),
        counts=counts,
        canaries=canaries,
    )


def _head_inputs(config: RunConfig, recipe: Recipe, model: nn.Module) -> int:
    """Return the inputs of the layer that a rule of C is for, 1 without such a layer.

    Raises:
        ConfigError: the model has no such layer alone, or the rule does not hold for its inputs.
    """
    if config.preconditioner.preconditioner != "moments":
        if config.privacy.max_grad_norm:
            return 1
        if not recipe.is_whitened:
            raise ConfigError(
                "max_grad_norm = auto is for texts by an encoder, or preconditioner = 'moments';"
                f" {recipe.title[:40]!r} needs C: give one above 0"
            )
    try:
        _, head = split_head(model)
    except ValueError:
        raise ConfigError(
            f"method = {config.run.method!r} is for one linear layer on fixed features, as tables"
            f" have; {config.run.recipe!r} has another model: take dp-kfc-a"
        ) from None
    return head.in_features


def _make_stopping(
    config: RunConfig, recipe: Recipe, data: ExampleSet
) -> EarlyStopping | PrivateEarlyStopping | None:
    """Return what ends a run early, None without `patience`.

    Raises:
        ConfigError: the data have no labels, or units of several records.
    """
    run = config.run
    if not run.patience:
        return None
    if config.stops_privately:
        return _make_private_stopping(config, recipe, data)
    path = Path(config.data.public_validation)
    inputs, labels = read_labelled(path, recipe.input_shape, "public_validation", "an early end")
    device = torch.device(run.device)
    # Public labels take the type of private ones: whole numbers for classes, floats for targets.
    labels = labels.to(device, data.train[1].dtype)
    return EarlyStopping(run.patience, on=(inputs.to(device), labels))


def _make_private_stopping(
    config: RunConfig, recipe: Recipe, data: ExampleSet
) -> PrivateEarlyStopping:
    """Return an early end by noisy losses on the validation split.

    Raises:
        ConfigError: the validation split is missing, a unit has several records, the error of a
            regression is asked for, or several processes run.
    """
    run = config.run
    if recipe.max_records_per_unit is not None or data.validation is None:
        raise ConfigError(
            f"stop_on = {run.stop_on!r} needs a validation split of single records, each its own"
            " unit; take public_validation"
        )
    if run.stop_on == "private-error" and recipe.num_classes == 1:
        raise ConfigError("stop_on = 'private-error' counts wrong classes; take 'private-loss'")
    if DistributedContext.current().world_size > 1:
        raise ConfigError(f"stop_on = {run.stop_on!r} is for one process; take public_validation")
    most = config.privacy.stop_most_loss if run.stop_on == "private-loss" else 1.0
    device = torch.device(run.device)
    held_out = tuple(x[:].to(device) for x in data.validation)
    return PrivateEarlyStopping(run.patience, on=held_out, most=most)
