"""FSDP2: the engine below the session agrees with plain modules, and the session says what it does not take yet."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpkfc.curvature.preconditioner import KFAC
from dpkfc.data.layout import layout
from dpkfc.gradients.accumulate import Clip
from dpkfc.gradients.distributed import Ranks
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.micro import clipped_sum
from dpkfc.gradients.tape import capture
from dpkfc.metric import Metric
from tests.distributed.cases import Case
from tests.distributed.group import run, start
from tests.test_session import data, kfac, loss_fn, net


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), init_device_mesh("cpu", (2,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def _metric(model: nn.Module, config: KFAC) -> Metric:
    layers = find_layers(model)
    return config.build(model, lambda m, loss: capture(m, layers, loss), 0).metric


def _sum(model: nn.Module, metric: Metric, records: list[int]) -> dict[str, Tensor]:
    parts = layout(np.array(records), 3, None, "mean", 1)
    x, y = data()
    batches = [((x[torch.from_numpy(p.records)], y[torch.from_numpy(p.records)]), p) for p in parts]
    return clipped_sum(model, find_layers(model), metric, Clip(0.5), loss_fn=loss_fn, micro_batches=batches)[0]


def _worker(rank: int, folder: Path) -> dict[str, Any]:
    start(rank, 2, folder / "store")
    model, ranks, records = _sharded(), Ranks.current(), list(range(12))
    assert hasattr(model[0].weight, "placements")
    found = ranks.sum(_sum(model, _metric(model, kfac()), list(ranks.share(records))))
    try:
        Case(model=lambda: model).open(folder / f"{rank}.jsonl")
        message = "taken"
    except ValueError as error:
        message = str(error)
    dist.destroy_process_group()
    return {"sum": found, "message": message}


@functools.cache
def results() -> list[dict[str, Any]]:
    return run(_worker, 2)


def test_clipped_sums_in_a_metric_of_a_divided_model_are_those_of_the_whole_one() -> None:
    whole = net()
    expected = _sum(whole, _metric(whole, kfac()), list(range(12)))
    for name, value in results()[0]["sum"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", range(2))
def test_the_session_refuses_a_divided_model_by_name(rank: int) -> None:
    message = results()[rank]["message"]
    assert "parameter '0.weight' is divided over processes" in message and "fully_shard" in message
