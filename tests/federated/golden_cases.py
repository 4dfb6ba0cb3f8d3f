"""Federated runs in test mode whose results are stored in tests/golden/golden.json."""

import copy

from dpkfc import KFAC, FeatureNoise
from dpkfc.federated import (
    Client,
    ClientLevel,
    FedAvgM,
    FedSOFIM,
    LocalModel,
    SecureAggregation,
    TrustedServer,
    federate,
)
from dpkfc.postprocess import EMA
from tests.federated.worlds import datasets, head, loss_fn, plan_of

GOLDEN_CASES = {
    "masked, DP-KFC and SOFIM": {
        "privacy": SecureAggregation(),
        "rule": FedSOFIM(0.2),
        "preconditioner": KFAC(sides="both", probe=FeatureNoise(5), probe_size=32, every=2),
        "postprocess": (EMA(0.5),),
    },
    "trusted server, sampled examples": {
        "privacy": TrustedServer(),
        "rule": FedAvgM(0.1),
        "example_rate": 0.5,
        "max_physical_batch_size": 4,
    },
    "client level, sampled clients": {"privacy": ClientLevel(TrustedServer()), "client_rate": 0.6},
}


def run_case(name, folder):
    """Run one case in this process, with the ledgers of the server and of the clients in a
    folder.
    """
    plan = plan_of(**GOLDEN_CASES[name])
    model = head()
    local = LocalModel(plan, copy.deepcopy(model), loss_fn)
    clients = []
    for number, records in enumerate(datasets()):
        clients.append(
            Client(number, plan, local, records, ledger_path=folder / f"client-{number}.jsonl")
        )
    return federate(
        plan, model, loss_fn, datasets(), clients=clients, ledger_path=folder / "server.jsonl"
    )
