"""My dataset draws from a generator of its own: what a record gives then depends on which others were read before."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpkfc.config import PrivacyConfig
from dpkfc.federated.work import Records
from dpkfc.gradients.steady import check_steady
from dpkfc.session import Session
from tests.integrations import opacus_cases

N = 24
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.change(X[i]), i % 3


def numpy_generator() -> Callable[[Tensor], Tensor]:
    own = np.random.default_rng(0)
    return lambda x: x + torch.from_numpy(own.normal(0, 1, 4)).float()


def torch_generator() -> Callable[[Tensor], Tensor]:
    own = torch.Generator().manual_seed(0)
    return lambda x: x + torch.randn(4, generator=own)


def seldom() -> Callable[[Tensor], Tensor]:
    own = random.Random(1)
    return lambda x: -x if own.random() < 0.5 else x


def running() -> Callable[[Tensor], Tensor]:
    held = [100, torch.zeros(4)]

    def change(x: Tensor) -> Tensor:
        held[0] += 1
        held[1] = held[1] + (x - held[1]) / held[0]
        return x - held[1]

    return change


def previous() -> Callable[[Tensor], Any]:
    held = [torch.zeros(4)]

    def change(x: Tensor) -> Any:
        mixed, held[0] = {"x": np.asarray(x + held[0])}, x
        return mixed

    return change


FAULTS = [numpy_generator, torch_generator, seldom, running, previous]


def session(dataset: Any, **settings: Any) -> Session:
    model = nn.Linear(4, 3)
    plan = PrivacyConfig(expected_batch_size=8, steps=2).with_noise(1.0, 1e-3, N)
    return Session(plan, model, torch.optim.SGD(model.parameters(), 0.1), dataset, **settings)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_such_a_dataset_is_refused_before_anything_is_spent(fault: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="generator of its own, or remembers.*global generator"):
        session(Rows(fault()), ledger_path=tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


def test_so_are_a_collate_function_an_opacus_script_and_a_federated_client() -> None:
    change = numpy_generator()
    with pytest.raises(ValueError, match="collate function, draws from a generator of its own"):
        session((X, torch.arange(N) % 3), collate_fn=lambda rows: (change(torch.stack([x for x, _ in rows])),))
    with pytest.raises(ValueError, match="generator of its own"):
        opacus_cases.private(nn.Linear(4, 3), data_loader=DataLoader(Rows(numpy_generator()), batch_size=8))
    with pytest.raises(ValueError, match="generator of its own"):
        Records(Rows(numpy_generator()))


def everywhere(x: Tensor) -> Tensor:
    return x + torch.randn(4) + float(np.random.normal()) + random.random()


def made_anew(x: Tensor) -> Tensor:
    own = np.random.default_rng(int(torch.randint(2**62, ())))
    return x + torch.from_numpy(own.normal(0, 1, 4)).float()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", [everywhere, made_anew, torch.clone])
def test_what_draws_from_the_global_generators_is_taken(change: Any, workers: int) -> None:
    with session(Rows(change), num_workers=workers) as s:
        for batch in s.batches():
            s.step(batch, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
        assert s.ledger.count == 2


class Held:
    def __init__(self, x: float) -> None:
        self.x = x


def test_whatever_a_record_is_it_is_compared_and_few_are_read() -> None:
    kinds: list[Callable[[float], Any]] = [
        float, str, Held, lambda v: {"a": [np.float32(v)]}, lambda v: Image.new("F", (2, 2), v), lambda v: complex(v),
        lambda v: torch.tensor(v), lambda v: np.array([v]), lambda v: "a" if v else None,
    ]  # fmt: skip
    for kind in kinds[:-1]:
        own, read = iter(range(1000)), list[int]()
        with pytest.raises(ValueError, match="two different things"):
            check_steady(lambda _, kind=kind, own=own: kind(float(next(own))), 10**6)
        check_steady(lambda i, kind=kind, read=read: read.append(i) or kind(float(i)), 10**6)
        assert len(read) == 16 and max(read) == 10**6 - 1
    before = torch.get_rng_state()
    check_steady(lambda i: everywhere(X[i]), N)
    assert torch.equal(before, torch.get_rng_state())
    check_steady(lambda i: float("nan"), 1)
    check_steady(lambda i: 1 / 0, 3)  # the pass that reads it tells of it
    check_steady(lambda i: 1 / 0, 0)
