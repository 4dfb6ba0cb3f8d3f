"""What the server does with a release, as values.

All rules are post-processing in O(d) time and a few vectors of memory.

FedGD, FedAvg   θ ← θ − η ḡ
FedAvgM         m ← β m + ḡ,  θ ← θ − η m
FedSOFIM        θ ← θ − η (ρI + MMᵀ)⁻¹ ḡ            (`postprocess.SOFIM`; DP-FedSOFIM)
FedNew          θ ← θ − y                            (y is a Newton direction, not an iterate)
Scaffold        θ ← θ − η ḡ,  c ← c + Σ (c_i⁺ − c_i) / n
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpkfc._checks import check_in_range, check_positive
from dpkfc.federated.options import FedNewStep, LocalWork, ScaffoldSteps
from dpkfc.postprocess.optimizers import SOFIM
from dpkfc.postprocess.protocol import PostProcess

State = Mapping[str, Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Two public fractions of the registered clients.

    Attributes:
        divisor_fraction: the divisor of a sum over clients, over n. The direction times this is the
            sum over n.
        survivor_fraction: survivors over n; the rate where clients were sampled secretly.
    """

    divisor_fraction: float
    survivor_fraction: float


@runtime_checkable
class ServerRule(Protocol):
    """A server's step: maps a direction and a state to an update and the next state."""

    @property
    def postprocess(self) -> tuple[PostProcess, ...]:
        """Return steps behind the plan's own filters."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return plain values that say all that decides the result."""
        ...

    def check(self, local: LocalWork) -> None:
        """Refuse work of clients that does not go with this rule.

        Raises:
            ValueError: with the fix.
        """
        ...

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return what is subtracted from the parameters, and the next state.

        Args:
            direction: of the release, after filters; nobody reads it afterwards.
            state: of the rule; empty before the first round.
            participation: fractions of the registered clients.
        """
        ...

    def broadcast(self, state: State) -> Tensors:
        """Return what clients need of the state, by parameter name; empty for most rules."""
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
        check_positive(f"learning_rate of {type(self).__name__}", self.learning_rate)

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, "learning_rate": self.learning_rate}

    def check(self, local: LocalWork) -> None:
        """Refuse work that has a rule of its own."""
        if isinstance(local, FedNewStep | ScaffoldSteps):
            raise ValueError(
                f"rule={type(self).__name__} does not go with local={type(local).__name__}: "
                "give rule=FedNew() or rule=Scaffold(...)"
            )

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η ḡ and no state."""
        return {name: self.learning_rate * g for name, g in direction.items()}, {}

    def broadcast(self, state: State) -> Tensors:
        """Return nothing."""
        return {}


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

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {**super().describe(), "momentum": self.momentum}

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η m and m."""
        momentum = {}
        for name, g in direction.items():
            momentum[name] = self.momentum * state[name] + g if name in state else g.clone()
        return {name: self.learning_rate * m for name, m in momentum.items()}, momentum


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
        """Return the preconditioning step."""
        return (SOFIM(self.rho, self.beta, self.direction, self.bias_correction, self.warmup),)

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η times the direction, in place: no other object holds the tensors of `SOFIM`."""
        return {name: g.mul_(self.learning_rate) for name, g in direction.items()}, {}


@dataclass(frozen=True)
class FedNew:
    """The outer step of FedNew: θ ← θ − y, y the mean of the clients' directions.

    The next round sends y to clients.
    """

    postprocess = ()

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": "fednew"}

    def check(self, local: LocalWork) -> None:
        """Refuse all work but `FedNewStep`."""
        _check_work("FedNew", local, FedNewStep)

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return the mean direction y, as update and as state."""
        y = {name: g.clone() for name, g in direction.items()}
        return y, dict(y)

    def broadcast(self, state: State) -> Tensors:
        """Return the last y."""
        return dict(state)


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD's server: θ ← θ − η · mean change, c ← c + Σ (change_i / (K η_local) − c) / n.

    The sum over the survivors is the release times its divisor, a public constant. Where clients
    are sampled at a rate q, about n q of them are in it. The changes of the control variates follow
    from the released mean and the old c, so messages are those of FedAvg.

    Attributes:
        local: the clients' work, whose K and η_local the rule needs.
    """

    local: ScaffoldSteps = ScaffoldSteps()
    name = "scaffold"

    def check(self, local: LocalWork) -> None:
        """Refuse all work but the same `ScaffoldSteps`."""
        _check_work("Scaffold", local, ScaffoldSteps)
        if local != self.local:
            raise ValueError(
                f"Scaffold was made for {self.local}, the clients do {local}; give both the same "
                "value"
            )

    def step(
        self, direction: Mapping[str, Tensor], state: State, participation: Participation
    ) -> tuple[Tensors, Tensors]:
        """Return η times the mean change, and c moved by the survivors."""
        per_step = participation.divisor_fraction / (self.local.steps * self.local.learning_rate)
        c = {}
        for name, change in direction.items():
            old = state.get(name, torch.zeros_like(change))
            c[name] = old + change * per_step - participation.survivor_fraction * old
        return {name: self.learning_rate * g for name, g in direction.items()}, c

    def broadcast(self, state: State) -> Tensors:
        """Return the control variate c."""
        return dict(state)


def _check_work(rule: str, local: LocalWork, needed: type) -> None:
    if not isinstance(local, needed):
        raise ValueError(
            f"rule={rule} does not go with local={type(local).__name__}: give "
            f"local={needed.__name__}(...)"
        )
