"""A run on the processes that torchrun has started: one group, one run folder, and one budget however often it starts again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from dpkfc import checkpoint
from dpkfc.app.assembly import undo_measurement
from dpkfc.app.preparation import Prepared
from dpkfc.app.run_folder import RunFolder, RunFolderError
from dpkfc.app.settings import ConfigError, RunConfig, deciding_settings, flatten, read_toml
from dpkfc.distributed import Ranks, is_launched
from dpkfc.privacy.ledger import verify

_PATIENCE = 20.0  # seconds


@contextmanager
def processes() -> Iterator[Ranks]:
    """The processes of a run: those of torchrun, joined for its time, those of a group that is there, or this one alone.

    A group that was joined is left at the end; an error ends the process, and torchrun the others.
    """
    joins = is_launched() and not dist.is_initialized()
    if joins:
        dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
    yield Ranks.current()
    if joins:
        dist.destroy_process_group()


def check_named(config: RunConfig) -> None:
    """A command that torchrun may start again (a process died, a host came) must find the run that it began.

    Raises:
        ConfigError: it names no folder, so that it would begin a second run with a budget of its own; or one device for all.
    """
    if is_launched() and not config.out:
        raise ConfigError(
            "torchrun may start this command again, which would begin a second run with a budget of its own; name the run folder "
            "with --out: the same command continues the run that is there"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and is_launched() and ":" in config.device:
        raise ConfigError(f"device = {config.device!r} would be that of all processes of a host; give its kind alone, as cuda")


def check_alike(config: RunConfig, ranks: Ranks) -> None:
    """Processes that decide by different settings would wait for one another in different places.

    Raises:
        RuntimeError: naming a process and the first setting that differs.
    """
    ranks.agree(lambda: {f"setting {name}": (repr(value), None) for name, value in deciding_settings(config).items()})


def is_begun(config: RunConfig, ranks: Ranks) -> bool:
    """Whether torchrun has started this command before: its folder holds a run of the same settings.

    What was cut off before its first checkpoint, which comes before the first release, is taken away and begun anew.

    Raises:
        RunFolderError: the run there has other settings, or some processes alone see it.
    """
    folder = RunFolder.at(config.out)

    def begun() -> tuple[bool, bool]:
        if not (is_launched() and folder.config.is_file()):
            return False, False
        if not _same(folder, config):
            raise RunFolderError(
                f"run folder {config.out} holds a run of other settings: give those of its config.toml to continue it; another "
                "--out begins a second run, with a budget of its own"
            )
        return True, not checkpoint.is_there(folder.checkpoint) and not _spent(folder)

    seen = ranks.everyone(ranks.together(begun))
    if len(set(seen)) > 1:
        raise _apart(config.out)
    found, cut_off = seen[0]
    if cut_off:
        ranks.from_first(folder.take_away, "cut off")
    return found and not cut_off


def _same(folder: RunFolder, config: RunConfig) -> bool:
    """Return whether a run folder was started with these settings."""
    written = RunConfig(**flatten(read_toml(folder.config), str(folder.config)))
    # A file does not hold the folder that it lies in.
    return replace(undo_measurement(written, config), out=config.out) == config


def _spent(folder: RunFolder) -> bool:
    """Whether the ledger of a run holds a release."""
    return folder.ledger.is_file() and folder.ledger.stat().st_size > 0 and bool(verify(folder.ledger).releases)


def check_seen(folder: RunFolder, ranks: Ranks) -> None:
    """A restart may make another host the first: the run must be where every process sees it.

    Raises:
        RunFolderError: some processes do not see the folder that the first has made.
    """
    until = time.monotonic() + _PATIENCE
    while not folder.config.is_file() and time.monotonic() < until:
        time.sleep(0.2)  # a network disk shows a new file late
    if not all(ranks.everyone(folder.config.is_file())):
        raise _apart(str(folder.path))


def _apart(path: str) -> RunFolderError:
    return RunFolderError(
        f"not every process sees the run in {path}: --out must be on a disk that all hosts share, since after a restart another "
        "host may be the first"
    )


def on_own_device(config: RunConfig) -> RunConfig:
    """The settings of this process: of several accelerators on a host each process takes its own."""
    if not (is_launched() and config.device in ("cuda", "xpu")):
        return config
    return replace(config, device=f"{config.device}:{os.environ.get('LOCAL_RANK', '0')}")


def apart(ranks: Ranks, prepared: Prepared) -> None:
    """Let several processes begin with equal weights and with random numbers of their own, for dropout and augmentation."""
    if ranks.world_size == 1:
        return
    torch.manual_seed(torch.initial_seed() + ranks.rank)
    if prepared.start:  # pre-trained on every process, whose threads may have rounded otherwise
        own = dict(prepared.model.named_parameters())
        with torch.no_grad():
            for name, value in ranks.spread(own, own, next(iter(own.values())).device).items():
                own[name].copy_(value)
