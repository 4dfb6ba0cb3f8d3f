"""Federated private training without an engine: clients, server, privacy models and a runner.

Nothing here knows a network. An engine (Flower, say) carries the messages of `messages` between
`Client.answer` and `Server`.
"""

from __future__ import annotations

from dpkfc.federated.client import Client, LocalModel
from dpkfc.federated.messages import TooFewKeys
from dpkfc.federated.plan import (
    ClientLevel,
    FedAvg,
    FedAvgM,
    FederatedConfig,
    FederatedPlan,
    FedGD,
    FedSOFIM,
    LocalGradient,
    LocalSteps,
    PerUpload,
    SecureAggregation,
    TrustedServer,
)
from dpkfc.federated.server import RoundRecord, Server
from dpkfc.federated.simulation import Run, federate, make_clients

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
    "Run",
    "SecureAggregation",
    "Server",
    "TooFewKeys",
    "TrustedServer",
    "federate",
    "make_clients",
]
