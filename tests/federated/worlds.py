"""Small federated worlds in float64, shared by the tests of this folder."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.federated import FederatedConfig, FederatedPlan, Server, make_clients
from dpkfc.federated.simulation import iid, parts

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


def vector(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors.values()])
