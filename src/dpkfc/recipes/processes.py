"""A run on the processes that torchrun has started: one group, one run folder, and one budget however often it starts again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from dpkfc.gradients.distributed import Ranks
from dpkfc.launched import is_launched, may_restart
from dpkfc.recipes.prepared import Prepared
from dpkfc.recipes.settings import ConfigError, RunConfig

__all__ = ["apart", "check_restarts", "on_own_device", "processes"]


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


def check_restarts(config: RunConfig) -> None:
    """A command that torchrun may start again must find the run that it began.

    Raises:
        ConfigError: it names no folder, so a restart would begin a second run with a budget of its own.
    """
    if may_restart() and not config.out:
        raise ConfigError(
            "torchrun may start this command again (--max-restarts), which would begin a second run with a budget of its own; "
            "name the run folder with --out: a restart continues it"
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
