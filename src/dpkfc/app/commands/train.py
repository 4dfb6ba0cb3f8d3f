"""Define `dpkfc train` and `dpkfc settings`."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from dpkfc.allocator import import_without_collection
from dpkfc.app.commands.flags import Settings, print_every_flag
from dpkfc.app.commands.score_tables import print_scores
from dpkfc.app.place import MOVABLE
from dpkfc.app.run_config import find_idle
from dpkfc.app.scores import missing_score
from dpkfc.app.settings_file import read_choices, to_toml
from dpkfc.app.toml import ConfigError
from dpkfc.report.text import round_up
from dpkfc.terminal import INTERRUPTED, make_table, open_console, print_error, print_line
from dpkfc.torchrun import is_first, is_launched

if TYPE_CHECKING:
    from dpkfc.app.recipes.recipe import Recipe
    from dpkfc.app.results import Result
    from dpkfc.app.run_config import RunConfig


def train(
    *,
    config: Path | None = None,
    resume: Path | None = None,
    any_world_size: Annotated[bool, Parameter(show=False)] = False,
    dry_run: bool = False,
    quiet: bool = False,
    settings: Settings = None,
) -> None:
    """Train a recipe under a privacy budget and leave a run folder.

    Args:
        config: TOML file of settings; flags win.
        resume: Run folder to continue; --data if moved.
        any_world_size: Resume on another number of processes.
        dry_run: Show plan, time, memory; spend nothing.
        quiet: No progress bar.
        settings: flags of settings that were given.
    """
    with import_without_collection():
        import dp_accounting  # noqa: F401

        from dpkfc.app import train as training
        from dpkfc.app.owndata.display import schema_table
        from dpkfc.app.preview import preview
        from dpkfc.app.recipes.catalogue import configure

    given = settings or {}
    if resume is not None and (given.keys() - set(MOVABLE) or config is not None or dry_run):
        raise ConfigError(
            "--resume continues a run with its own settings; leave out every other setting but a"
            " new place of the same data (--data, --label-file)"
        )
    console = None if quiet else open_console()
    if resume is not None:
        result = training.resume(resume, console, any_world_size=any_world_size, moved=given)
    else:
        choices = read_choices(config, given)
        run_settings, recipe = configure(choices)
        if console is not None and is_first():
            if recipe.columns:
                console.print(schema_table(recipe.columns))
            print_line(_describe_method(recipe, choices, run_settings))
            if idle := find_idle(run_settings, given):
                print_line(f"without effect here: {', '.join(idle)}")
            if not choices.keys() & {"epsilon", "noise_multiplier"}:
                chosen = run_settings.privacy
                print_line(
                    f"ε = {chosen.epsilon:g} at δ = {chosen.delta:g} (the recipe's; give --epsilon:"
                    " the smaller, the more private)"
                )
        if dry_run:
            preview(run_settings, open_console(), recipe)
            return
        result = training.run(run_settings, console, recipe=recipe, any_world_size=any_world_size)
    announce(result)
    if resume is None and run_settings.run.audit:
        _show_audit(result, run_settings)


def _show_audit(result: Result, settings: RunConfig) -> None:
    """Print what the canaries of a run show, after it was written into its folder."""
    from dpkfc.app.audit_folder import finish_audit

    found = finish_audit(result, settings.run.audit, settings.run.device)
    if found is None:
        return
    line = found.finding()
    print_line(f"audit: {line.measured}, {line.bound}")
    for fact in line.detail.split("; "):
        print_line(f"  {fact}")
    if not found.passed:
        raise ConfigError("the audit FAILED: the guarantee that is claimed does not hold")


def _describe_method(recipe: Recipe, choices: dict[str, Any], settings: RunConfig) -> str:
    """Return which method a run takes and why, in one line."""
    reason = recipe.reason or f"the default of the recipe {settings.run.recipe}"
    if "method" in choices:
        reason = "as chosen"
    return f"method: {settings.run.method} ({reason})"


def announce(result: Result) -> None:
    """Print the result of a run, and how to continue it."""
    from dpkfc.app.owndata.display import MARK, print_shares

    folder = shlex.quote(str(result.folder))
    if result.interrupted:
        again = "the same command" if is_launched() else f"dpkfc train --resume {folder}"
        print_error(f"stopped after step {result.steps}; continue with: {again}")
        raise SystemExit(INTERRUPTED)
    if not is_first():
        return
    console = open_console()
    console.print(results_table({result.curve.label: result}))
    if result.stamp:
        console.print(f"[bold red]{result.stamp}[/bold red]")
    if result.scores is not None:
        private = f"{MARK}: scores on the {result.measured_on} set, which ε does not cover"
        print_line("scores on the test set with noise, which ε covers" if result.noisy else private)
        print_scores(console, result.scores, result.classes)
    print_line(f"run folder: {result.folder}")
    print_line(f"to view it: dpkfc report {folder}")
    if result.errors:
        errors = ", ".join(f"{name} {value:.5g}" for name, value in result.errors.items())
        covers = "covers" if result.noisy else "does not cover"
        print_line(f"{errors} ({result.measured_on}; ε {covers} these figures)")
    print_shares(console, result.figures)
    if result.head:
        print_line(
            f"ledger: {result.releases} releases, head {result.head} (send both to the person who"
            " will check the run)"
        )


def results_table(results: dict[str, Result]) -> Table:
    """Return accuracy, ε, steps and seconds of runs by their labels."""
    numbers = (next(iter(results.values())).score, "ε spent", "steps", "seconds")
    table = make_table("method", *numbers, right=numbers)
    for label, result in results.items():
        table.add_row(
            label,
            score_cell(result),
            round_up(result.epsilon),
            f"{result.steps:,}",
            f"{result.seconds:.1f}",
        )
    return table


def score_cell(result: Result) -> str:
    """Return the score of a run, or why it lacks one."""
    if math.isnan(result.accuracy):
        return missing_score(result.scores, result.measured_on)
    return f"{100 * result.accuracy:.1f} % ({result.measured_on})"


def every_setting(
    *,
    config: Path | None = None,
    settings: Settings = None,
) -> None:
    """Print every setting that `train` would take, as TOML; without a recipe, every flag.

    Args:
        config: TOML file of settings; flags win.
        settings: flags of settings that were given.
    """
    from dpkfc.app.recipes.catalogue import run_config

    if config is None and not settings:
        print_every_flag()
        return
    sys.stdout.write(to_toml(run_config(read_choices(config, settings or {}))))
