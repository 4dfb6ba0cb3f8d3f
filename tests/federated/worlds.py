"""Small federated worlds in float64, shared by the tests of this folder."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkfc.federated import FederatedConfig, FederatedPlan, RoundRecord, Server, make_clients
from dpkfc.federated.partition import iid, parts

CLIENTS, FEATURES, CLASSES, RECORDS = 4, 5, 3, 24


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def head(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(FEATURES, CLASSES).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def records(count: int = RECORDS, seed: int = 1, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def datasets(
    data: tuple[Tensor, Tensor] | None = None, clients: int = CLIENTS
) -> list[tuple[Tensor, ...]]:
    data = data or records()
    return parts(data, iid(len(data[0]), clients))


def plan_of(noise: float = 1.0, **options: Any) -> FederatedPlan:
    settings = {
        "clients": CLIENTS,
        "rounds": 3,
        "expected_records": RECORDS,
        "max_grad_norm": 0.5,
        "test_mode_seed": 7,
    }
    return FederatedConfig(**{**settings, **options}).with_noise(noise, 1e-3)


def world(
    plan: FederatedPlan, data: Any = None, model: nn.Module | None = None, **options: Any
) -> tuple[Server, dict[int, Any]]:
    """A server with enrolled clients."""
    model = head() if model is None else model
    server = Server(plan, model, **options)
    data = datasets(clients=plan.config.clients) if data is None else data
    clients = {c.number: c for c in make_clients(plan, copy.deepcopy(model), loss_fn, data)}
    for client in clients.values():
        assert server.enroll(client.hello())
    return server, clients


def open_round(server: Server, clients: dict[int, Any]) -> dict[int, Any]:
    """The messages of the next round, after the clients have sent keys where the plan masks
    messages.
    """
    for number, message in server.request_keys().items():
        assert server.receive(clients[number].answer(message))
    return server.open_round()


def run_round_without(
    server: Server, clients: dict[int, Any], dead: Collection[int], stage: str = "sum"
) -> RoundRecord:
    """A round in which some clients do not answer the messages of a stage: keys, sum or shares."""

    def exchange(current: str, requests: dict[int, Any]) -> None:
        for number, message in requests.items():
            if current != stage or number not in dead:
                server.receive(clients[number].answer(message))

    exchange("keys", server.request_keys())
    exchange("sum", server.open_round())
    exchange("shares", server.fix_survivors())
    return server.close_round()


class Killed(RuntimeError):
    """The server died."""


def kill_server(
    patch: pytest.MonkeyPatch, method: str, number: int, *, before: bool = False
) -> None:
    """Let servers die before or after a method in the round of a number."""
    work = getattr(Server, method)

    def die(server: Server) -> Any:
        if before and server.round == number:
            raise Killed
        result = work(server)
        if server.next_round == number + 1:
            raise Killed
        return result

    patch.setattr(Server, method, die)


def vector(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors.values()])
