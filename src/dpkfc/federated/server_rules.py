"""What the server does with a release, as values. All of it is post-processing: O(d) time, at most a few vectors of memory.

FedGD, FedAvg   θ ← θ − η ḡ
FedAvgM         m ← β m + ḡ,  θ ← θ − η m
FedSOFIM        θ ← θ − η (ρI + MMᵀ)⁻¹ ḡ            (`postprocess.SOFIM`; DP-FedSOFIM)
FedNew          θ ← θ − y                            (y is a Newton direction, not an iterate)
Scaffold        θ ← θ − η ḡ,  c ← c + Σ (c_i⁺ − c_i) / n
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpkfc.federated.options import FedNewStep, LocalWork, ScaffoldSteps
from dpkfc.postprocess.optimizers import SOFIM
from dpkfc.postprocess.protocol import PostProcess

State = Mapping[str, Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Two parts of the registered clients, both public.

    Attributes:
        divided: the divisor of a sum over clients, over n: the direction times it is the sum over n.
        took_part: survivors over n; the rate where clients were drawn secretly.
    """

    divided: float
    took_part: float


@runtime_checkable
class ServerRule(Protocol):
    """A server's step: a frozen value with functions from a direction and a state to the next of both."""

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:
        """Steps behind the plan's own filters."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain values that say all that decides the result."""
        ...

    def check(self, local: LocalWork) -> None:
        """Raise where the clients' work does not go with this rule.

        Raises:
            ValueError: with the fix.
        """
        ...

    def step(self, direction: Mapping[str, Tensor], state: State, shares: Shares) -> tuple[Tensors, Tensors]:
        """What is taken off the parameters, and the next state.

        Args:
            direction: of the release, after filters; nobody reads it afterwards.
            state: of the rule; empty before the first round.
            shares: of the registered clients that the direction is over, and that took part.
        """
        ...

    def broadcast(self, state: State) -> Tensors:
        """What clients need of the state, parameter name to tensor; empty for most rules."""
        ...


@dataclass(frozen=True)
class FedGD:
    """θ ← θ − η ḡ.

    Attributes:
        learning_rate: η > 0.

    Raises:
        ValueError: a value outside its range.
    """

    learning_rate: float = 0.1
    name = "fedgd"
    postprocess = ()

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(
                f"learning_rate of {type(self).__name__} must be positive and finite, got {self.learning_rate}"
            )

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.name, "learning_rate": self.learning_rate}

    def check(self, local: LocalWork) -> None:
        """Goes with every work but those that have a rule of their own."""
        _check_pair(type(self).__name__, local, None)

    def step(self, direction: Mapping[str, Tensor], state: State, shares: Shares) -> tuple[Tensors, Tensors]:
        """η ḡ."""
        return {name: self.learning_rate * g for name, g in direction.items()}, {}

    def broadcast(self, state: State) -> Tensors:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class FedAvg(FedGD):
    """θ ← θ − η · mean change, with η = 1 FedAvg itself; every client has the same, public weight."""

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
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of FedAvgM must lie in [0, 1), got {self.momentum}")

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {**super().describe(), "momentum": self.momentum}

    def step(self, direction: Mapping[str, Tensor], state: State, shares: Shares) -> tuple[Tensors, Tensors]:
        """η m."""
        held = {n: self.momentum * state[n] + g if n in state else g.clone() for n, g in direction.items()}
        return {name: self.learning_rate * m for name, m in held.items()}, held


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

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:  # type: ignore[override]
        """The preconditioned step."""
        return (SOFIM(self.rho, self.beta, self.direction, self.bias_correction, self.warmup),)

    def step(self, direction: Mapping[str, Tensor], state: State, shares: Shares) -> tuple[Tensors, Tensors]:
        """η times the preconditioned step, in its own memory: `SOFIM` gives tensors that nobody else holds."""
        return {name: g.mul_(self.learning_rate) for name, g in direction.items()}, {}


@dataclass(frozen=True)
class FedNew:
    """The outer step of FedNew: θ ← θ − y, y the mean of the clients' directions; y is sent out with the next round."""

    postprocess = ()

    def describe(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": "fednew"}

    def check(self, local: LocalWork) -> None:
        """Needs `FedNewStep`."""
        _check_pair("FedNew", local, FedNewStep)

    def step(self, direction: Mapping[str, Tensor], state: State, shares: Shares) -> tuple[Tensors, Tensors]:
        """The mean direction y."""
        y = {name: g.clone() for name, g in direction.items()}
        return y, dict(y)

    def broadcast(self, state: State) -> Tensors:
        """The last y."""
        return dict(state)


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD's server: θ ← θ − η · mean change, c ← c + Σ (change_i / (K η_local) − c) / n over the clients that took part.

    The sum is the release times its divisor, a public constant: where clients are drawn at a rate q, about n q of them are in it.
    The changes of the control variates follow from the released mean and the old c, so messages are FedAvg's.

    Attributes:
        local: the clients' work, whose K and η_local it needs.
    """

    local: ScaffoldSteps = ScaffoldSteps()
    name = "scaffold"

    def check(self, local: LocalWork) -> None:
        """Needs the very same `ScaffoldSteps`."""
        _check_pair("Scaffold", local, ScaffoldSteps)
        if local != self.local:
            raise ValueError(f"Scaffold was made for {self.local}, the clients do {local}; give both the same value")

    def step(self, direction: Mapping[str, Tensor], state: State, shares: Shares) -> tuple[Tensors, Tensors]:
        """The mean change; c moves by the part of the clients that took part."""
        per_step = shares.divided / (self.local.steps * self.local.learning_rate)
        c = {}
        for name, change in direction.items():
            old = state.get(name, torch.zeros_like(change))
            c[name] = old + change * per_step - shares.took_part * old
        return {name: self.learning_rate * g for name, g in direction.items()}, c

    def broadcast(self, state: State) -> Tensors:
        """The control variate c."""
        return dict(state)


def _check_pair(rule: str, local: LocalWork, needed: type | None) -> None:
    own = (FedNewStep, ScaffoldSteps)
    wrong = isinstance(local, own) if needed is None else not isinstance(local, needed)
    if wrong:
        fix = "give rule=FedNew() or rule=Scaffold(...)" if needed is None else f"give local={needed.__name__}(...)"
        raise ValueError(f"rule={rule} does not go with local={type(local).__name__}: {fix}")
