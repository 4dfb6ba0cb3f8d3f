"""Join the processes of torchrun: one group, one run folder, one budget over all restarts."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from dpkfc import checkpoint
from dpkfc.app.assembly import Prepared
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import Examples, ExampleSet, choose_rows
from dpkfc.app.recipes.objective import model_outputs
from dpkfc.app.run_config import RunConfig
from dpkfc.app.run_folder import RunFolder, RunFolderError
from dpkfc.app.settings_file import deciding_settings, read_config
from dpkfc.app.toml import ConfigError
from dpkfc.distributed.context import DistributedContext
from dpkfc.privacy.ledger import verify
from dpkfc.torchrun import is_launched

# Test rows of a process whose outputs are sent at once: whole passes of `model_outputs`.
_SENT_ROWS = 64_000
# Seconds until a network disk must show a new folder.
_PATIENCE = 20.0


@contextmanager
def processes() -> Iterator[DistributedContext]:
    """Yield the processes of a run: torchrun's, an existing group's, or this one.

    The processes of torchrun are joined, and the group is left at the end. An error ends the
    process, and torchrun ends the others.
    """
    joins = is_launched() and not dist.is_initialized()
    if joins:
        # gloo between CPUs, NCCL between GPUs.
        dist.init_process_group()
    yield DistributedContext.current()
    if joins:
        dist.destroy_process_group()


def check_named(config: RunConfig) -> None:
    """Refuse a command that could not find its run when torchrun starts it again.

    Raises:
        ConfigError: the command names no folder, so that it would start a second run with a budget
            of its own, or it names one device for all processes.
    """
    run = config.run
    if not is_launched():
        return
    if not run.out:
        raise ConfigError(
            "torchrun may start this command again, as a second run with its own budget; name "
            "the run folder with --out: the same command continues it"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and ":" in run.device:
        raise ConfigError(
            f"device = {run.device!r} would be used by all processes of a host; give its "
            "kind alone, as cuda"
        )


def check_same_settings(config: RunConfig, ranks: DistributedContext) -> None:
    """Refuse processes with different settings, which would wait for one another.

    Raises:
        RuntimeError: naming a process and the first setting that differs.
    """
    values = {f"setting {n}": (repr(value), None) for n, value in deciding_settings(config).items()}
    ranks.check_consistent(lambda: values)


def is_started(config: RunConfig, ranks: DistributedContext) -> bool:
    """Decide whether this command continues the run in its folder, or starts a new one.

    torchrun may start a command again after a failure; then the folder holds a run of the same
    settings. A run without any checkpoint or release has spent nothing: its files are removed.

    Returns:
        Whether there is a run to continue; always False without torchrun.

    Raises:
        RunFolderError: the run there has other settings, or only some processes see it.
    """
    run = config.run
    folder = RunFolder.locate(run.out)

    def look() -> tuple[bool, bool]:
        if not (is_launched() and folder.config.is_file()):
            return False, False
        # config.toml does not name its own folder.
        if read_config(folder.config).change(out=run.out) != config:
            raise RunFolderError(
                f"run folder {run.out} holds a run of other settings: give the settings in its "
                "config.toml to continue it, or another --out"
            )
        has_checkpoint = checkpoint.exists(folder.checkpoint)
        is_cut_off = not (has_checkpoint or _has_releases(folder))
        return True, is_cut_off

    answers = ranks.all_gather(ranks.run_on_all(look))
    if len(set(answers)) > 1:
        raise _not_shared(run.out)
    is_there, is_cut_off = answers[0]
    if is_cut_off:
        ranks.broadcast_from_rank0(folder.take_away, "cut off")
    return is_there and not is_cut_off


def _has_releases(folder: RunFolder) -> bool:
    """Return whether the ledger of a run holds a release."""
    ledger = folder.ledger
    return ledger.is_file() and ledger.stat().st_size > 0 and bool(verify(ledger).releases)


def check_visible(folder: RunFolder, ranks: DistributedContext) -> None:
    """Refuse a run folder that some process does not see.

    A restart may give rank 0, which reads and writes the folder, to another host.

    Raises:
        RunFolderError: some processes do not see the folder that the first process has made.
    """
    until = time.monotonic() + _PATIENCE
    while not folder.config.is_file() and time.monotonic() < until:
        time.sleep(0.2)
    if not all(ranks.all_gather(folder.config.is_file())):
        raise _not_shared(str(folder.path))


def _not_shared(path: str) -> RunFolderError:
    return RunFolderError(
        f"not every process sees the run in {path}: --out must be on a disk that all hosts share, "
        "since a restart may make another host the first"
    )


def use_own_device(config: RunConfig) -> RunConfig:
    """Return the settings of this process: each process takes its own accelerator of the host."""
    if not (is_launched() and config.run.device in ("cuda", "xpu")):
        return config
    return config.change(device=f"{config.run.device}:{os.environ.get('LOCAL_RANK', '0')}")


def align_processes(ranks: DistributedContext, prepared: Prepared) -> None:
    """Give several processes equal weights and different random numbers.

    Dropout and augmentation draw these random numbers.
    """
    if ranks.world_size == 1:
        return
    torch.manual_seed(torch.initial_seed() + ranks.rank)
    if not prepared.start:
        return
    # Every process has pre-trained, and its threads may have rounded differently.
    parameters = dict(prepared.model.named_parameters())
    device = next(iter(parameters.values())).device
    with torch.no_grad():
        received = ranks.broadcast_tensors(parameters, like=parameters, device=device)
        for name, value in received.items():
            parameters[name].copy_(value)


def join_shares(own: ExampleSet, ranks: DistributedContext) -> ExampleSet:
    """Return the examples of a process that holds a part of the records, counted over all.

    Args:
        own: the part, split.
        ranks: the processes.
    """
    parts = ranks.all_gather((len(own.train[1]), len(own.test[1]), own.figures))
    sizes, counts, _ = zip(*parts, strict=True)
    total, tested = sum(sizes), sum(counts)
    if not tested:
        raise DatasetError(f"{own.source}: too few records for a test split; give more")
    figures: dict[tuple[str, str], float] = defaultdict(float)
    for size, count, found in parts:
        for name, share in found.items():
            figures[name] += share * (size + count) / (total + tested)
    return replace(own, total=total, tested=tested, figures=figures)


def gather_judged(prepared: Prepared, ranks: DistributedContext) -> tuple[nn.Module, Examples]:
    """Return the model and the examples that rank 0 judges. PRIVATE.

    Where each process holds a part of the test rows, these are the outputs for all parts with their
    labels, and a model that returns outputs as they are. So no test row leaves its process.
    Ranks other than the first keep their own rows alone.
    """
    model, (inputs, labels) = prepared.model, prepared.evaluation_examples
    if not prepared.data.share:
        return model, (inputs, labels)

    def predict(start: int) -> Examples:
        rows = slice(start, start + _SENT_ROWS)
        outputs = [output.cpu() for output in model_outputs(model, choose_rows(inputs, rows))]
        # A view would be sent with all of its tensor.
        return torch.cat(outputs), labels[rows].clone()

    rounds = [
        ranks.gather(ranks.run_on_all(partial(predict, start)), to=0) or []
        for start in range(0, max(ranks.all_gather(len(labels))), _SENT_ROWS)
    ]
    if not ranks.is_rank0:
        return model, (inputs, labels)
    # The rows of one process after another's, as one process would have them.
    pieces = [piece for pieces in zip(*rounds, strict=True) for piece in pieces]
    found, answers = map(torch.cat, zip(*pieces, strict=True))
    return nn.Identity(), (found, answers)
