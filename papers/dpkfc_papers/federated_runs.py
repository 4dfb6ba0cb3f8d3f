"""One run of the study is a value with a stable hash, executed by `dpkfc.federated.federate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.app.models import build_seeded
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.tuning.runs import Plain, StudyError, hardware
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.data.sampling import REPLACE_ONE
from dpkfc.federated.partition import Partition, dirichlet, iid, parts
from dpkfc.federated.plan import FederatedConfig, FederatedPlan
from dpkfc.federated.privacy_models import TrustedServer
from dpkfc.federated.server_rules import FedAvgM, FedGD, FedSOFIM
from dpkfc.federated.simulation import federate
from dpkfc_papers.federated_features import WIDTH, Features
from dpkfc_papers.store import StudyRun, hash_values

# Plain values of a run.
Record = dict[str, Any]
Settings = Mapping[str, Plain]
# Format of a record; raise it when runs of equal settings give different results than before.
FORMAT = 1
CLIENTS, ROUNDS, DELTA = 20, 70, 1e-5
IID = "iid"
# Rounds between two points of a curve.
_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class FederatedRun(StudyRun):
    """One private run: example-level, trusted server, replace-one, all clients in every round.

    Attributes:
        task: name of the features.
        rule: in `RULES`.
        settings: sorted pairs: `rate` (the factor of a step of a rule with small momentum, η or
            η/ρ), `clip`, and the settings of the rule.
        epsilon: target; δ is `DELTA`.
        partition: "iid" or "dirichlet-ALPHA".
        clients: n. With a trusted server and sums that no client divides, the distribution of the
            result depends neither on n nor on the partition.
        rounds: T.
        seed: public seed of initial weights and partition; noise is never seeded.
        evaluate_on: "validation" or "test"; runs on the test set also train on the validation
            examples.
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

    def describe(self) -> Record:
        """Return plain values that decide the result."""
        return {**super().describe(), "settings": dict(self.settings)}

    @property
    def hash(self) -> str:
        """Return sixteen hexadecimal digits of a SHA-256."""
        return hash_values({"format": FORMAT, "delta": DELTA, **self.describe()})


def _kfc(s: Mapping[str, Any], features: Features) -> Record:
    """Return DP-KFC whose probe has density, mean and deviation of the public features."""
    positive = features.public[features.public > 0]
    density = positive.numel() / features.public.numel()
    probe = FeatureNoise(
        WIDTH,
        mean=round(float(positive.mean()), 4),
        std=round(float(positive.std()), 4),
        density=round(density, 4),
    )
    preconditioner = KFAC(probe=probe, damping=s["damping"], every=ROUNDS, sides="both")
    return {"rule": FedGD(s["rate"]), "preconditioner": preconditioner}


RULES: Mapping[str, Callable[[Mapping[str, Any], Features], Record]] = {
    "fedgd": lambda s, _: {"rule": FedGD(s["rate"])},
    # Later steps sum up to the rate: η = rate · (1 − β).
    "fedavgm": lambda s, _: {
        "rule": FedAvgM(s["rate"] * (1 - s["beta"]), s["beta"]),
    },
    "sofim": lambda s, _: {
        "rule": FedSOFIM(s["rate"] * s["rho"], s["rho"], s["beta"]),
    },
    "sofim-momentum": lambda s, _: {
        "rule": FedSOFIM(s["rate"] * s["rho"], s["rho"], s["beta"], direction="momentum")
    },
    "dp-kfc": _kfc,
}


def execute_run(
    run: FederatedRun, features: Features, build: Callable[[int, int], nn.Module] = nn.Linear
) -> Record:
    """Train a model, and return the record of the run as plain values.

    Args:
        run: its settings.
        features: its data; of a whole network, images.
        build: makes the model from the sizes of axis 1 of an input and of the output.

    Raises:
        StudyError: an unknown rule or partition.
    """
    if run.rule not in RULES:
        raise StudyError(f"unknown rule {run.rule!r}; choose one of {', '.join(RULES)}")
    (_, y), _ = features.choose_rows(run.evaluate_on)
    settings = dict(run.settings)
    config = FederatedConfig(
        clients=run.clients,
        rounds=run.rounds,
        expected_records=len(y),
        privacy=TrustedServer(),
        adjacency=REPLACE_ONE,
        max_grad_norm=float(settings["clip"]),
        **RULES[run.rule](settings, features),
    )
    plan = config.calibrate(run.epsilon, DELTA)
    return train(run, plan, features, _partition(run, y), build)


def train(
    run: Any,
    plan: FederatedPlan,
    features: Features,
    partition: Partition,
    build: Callable[[int, int], nn.Module] = nn.Linear,
) -> Record:
    """Train a model by a plan, and return the record of the run as plain values.

    Args:
        run: with a seed, and the examples that it is evaluated on.
        plan: of the run.
        features: its data.
        partition: of the training examples.
        build: as of `execute_run`.
    """
    (x, y), evaluation = features.choose_rows(run.evaluate_on)
    result = federate(
        plan,
        build_seeded(lambda: build(x.shape[1], features.classes), run.seed),
        cross_entropy,
        parts((x, y), partition),
        evaluate=lambda model: measure_accuracy(model, *evaluation),
        every=_EVERY,
    )
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": result.history[-1][2],
        "measured_on": run.evaluate_on,
        "curve": [round(score, 4) for _, _, score in result.history],
        "epsilon": result.server.epsilon,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "neighbouring_relation": plan.config.adjacency,
        "steps": len(result.records),
        "dataset_size": len(y),
        "features": features.origin,
        "seconds": round(result.seconds, 1),
        "hardware": hardware(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _partition(run: FederatedRun, labels: Tensor) -> Partition:
    if run.partition == IID:
        return iid(len(labels), run.clients, run.seed)
    kind, _, alpha = run.partition.partition("-")
    if kind != "dirichlet":
        raise StudyError(f"unknown partition {run.partition!r}; write iid or dirichlet-0.5")
    return dirichlet(labels.numpy(), run.clients, float(alpha), run.seed)


def measure_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the fraction of right classes."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
