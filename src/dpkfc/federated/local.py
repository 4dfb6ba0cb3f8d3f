"""What a client does in a round, as values: which sum it forms, how that is bounded, and how many releases it costs.

    LocalGradient   one clipped sum of per-example gradients (a client-level model clips the mean gradient as one)
    LocalSteps      K steps of SGD, and the change of the parameters (FedAvg)
    ScaffoldSteps   the same, each step corrected by control variates (SCAFFOLD)
    FedNewStep      (H + (α + ρ) I)⁻¹ (g − λ + ρ y), all of it clipped as one (FedNew)

Every sum is un-normalised: no client divides by the number of its records, so that each record weighs the same against the
noise, whatever the sizes are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dpkfc.federated.trust import PrivacyModel

__all__ = ["FedNewStep", "LocalGradient", "LocalSteps", "LocalWork", "ScaffoldSteps"]


@runtime_checkable
class LocalWork(Protocol):
    """What a plan asks of a client's work."""

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides what is released."""
        ...

    def releases(self, privacy: PrivacyModel) -> int:
        """Releases of one round."""
        ...

    def check(self, privacy: PrivacyModel) -> None:
        """Raise where this work has no bound under a privacy model.

        Raises:
            ValueError: with the reason and the fix.
        """
        ...

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """How far one unit that joins or leaves moves the sum of a release."""
        ...

    @property
    def counts(self) -> str:
        """What the sum is over: "examples" or "clients"; the public divisor is the expected number of them."""
        ...


@dataclass(frozen=True)
class LocalGradient:
    """One clipped sum a round, over all records or a Poisson sample of them: DP-FedGD, DP-FedSOFIM, federated DP-KFC.

    Under a client-level model the gradient of the mean loss over the client's records is clipped as one.
    """

    counts = "examples"

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "gradient"}

    def releases(self, privacy: PrivacyModel) -> int:
        """One."""
        return 1

    def check(self, privacy: PrivacyModel) -> None:
        """It goes with every privacy model."""

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """One unit adds a vector of norm C at most."""
        return max_grad_norm


@dataclass(frozen=True)
class LocalSteps:
    """K local steps; what is sent is θ₀ − θ_K.

    Client-level: plain SGD on all records, the change clipped to C. Example-level: K steps of DP-SGD on Poisson samples, each a
    release with the whole noise of its own, so T rounds cost K T releases; under `PerUpload` only, because the noise of other
    clients is not in a client's own steps.

    Attributes:
        steps: K >= 1.
        learning_rate: of the local steps, > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    steps: int = 5
    learning_rate: float = 0.1
    counts = "clients"

    def __post_init__(self) -> None:
        _check_integer(f"steps of {type(self).__name__}", self.steps)
        _check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "steps", "steps": self.steps, "learning_rate": self.learning_rate}

    def releases(self, privacy: PrivacyModel) -> int:
        """One for a change that is clipped as a whole, K for steps that are private each."""
        return 1 if privacy.unit == "client" else self.steps

    def check(self, privacy: PrivacyModel) -> None:
        """Steps on single examples need the whole noise each.

        Raises:
            ValueError: an example-level model that shares the noise between clients.
        """
        if privacy.unit == "example" and not privacy.alone:
            raise ValueError(
                f"{type(self).__name__} under '{privacy.name}': a client's next local step depends on its own last one, which no "
                "noise of other clients covers. Use privacy=PerUpload(), ClientLevel(...), or local=LocalGradient()"
            )

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """One unit moves the change (client) or the clipped sum of a step (example) by C at most."""
        return max_grad_norm


@dataclass(frozen=True)
class ScaffoldSteps(LocalSteps):
    """K local steps along g − c_i + c, then c_i ← c_i − c + change / (K η), the change as it is sent (SCAFFOLD, option II).

    Under a client-level model that is the clipped change. Example-level steps take noisy gradients, and c_i is the mean of the
    last K of them: it is post-processing, and the sensitivity stays C.
    """

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {**super().describe(), "name": "scaffold"}


@dataclass(frozen=True)
class FedNewStep:
    """One pass of FedNew's ADMM: clip_C((H_i + (α + ρ) I)⁻¹ (g_i − λ_i + ρ y)), then λ_i ← λ_i + ρ (ŷ_i − y).

    H_i is the empirical Fisher matrix of the client's own records. All of the contribution is clipped as one: a client that
    joins moves the sum by C, an example (added or replaced) by 2 C, since it turns one vector of norm C into another.
    Source: Elgabli et al. 2022 (FedNew); the server steps θ ← θ − y.

    Attributes:
        alpha: α > 0.
        rho: ρ > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    alpha: float = 1.0
    rho: float = 0.1
    counts = "clients"

    def __post_init__(self) -> None:
        _check_positive("alpha of FedNewStep", self.alpha)
        _check_positive("rho of FedNewStep", self.rho)

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "fednew", "alpha": self.alpha, "rho": self.rho}

    def releases(self, privacy: PrivacyModel) -> int:
        """One."""
        return 1

    def check(self, privacy: PrivacyModel) -> None:
        """It goes with every privacy model."""

    def bound(self, max_grad_norm: float, privacy: PrivacyModel) -> float:
        """C for a client, 2 C for an example."""
        return max_grad_norm if privacy.unit == "client" else 2 * max_grad_norm


def _check_integer(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_positive(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
