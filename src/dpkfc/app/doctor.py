"""The report of `dpkfc doctor` on a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dpkfc.app.assembly import make_kfac
from dpkfc.app.owndata.display import print_shares, schema_table
from dpkfc.app.owndata.tasks import call_function
from dpkfc.app.recipes.catalogue import RECIPES, find_recipe, recipe_of, run_config
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.settings import ConfigError, RunConfig, nearest
from dpkfc.app.train import read_settings
from dpkfc.report.doctor import (
    Costs,
    SideChoice,
    Timings,
    choose_sides,
    default_cache,
    diagnose,
    layer_table,
    measure_costs,
)
from dpkfc.terminal import make_table

# --------------------------------------------------------------------------------------------------
# The target of the report: a recipe, or a factory in any module.

Target = tuple[nn.Module, tuple[int, ...], "Tensor | None", str]


def load_target(target: str, input_shape: str = "", seed: int = 0) -> Target:
    """Return a model with the shape of its input.

    Args:
        target: name of a recipe, or `module:factory`. The factory takes nothing and returns a
            model, or a model and a batch of public example inputs (needed for token ids).
        input_shape: shape of one input, comma-separated, where the factory returns a model alone.
        seed: of a recipe's initial weights.

    Returns:
        Model, shape of one input, example inputs or None, and a name.

    Raises:
        ConfigError: no such recipe, module or factory, or a factory that returns something else.
    """
    if ":" not in target:
        if "/" in target:
            raise ConfigError(
                f"{target} does not exist, or is not a run folder (no config.toml); give one, a"
                " recipe or module:factory"
            )
        if target not in RECIPES:
            raise ConfigError(
                f"unknown recipe {target!r}; {nearest(target, RECIPES)} (or give module:factory)"
            )
        recipe = find_recipe(target)
        return recipe.model(seed), recipe.input_shape, None, target
    built = call_function(target)
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not (inputs is None or isinstance(inputs, Tensor)):
        raise ConfigError(
            f"{target} returned {type(built).__name__}; it must return a torch module, or (module,"
            " inputs)"
        )
    if inputs is not None:
        return model, tuple(inputs.shape[1:]), inputs, target
    return model, _parse_shape(target, input_shape), None, target


def _parse_shape(target: str, text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{target} returns a model alone: give the shape of one input, for example"
            f" --input-shape 3,32,32 (got {text!r}), or let it return (model, inputs)"
        )
    return tuple(int(part) for part in parts)


# --------------------------------------------------------------------------------------------------


def doctor_report(
    target: str,
    settings: dict[str, Any],
    input_shape: str,
    rows: int,
    console: Console,
    *,
    again: bool = False,
) -> None:
    """Examine a model and print how it would be trained.

    Args:
        target: a recipe, `module:factory`, or a run folder; empty for own data in the settings.
        settings: written by the user.
        input_shape: of a factory's model.
        rows: examples of the step whose cost is measured, 0 for none.
        console: where to print.
        again: times of layers that are kept from before are measured anew.

    Raises:
        ConfigError: no such target, or a model that cannot be trained privately.
    """
    if again and not rows:
        raise ConfigError("--again measures anew what --cost has kept: give both")
    own = _own_config(target, settings)
    if own is not None:
        recipe = recipe_of(own)
        if recipe.columns and not target:
            console.print(schema_table(recipe.columns))
            # Its owner compares public names with the file before ε is spent.
            print_shares(console, recipe.load(own).figures)
        model, name = recipe.model(own.seed), recipe.title
        curvature = make_kfac(own, recipe.input_shape, recipe_probe=recipe.probe)
    else:
        seed = RunConfig(seed=settings.get("seed", 0)).seed
        model, shape, inputs, name = load_target(target, input_shape, seed)
        named, recipe_probe = "digits", None
        if ":" not in target:
            named, recipe_probe = target, find_recipe(target).probe
        config = run_config({"recipe": named, **settings})
        curvature = make_kfac(config, shape, inputs, recipe_probe)
    diagnosis = diagnose(model, curvature)
    if diagnosis.problem:
        raise ConfigError(f"{name} cannot be trained privately: {diagnosis.problem}")
    console.print(layer_table(diagnosis, f"{name}: {diagnosis.trainable:,} trainable parameters"))
    console.print(
        "not covered: nothing; every trainable parameter belongs to one of the layers above"
    )
    if rows:
        timings = Timings.load(default_cache(), again=again)
        costs = measure_costs(model, curvature, rows=rows, cache=timings)
        console.print(
            layers_table(costs) if costs.layers else "no layer has a choice of norm methods"
        )
        console.print(steps_table(costs))
        console.print(_advice(costs, curvature.every, curvature.probe_size))
        sides = choose_sides(model, curvature, rows=rows, cache=timings)
        if sides:
            console.print(sides_table(sides))


def _own_config(target: str, settings: dict[str, Any]) -> RunConfig | None:
    """Return the settings of a run folder, of own data or of an own task; None for other targets.

    Raises:
        ConfigError: nothing to examine, or settings beside a run folder.
    """
    if not target:
        return run_config(settings)
    folder = RunFolder.locate(target)
    if not folder.config.is_file():
        return None
    if settings:
        raise ConfigError(
            "a run folder is examined with its own settings; leave out every other setting"
        )
    return read_settings(folder)


_NORM_METHODS = ("gram", "materialised")


def layers_table(costs: Costs) -> Table:
    """Return what the norms of each layer cost by method, and what its sides cost."""
    title = f"norms of {costs.rows} examples, milliseconds"
    table = make_table(
        "layer",
        "T × in × out",
        *_NORM_METHODS,
        "by rule",
        "fastest",
        "sides (a full matrix instead)",
        right=_NORM_METHODS,
        title=title,
    )
    for layer in costs.layers:
        times = []
        for method in _NORM_METHODS:
            seconds = layer.seconds.get(method)
            times.append("too large" if seconds is None else _ms(seconds))
        sides = []
        for side in layer.sides:
            dense = _ms(side.dense_seconds)
            sides.append(f"{side.side} {side.width:,} {side.kind}: {_ms(side.seconds)} ({dense})")
        table.add_row(
            layer.name,
            f"{layer.positions:,} × {layer.d_in:,} × {layer.d_out:,}",
            *times,
            layer.by_rule,
            layer.chosen,
            "\n".join(sides) or "–",
        )
    return table


def sides_table(sides: Sequence[SideChoice]) -> Table:
    """Return what `--structure auto` would keep of each side, and why."""
    title = "sides as --structure auto takes them"
    numbers = ("width", "norms with a full matrix, ms", "with few eigenpairs, ms")
    table = make_table("side", *numbers, "keeps", right=numbers, title=title)
    for side in sides:
        table.add_row(
            side.name,
            f"{side.width:,}",
            _ms(side.dense_seconds),
            _ms(side.low_rank_seconds),
            f"{side.rank} eigenpairs" if side.rank else "all",
        )
    return table


def steps_table(costs: Costs) -> Table:
    """Return what a step and a refresh cost."""
    title = f"a step of {costs.rows} examples on {costs.threads} threads"
    numbers = ("milliseconds", "÷ without privacy")
    table = make_table("", *numbers, right=numbers, title=title)
    rows = {
        "without privacy": costs.plain,
        "DP-SGD": costs.dp_sgd,
        "DP-KFC": costs.preconditioned,
        "DP-KFC, fastest norm methods": costs.chosen,
        "one refresh": costs.refresh,
    }
    for name, seconds in rows.items():
        table.add_row(name, _ms(seconds), f"{seconds / costs.plain:.2f}")
    return table


def _advice(costs: Costs, every: int, probe_size: int) -> str:
    """Return how often to refresh, and which norms to take, on this machine."""
    fraction = costs.refresh / (costs.refresh + every * costs.chosen)
    lines = [
        f"refreshes every {every} steps take {100 * fraction:.1f} % of the time at this batch; "
        f"--every {costs.every} takes 5 %"
    ]
    size, decay, seconds = costs.averaged
    if costs.every > every and decay > 0:
        often = max(costs.interval(seconds), every * size // probe_size)
        lines.append(
            f"or a probe of {size} examples after the first refresh, averaged, {_ms(seconds)} ms"
            f" each: --later-probe-size {size} --factor-decay {decay:g} --every {often}"
        )
    if costs.norm_methods:
        lines.append(f"faster norms: PrivacyConfig(norm_methods={costs.norm_methods})")
    else:
        lines.append("no norm method is clearly faster than the one the rule takes")
    lines.append(
        f"measured on the probe with torch {torch.__version__}; times of layers are kept in "
        f"{default_cache()}"
    )
    lines.append("--again measures these anew")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}" if seconds >= 1e-3 else f"{1000 * seconds:.2f}"
