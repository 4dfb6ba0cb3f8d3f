"""A run on the processes that torchrun has started: one group, one run folder, and one budget however often it starts again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dpkfc.gradients.distributed import Ranks
from dpkfc.launched import is_launched
from dpkfc.recipes.config import to_toml
from dpkfc.recipes.prepared import Prepared
from dpkfc.recipes.settings import ConfigError, RunConfig
from dpkfc.report.run_folder import RunFolder, RunFolderError

__all__ = ["apart", "check_named", "is_begun", "on_own_device", "processes"]


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
        ConfigError: it names no folder, so that it would begin a second run with a budget of its own.
    """
    if is_launched() and not config.out:
        raise ConfigError(
            "torchrun may start this command again, which would begin a second run with a budget of its own; name the run folder "
            "with --out: the same command continues the run that is there"
        )


def is_begun(config: RunConfig) -> bool:
    """Whether torchrun has started this command before: its folder holds a run of the same settings.

    Raises:
        RunFolderError: the run there has other settings.
    """
    path = RunFolder(Path(config.out)).config
    if not (is_launched() and path.is_file()):
        return False
    if path.read_text("utf-8") != to_toml(config):
        raise RunFolderError(f"run folder {config.out} holds a run of other settings; choose another with --out")
    return True


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
