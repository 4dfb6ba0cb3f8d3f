"""Invariant 16: two processes are one process, and a failure on one stops both before anything is released."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dpkfc.gradients import distributed
from dpkfc.gradients.distributed import Ranks, _device
from tests.test_session import kfac, loss_fn, net, plan, session, train, weights


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank: int, world: int, port: int, folder: str, fail: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = net()
    p = plan(1.0, preconditioner=kfac(), max_physical_batch_size=2)
    path = Path(folder)
    with session(p, model, ledger_path=path / "ledger.jsonl", verify=not fail) as s:
        if fail:
            with pytest.raises(RuntimeError, match="boom" if rank == 1 else "another process failed"):
                s.step(next(s.batches()), _boom if rank == 1 else loss_fn)
            torch.save(torch.tensor(float(s.ledger.count)), path / f"{rank}.pt")
        else:
            train(s, 3)
            s.save(path / "checkpoint")
            train(s)
            torch.save(weights(model), path / f"{rank}.pt")
            assert s.steps_done == 6
    dist.destroy_process_group()


def _boom(model: torch.nn.Module, batch: object) -> torch.Tensor:
    raise RuntimeError("boom")


def _run(folder: Path, fail: bool = False) -> list[torch.Tensor]:
    mp.spawn(_worker, args=(2, _port(), str(folder), fail), nprocs=2, join=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_equal_one(tmp_path: Path) -> None:
    alone = net()
    with session(plan(1.0, preconditioner=kfac()), alone) as s:
        train(s)
    for found in _run(tmp_path):
        torch.testing.assert_close(found, weights(alone), rtol=1e-10, atol=1e-11)
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 1 + 6


def test_a_failure_on_one_process_releases_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path, fail=True) == [torch.tensor(0.0)] * 2


def test_processes_of_torchrun_without_a_group_would_each_spend_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.current() == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"spend 4 times the budget.*init_process_group\(\)"):
        session(plan(), net())


def test_small_numbers_go_by_the_accelerator_where_the_group_connects_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator", raising=False)  # torch has it from 2.6 on
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for backends, expected in (("cuda:nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu")):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert _device() == torch.device(expected)


def test_a_lack_of_memory_is_not_taken_for_the_death_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for the sum")

    monkeypatch.setattr(distributed, "_flat", full)
    monkeypatch.setattr(distributed, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError, match="no room for the sum"):
        Ranks(1, 2).sum({"a": torch.ones(2)})


def test_without_a_process_group_nothing_is_sent() -> None:
    ranks = Ranks.current()
    assert ranks == Ranks() and ranks.first
    assert list(ranks.share([3, 4])) == [3, 4]
    tensors = {"a": torch.ones(2)}
    assert ranks.sum(tensors)["a"] is tensors["a"]
