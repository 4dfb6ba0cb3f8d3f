"""One cell of the federated study: a run as a value with a stable hash, and its execution by `dpkfc.federated.federate`."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.curvature.preconditioner import KFAC
from dpkfc.curvature.probes import FeatureNoise
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.federated import FedAvgM, FederatedConfig, FedGD, FedSOFIM, TrustedServer, federate
from dpkfc.federated.partition import dirichlet, iid, parts
from dpkfc.recipes.models import seeded
from dpkfc.studies.cell import Plain, hardware
from dpkfc.studies.errors import StudyError
from dpkfc.studies.federated.features import WIDTH, Features

__all__ = ["CLIENTS", "DELTA", "RULES", "ROUNDS", "FederatedRun", "run_cell"]

FORMAT = 1  # of a row; raised when runs of equal settings come to other results than before
CLIENTS, ROUNDS, DELTA = 20, 70, 1e-5
IID = "iid"
_EVERY = 10  # rounds between two figures of a curve


@dataclass(frozen=True, kw_only=True)
class FederatedRun:
    """One private federated run: example-level privacy with a trusted server, replace-one, all clients in every round.

    Attributes:
        task: name of the features.
        rule: in `RULES`.
        settings: sorted pairs: `rate` (what a step of a rule with small momentum is multiplied by, η or η/ρ), `clip`, and those
            that the rule has.
        epsilon: target; δ is `DELTA`.
        partition: "iid" or "dirichlet-ALPHA".
        clients: n. With a trusted server and sums that no client divides, the law of the result depends neither on n nor on the
            partition.
        rounds: T.
        seed: public seed of initial weights and partition; noise is never seeded.
        evaluate_on: "validation" or "test"; for the latter the validation examples are trained on.
    """

    task: str
    rule: str
    settings: tuple[tuple[str, Plain], ...]
    epsilon: float
    partition: str = IID
    clients: int = CLIENTS
    rounds: int = ROUNDS
    seed: int = 0
    evaluate_on: str = "test"

    def describe(self) -> dict[str, Any]:
        """Plain values that decide the result."""
        return {**asdict(self), "settings": dict(self.settings)}

    @functools.cached_property
    def hash(self) -> str:
        """Sixteen hexadecimal digits of a SHA-256."""
        content = {"format": FORMAT, "delta": DELTA, **self.describe()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _fedgd(s: Mapping[str, Any], features: Features) -> dict[str, Any]:
    return {"rule": FedGD(s["rate"])}


def _fedavgm(s: Mapping[str, Any], features: Features) -> dict[str, Any]:
    """The rate of the sum of all later steps: η = rate · (1 − β)."""
    return {"rule": FedAvgM(s["rate"] * (1 - s["beta"]), s["beta"])}


def _sofim(s: Mapping[str, Any], features: Features) -> dict[str, Any]:
    return {"rule": FedSOFIM(s["rate"] * s["rho"], s["rho"], s["beta"])}


def _sofim_momentum(s: Mapping[str, Any], features: Features) -> dict[str, Any]:
    return {"rule": FedSOFIM(s["rate"] * s["rho"], s["rho"], s["beta"], direction="momentum")}


def _kfc(s: Mapping[str, Any], features: Features) -> dict[str, Any]:
    """Whitened by curvature on noise that has the density of the public features, and mean and deviation of their entries."""
    found = features.public[features.public > 0]
    mean, std, density = (round(float(x), 4) for x in (found.mean(), found.std(), found.numel() / features.public.numel()))
    probe = FeatureNoise(WIDTH, mean=mean, std=std, density=density)
    return {"rule": FedGD(s["rate"]), "preconditioner": KFAC(probe=probe, damping=s["damping"], every=ROUNDS, sides="both")}


RULES = {
    "fedgd": _fedgd, "fedavgm": _fedavgm, "sofim": _sofim, "sofim-momentum": _sofim_momentum, "dp-kfc": _kfc,
}  # fmt: skip


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run_cell(run: FederatedRun, features: Features) -> dict[str, Any]:
    """Train a linear head, and what it came to as plain values.

    Raises:
        StudyError: an unknown rule or partition.
    """
    if run.rule not in RULES:
        raise StudyError(f"unknown rule {run.rule!r}; choose one of {', '.join(RULES)}")
    (x, y), judged = features.train, features.validation
    if run.evaluate_on == "test":
        x, y, judged = torch.cat([x, features.validation[0]]), torch.cat([y, features.validation[1]]), features.test
    settings = dict(run.settings)
    plan = FederatedConfig(
        clients=run.clients, rounds=run.rounds, expected_records=len(y), privacy=TrustedServer(), adjacency=REPLACE_ONE,
        max_grad_norm=float(settings["clip"]), **RULES[run.rule](settings, features),
    ).calibrate(run.epsilon, DELTA)  # fmt: skip
    head = seeded(lambda: nn.Linear(x.shape[1], features.classes), run.seed)
    done = federate(
        plan, head, loss_fn, parts((x, y), _pieces(run, y)), evaluate=lambda model: _accuracy(model, *judged), every=_EVERY,
    )  # fmt: skip
    return {
        "run": run.describe(), "hash": run.hash, "accuracy": done.history[-1][2], "measured_on": run.evaluate_on,
        "curve": [round(score, 4) for _, _, score in done.history],
        "epsilon": done.server.epsilon, "target_epsilon": run.epsilon, "delta": DELTA, "noise_multiplier": plan.noise_multiplier,
        "neighbouring_relation": plan.config.adjacency,
        "steps": len(done.records), "dataset_size": len(y), "features": features.origin,
        "seconds": round(done.seconds, 1), "hardware": hardware(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip


def _pieces(run: FederatedRun, labels: Tensor) -> Any:
    if run.partition == IID:
        return iid(len(labels), run.clients, run.seed)
    kind, _, alpha = run.partition.partition("-")
    if kind != "dirichlet":
        raise StudyError(f"unknown partition {run.partition!r}; write iid or dirichlet-0.5")
    return dirichlet(labels.numpy(), run.clients, float(alpha), run.seed)


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
