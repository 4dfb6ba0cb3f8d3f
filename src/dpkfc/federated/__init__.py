"""Federated private training without an engine: clients, server, privacy models and a runner.

Nothing here knows a network. An engine (Flower, say) carries the messages of `messages` between
`Client.answer` and `Server`.
"""

from __future__ import annotations

from dpkfc.federated.client import Client
from dpkfc.federated.key_exchange import TooFewKeys
from dpkfc.federated.local_model import LocalModel
from dpkfc.federated.local_work import LocalGradient, LocalSteps
from dpkfc.federated.plan import FederatedConfig, FederatedPlan
from dpkfc.federated.privacy_models import ClientLevel, PerUpload, SecureAggregation, TrustedServer
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.runs import SimulatedRun
from dpkfc.federated.server import Server
from dpkfc.federated.server_rules import FedAvg, FedAvgM, FedGD, FedSOFIM
from dpkfc.federated.simulation import federate, make_clients

__all__ = [
    "Client",
    "ClientLevel",
    "FedAvg",
    "FedAvgM",
    "FedGD",
    "FedSOFIM",
    "FederatedConfig",
    "FederatedPlan",
    "LocalGradient",
    "LocalModel",
    "LocalSteps",
    "PerUpload",
    "RoundRecord",
    "SimulatedRun",
    "SecureAggregation",
    "Server",
    "TooFewKeys",
    "TrustedServer",
    "federate",
    "make_clients",
]
