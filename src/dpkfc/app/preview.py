"""What a run would be, without starting it: its plan, and its time and memory on this machine."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
from rich.console import Console

from dpkfc.app.assembly import Prepared, make_augment, make_optimizer
from dpkfc.app.owndata.display import print_shares
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import check_budget
from dpkfc.report.tables import plan_table
from dpkfc.session import Session
from dpkfc.terminal import print_line
from dpkfc.torchrun import is_launched

# Steps are measured until one of these is reached; the first step has a refresh of its own.
_MOST_STEPS = 6
_MOST_SECONDS = 20.0
DRY_RUN = "dry run: no budget is spent and no file is written"


@dataclass(frozen=True)
class Estimate:
    """What a run costs on this machine.

    Attributes:
        seconds: of all steps and refreshes, without evaluations.
        measured: steps that were measured.
        memory: peak bytes of the process or accelerator; None on Windows
            without psutil.
    """

    seconds: float
    measured: int
    memory: int | None


def preview(
    config: RunConfig, console: Console, recipe: Recipe | None = None, end: str = DRY_RUN
) -> None:
    """Print the plan of a run, its time and memory, and the PRIVATE shares of its data.

    Data are read as for the run. No release is made, no budget is charged, and no file is written.

    Args:
        config: settings of the run.
        console: of the owner.
        recipe: of the settings, where it has been made.
        end: the last line.

    Raises:
        ConfigError, DatasetError, RunFolderError, BudgetExhausted: as `dpkfc.app.train.run`.
    """
    if is_launched():
        raise ConfigError("--dry-run is for one process; start it without torchrun")
    if config.run.out:
        RunFolder.check(config.run.out)
    prepared = prepare(config, recipe=recipe, may_find_bounds=True)
    check_budget(prepared)
    console.print(plan_table(prepared.plan))
    estimate = measure_run(prepared)
    seconds = round(estimate.seconds)
    duration = timedelta(seconds=seconds) if seconds else "under a second"
    steps = f"{estimate.measured} step" + "s" * (estimate.measured > 1)
    print_line(f"estimated time: {duration} and evaluations, from {steps} on rows of zeros")
    memory = "unknown without psutil; `pip install psutil`"
    if estimate.memory is not None:
        memory = f"{estimate.memory / 2**30:.2f} GiB"
    print_line(f"estimated memory: {memory}")
    print_shares(console, prepared.data.figures)
    print_line(end)


def measure_run(prepared: Prepared) -> Estimate:
    """Measure a few steps on rows of zeros in place of the examples; the model is trained on them.

    Args:
        prepared: of `dpkfc.app.prepare.prepare`; not to be used afterwards.
    """
    config, plan = prepared.config, prepared.plan
    # One row of each tensor takes the place of all rows.
    inputs, labels = (torch.zeros_like(x[:1]).expand(x.shape) for x in prepared.data.train)
    session = Session(
        plan,
        prepared.model,
        make_optimizer(config, prepared.model),
        (inputs, labels),
        units=prepared.data.units,
        num_workers=config.run.num_workers,
        augment=make_augment(config, prepared.recipe.input_shape),
    )
    seconds: list[float] = []
    begun = time.perf_counter()
    with session:
        for batch in session.batches():
            seconds.append(session.step(batch, prepared.recipe.task.loss).seconds)
            is_long = time.perf_counter() - begun > _MOST_SECONDS
            if is_long or len(seconds) == _MOST_STEPS:
                break
    step = median(seconds[1:] or seconds)
    preconditioner = plan.config.preconditioner
    refreshes = 1
    if preconditioner is not None:
        refreshes = sum(preconditioner.is_due(number) for number in range(plan.steps))
    total = plan.steps * step + refreshes * max(0.0, seconds[0] - step)
    return Estimate(total, len(seconds), _peak_bytes(torch.device(config.run.device)))


def _peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that a device, or this process on a CPU, has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    with contextlib.suppress(ImportError):  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    return None
