"""Small federated worlds in float64, shared by the tests of this folder."""

import copy

import torch
from torch import nn

from dpkfc.federated import FederatedConfig, Server, make_clients
from dpkfc.federated.partition import iid, parts
from tests.sessions import cross_entropy as loss_fn

CLIENTS, FEATURES, CLASSES, RECORDS = 4, 5, 3, 24


def head(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(FEATURES, CLASSES).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def records(count=RECORDS, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def datasets(data=None, clients=CLIENTS):
    data = data or records()
    return parts(data, iid(len(data[0]), clients))


def plan_of(noise=1.0, **options):
    settings = {
        "clients": CLIENTS,
        "rounds": 3,
        "expected_records": RECORDS,
        "max_grad_norm": 0.5,
        "test_mode_seed": 7,
    }
    return FederatedConfig(**{**settings, **options}).with_noise(noise, 1e-3)


def world(plan, data=None, model=None, **options):
    """A server with enrolled clients."""
    model = head() if model is None else model
    server = Server(plan, model, **options)
    data = datasets(clients=plan.config.clients) if data is None else data
    clients = {c.number: c for c in make_clients(plan, copy.deepcopy(model), loss_fn, data)}
    for client in clients.values():
        assert server.enroll(client.hello())
    return server, clients


def open_round(server, clients):
    """The messages of the next round, after the clients have sent keys where the plan masks
    messages.
    """
    for number, message in server.request_keys().items():
        assert server.receive(clients[number].answer(message))
    return server.open_round()


def run_round_without(server, clients, dead, stage="sum"):
    """A round in which some clients do not answer the messages of a stage: keys, sum or shares."""

    def exchange(current, requests):
        for number, message in requests.items():
            if current != stage or number not in dead:
                server.receive(clients[number].answer(message))

    exchange("keys", server.request_keys())
    exchange("sum", server.open_round())
    exchange("shares", server.fix_survivors())
    return server.close_round()


class Killed(RuntimeError):
    """The server died."""


def kill_server(patch, method, number, *, before=False):
    """Let servers die before or after a method in the round of a number."""
    work = getattr(Server, method)

    def die(server):
        if before and server.round == number:
            raise Killed
        result = work(server)
        if server.next_round == number + 1:
            raise Killed
        return result

    patch.setattr(Server, method, die)


def vector(tensors):
    return torch.cat([x.detach().double().flatten() for x in tensors.values()])


def check_end(run, theta, tolerance=1e-12):
    """Check that a run ends at these weights."""
    assert float((theta - vector(run.server.parameters)).abs().max()) < tolerance
