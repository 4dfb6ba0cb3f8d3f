"""What one process can show of several: see tests/distributed for the rest."""

import pytest
import torch
import torch.distributed as dist

from dpkfc.distributed import context
from dpkfc.distributed.context import DistributedContext, _device
from tests.test_session import net, plan, session


def test_processes_of_torchrun_without_a_group_would_each_spend_the_budget(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert DistributedContext.current() == DistributedContext()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"spend 4 times the budget.*init_process_group\(\)"):
        session(plan(), net())


def test_small_numbers_go_by_the_accelerator_where_the_group_connects_nothing_else(monkeypatch):
    monkeypatch.delattr(torch, "accelerator", raising=False)  # torch has it from 2.6 on
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for backends, expected in (
        ("cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo", "cpu"),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert _device() == torch.device(expected)


def test_a_lack_of_memory_is_not_taken_for_the_death_of_another_process(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room for the sum")

    monkeypatch.setattr(context, "flatten", full)
    monkeypatch.setattr(context, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError, match="no room for the sum"):
        DistributedContext(1, 2).sum({"a": torch.ones(2)})


def test_without_a_process_group_nothing_is_sent():
    ranks = DistributedContext.current()
    assert ranks == DistributedContext() and ranks.is_rank0
    assert list(ranks.shard([3, 4])) == [3, 4]
    tensors = {"a": torch.ones(2)}
    assert ranks.sum(tensors)["a"] is tensors["a"]
