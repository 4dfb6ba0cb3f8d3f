"""Federated private training without an engine: clients, a server, privacy models, and a runner inside one process.

Nothing here knows a network. An engine (Flower, say) carries the messages of `messages` between `Client.answer` and `Server`.
"""

from __future__ import annotations

from dpkfc.federated.client import Client
from dpkfc.federated.config import FederatedConfig
from dpkfc.federated.exchange import TooFewKeys
from dpkfc.federated.local import FedNewStep, LocalGradient, LocalSteps, ScaffoldSteps
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.rules import FedAvg, FedAvgM, FedGD, FedNew, FedSOFIM, Scaffold
from dpkfc.federated.runner import Run, federate, make_clients
from dpkfc.federated.server import Server
from dpkfc.federated.trust import ClientLevel, PerUpload, SecureAggregation, TrustedServer
from dpkfc.federated.work import LocalModel

__all__ = [
    "Client",
    "ClientLevel",
    "FedAvg",
    "FedAvgM",
    "FedGD",
    "FedNew",
    "FedNewStep",
    "FedSOFIM",
    "FederatedConfig",
    "FederatedPlan",
    "LocalGradient",
    "LocalModel",
    "LocalSteps",
    "PerUpload",
    "RoundRecord",
    "Run",
    "Scaffold",
    "ScaffoldSteps",
    "SecureAggregation",
    "Server",
    "TooFewKeys",
    "TrustedServer",
    "federate",
    "make_clients",
]
