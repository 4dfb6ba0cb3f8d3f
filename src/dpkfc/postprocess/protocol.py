"""The shape of a post-processing step: a frozen value with a function from a release and a state to the next of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dpkfc.privacy.mechanism import Released

State = Mapping[str, Tensor]  # flat names such as "v/conv1.weight"; empty before the first step


@dataclass(frozen=True)
class Evaluation:
    """One point at which every example's gradient is taken, and what it counts in the combination that is clipped.

    Attributes:
        ahead: the point is θ + ahead · d, with d the last change of the parameters; 0 is θ itself.
        weight: factor of the gradient there; those of all points sum to 1.
    """

    ahead: float
    weight: float


AT_PARAMETERS = (Evaluation(0.0, 1.0),)


@runtime_checkable
class PostProcess(Protocol):
    """A step between release and optimizer. It sees released values only, so it costs no privacy.

    Attributes:
        smooths: it averages over time (a filter); momentum behind it doubles the lag.
        adaptive: it divides by second moments or norms: the result is a step, and its noise has no known variance.
        needs_variance: it reads `Released.noise_variance`, which must be known where it stands.
        momentum_allowed: for a filter, that the caller wants momentum behind it.
    """

    @property
    def smooths(self) -> bool: ...  # noqa: D102
    @property
    def adaptive(self) -> bool: ...  # noqa: D102
    @property
    def needs_variance(self) -> bool: ...  # noqa: D102
    @property
    def momentum_allowed(self) -> bool: ...  # noqa: D102

    def describe(self) -> dict[str, Any]:
        """Plain values, `name` among them, that say all that decides the result."""
        ...

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """The next value and state; neither argument is changed."""
        ...


@runtime_checkable
class LookAhead(Protocol):
    """A post-processing step that also decides where gradients are taken (DiSK)."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The points, from the second step on; the first step has no last change and takes θ alone."""
        ...


def entry(state: State, kind: str, name: str) -> Tensor | None:
    """The tensor of one kind for one parameter, None before the first step."""
    return state.get(f"{kind}/{name}")


def put(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all parameters under the names `entry` looks for."""
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
