"""What the server does with a release.

All rules are post-processing in O(d) time and a few vectors of memory.

    FedGD, FedAvg   θ ← θ − η ḡ
    FedAvgM         m ← β m + ḡ,  θ ← θ − η m
    FedSOFIM        θ ← θ − η (ρI + MMᵀ)⁻¹ ḡ            (`postprocess.SOFIM`; DP-FedSOFIM)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from dpkfc._checks import check_in_range, check_positive
from dpkfc.federated.privacy_models import Description
from dpkfc.postprocess import SOFIM
from dpkfc.postprocess.protocol import PostProcess
from dpkfc.tensors import Tensors

Direction = Mapping[str, Tensor]
State = Mapping[str, Tensor]
# What is subtracted from the parameters, and the next state of a rule.
Update = tuple[Tensors, Tensors]


@runtime_checkable
class ServerRule(Protocol):
    """A server's step: maps a direction and a state to an update and the next state."""

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:
        """Return steps behind the plan's own filters."""
        return ()

    @abstractmethod
    def describe(self) -> Description:
        """Return plain values that say all that decides the result."""

    @abstractmethod
    def step(self, direction: Direction, state: State) -> Update:
        """Return what is subtracted from the parameters, and the next state.

        Args:
            direction: of the release, after filters; nobody reads it afterwards.
            state: of the rule; empty before the first round.
        """


@dataclass(frozen=True)
class FedGD(ServerRule):
    """θ ← θ − η ḡ.

    Attributes:
        learning_rate: η > 0.

    Raises:
        ValueError: a value outside its range.
    """

    learning_rate: float = 0.1
    name = "fedgd"

    def __post_init__(self) -> None:
        check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def describe(self) -> Description:
        """Return plain values."""
        return {"name": self.name, "learning_rate": self.learning_rate}

    def step(self, direction: Direction, state: State) -> Update:
        """Return η ḡ and no state."""
        return {name: self.learning_rate * g for name, g in direction.items()}, {}


@dataclass(frozen=True)
class FedAvg(FedGD):
    """θ ← θ − η · mean change (FedAvg for η = 1); every client has the same public weight."""

    learning_rate: float = 1.0
    name = "fedavg"


@dataclass(frozen=True)
class FedAvgM(FedGD):
    """FedAvg with momentum at the server: m ← β m + ḡ, θ ← θ − η m.

    Attributes:
        momentum: β in [0, 1).
    """

    learning_rate: float = 1.0
    momentum: float = 0.9
    name = "fedavgm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_in_range("momentum of FedAvgM", self.momentum, "[0, 1)")

    def describe(self) -> Description:
        """Return plain values."""
        return {**super().describe(), "momentum": self.momentum}

    def step(self, direction: Direction, state: State) -> Update:
        """Return η m and m."""
        momentum = {}
        for name, g in direction.items():
            momentum[name] = g.clone()
            if name in state:
                momentum[name] = self.momentum * state[name] + g
        update, _ = super().step(momentum, state)
        return update, momentum


@dataclass(frozen=True)
class FedSOFIM(FedGD):
    """The server step of DP-FedSOFIM: θ ← θ − η (ρI + MMᵀ)⁻¹ ḡ, M a moving average of releases.

    Attributes:
        rho, beta, direction, bias_correction, warmup: of `postprocess.SOFIM`.
    """

    learning_rate: float = 0.1
    rho: float = 0.5
    beta: float = 0.9
    direction: str = "gradient"
    bias_correction: bool = False
    warmup: int = 0
    name = "fedsofim"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.postprocess  # noqa: B018 - checks the values

    def describe(self) -> Description:
        """Return plain values, with the preconditioning step where it is not the default one."""
        described = super().describe()
        (step,) = self.postprocess
        return described if step == SOFIM() else {**described, "step": step.describe()}

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:
        """Return the preconditioning step."""
        return (SOFIM(self.rho, self.beta, self.direction, self.bias_correction, self.warmup),)
