"""A small app and engines without a network, shared by the tests of engines."""

from dpkfc import KFAC, FeatureNoise
from dpkfc.federated import (
    FedAvg,
    FedGD,
    LocalSteps,
    PerUpload,
    SecureAggregation,
    TrustedServer,
)
from dpkfc.federated.app import App
from dpkfc.federated.node import Node
from tests.federated.worlds import CLIENTS, datasets, head, loss_fn, plan_of

CASES = {
    "masked": {"privacy": SecureAggregation()},
    "shares": {"privacy": TrustedServer("clients")},
    "central": {"privacy": TrustedServer()},
    "kfac": {
        "privacy": TrustedServer("clients"),
        "preconditioner": KFAC(sides="both", probe=FeatureNoise(5), probe_size=32, every=8),
    },
    "fedavg": {"privacy": PerUpload(), "local": LocalSteps(2, 0.1), "rule": FedAvg()},
}


def _plan(settings):
    options = {"rule": FedGD(0.1), **CASES[settings["case"]]}
    return plan_of(
        noise=settings["noise"],
        rounds=settings["rounds"],
        min_survivors=settings["survivors"],
        **options,
    )


def _finish(run, settings, folder):
    (folder / "finished.txt").write_text(f"{len(run.records)} rounds", "utf-8")


APP = App(
    plan=_plan,
    model=lambda settings: head(),
    loss_fn=loss_fn,
    records=lambda number, settings: datasets()[number],
    defaults={"case": "shares", "rounds": 4, "noise": 1.0, "survivors": 3},
    evaluate=lambda model, settings: float(model.weight.detach().norm()),
    finish=_finish,
)


class Wires:
    """Nodes in this process behind the interface of an engine; node k holds client k unless said
    otherwise.

    A node is made anew for every message, as engines do that start a process for each.
    """

    def __init__(self, folder, settings, clients=None):
        self.folder, self.settings = folder, dict(settings)
        self.clients = dict(
            clients if clients is not None else {100 + i: i for i in range(CLIENTS)}
        )
        self.silent = set()
        self.sent = []

    def nodes(self):
        return sorted(self.clients)

    def node(self, number):
        return Node(APP, self.settings, self.clients[number], self.folder / "clients")

    def ask(self, requests, timeout):
        self.sent += requests.items()
        return [(n, self.node(n).answer(m)) for n, m in requests.items() if n not in self.silent]
