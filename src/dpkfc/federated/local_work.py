"""The work of a client in a round.

    LocalGradient   one clipped sum of per-example gradients; a client-level model clips the mean
                    gradient as one
    LocalSteps      K steps of SGD, and the change of the parameters (FedAvg)

No client divides its sum by the number of its records. Hence each record has the same weight
relative to the noise, whatever the number of records of each client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dpkfc._checks import check_integer, check_positive
from dpkfc.federated.privacy_models import Description, PrivacyModel


@runtime_checkable
class LocalWork(Protocol):
    """A client's work in a round; most is one release of bound C under any privacy model.

    Attributes:
        name: for plans and privacy cards.
        counts: what the sum is over: "examples" or "clients".
    """

    name: str = ""
    counts: str = "clients"

    def describe(self) -> Description:
        """Return plain values that say all that decides what is released."""
        return {"name": self.name, **vars(self)}

    def releases(self, privacy: PrivacyModel) -> int:
        """Return the number of releases of one round."""
        return 1

    def check(self, privacy: PrivacyModel) -> None:
        """Refuse a privacy model under which this work has no bound.

        Raises:
            ValueError: with the reason and the fix.
        """


@dataclass(frozen=True)
class LocalGradient(LocalWork):
    """One clipped sum a round, over all records or a Poisson sample (DP-FedGD, DP-KFC).

    Under a client-level model the gradient of the mean loss over the client's records is clipped as
    one.
    """

    name = "gradient"
    counts = "examples"


@dataclass(frozen=True)
class LocalSteps(LocalWork):
    """K local steps; a client sends θ₀ − θ_K.

    Client-level: plain SGD on all records, the change clipped to C. Example-level: K steps of
    DP-SGD on Poisson samples. Each step is a release with the whole noise, so T rounds cost K T
    releases. These steps run under `PerUpload` only, because a client's own steps do not contain
    the noise of other clients.

    Attributes:
        steps: K >= 1.
        learning_rate: of the local steps, > 0.

    Raises:
        ValueError: a value outside its range, by name.
    """

    steps: int = 5
    learning_rate: float = 0.1
    name = "steps"

    def __post_init__(self) -> None:
        check_integer(f"steps of {type(self).__name__}", self.steps, 1)
        check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def releases(self, privacy: PrivacyModel) -> int:
        """Return 1 for a change that is clipped as a whole, K for steps that are private each."""
        return 1 if privacy.unit == "client" else self.steps

    def check(self, privacy: PrivacyModel) -> None:
        """Refuse example-level models that share the noise: each step needs the whole noise.

        Raises:
            ValueError: an example-level model that shares the noise between clients.
        """
        if privacy.unit == "example" and not privacy.has_full_noise:
            raise ValueError(
                f"{type(self).__name__} depend on a client's own last step, which no noise of other"
                " clients covers; use PerUpload(), ClientLevel() or LocalGradient()"
            )
