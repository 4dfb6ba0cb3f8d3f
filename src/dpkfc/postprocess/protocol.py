"""The protocol of a post-processing step, and a base class with its defaults.

A step is a frozen value that maps a release and a state to the next release and the next state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dpkfc.privacy.mechanism import Released

State = Mapping[str, Tensor]  # such as "v/conv1.weight"


@dataclass(frozen=True)
class EvaluationPoint:
    """A point at which the gradient of every example is taken, with its weight in the clipped sum.

    Attributes:
        lookahead: the point is θ + lookahead · d, with d the last change of the parameters.
        weight: factor of the gradient at this point; the weights of all points sum to 1.
    """

    lookahead: float
    weight: float


AT_PARAMETERS = (EvaluationPoint(0.0, 1.0),)


@runtime_checkable
class PostProcess(Protocol):
    """A step between release and optimizer. It sees released values only, so it costs no privacy.

    Inherit from `PostProcessBase` for the defaults, and write `describe` and `apply`.
    """

    @property
    def is_filter(self) -> bool:
        """Return whether the step averages over time; momentum behind a filter doubles the lag."""
        ...

    @property
    def is_optimizer_step(self) -> bool:
        """Return whether the step divides by second moments or norms.

        Its result is an update of the parameters, whose noise has no known variance.
        """
        ...

    @property
    def needs_variance(self) -> bool:
        """Return whether the step reads `Released.noise_variance`."""
        ...

    @property
    def momentum_allowed(self) -> bool:
        """Return whether the caller wants momentum behind this filter."""
        ...

    @property
    def evaluations(self) -> tuple[EvaluationPoint, ...] | None:
        """Return the points at which gradients are taken; None leaves them at the parameters.

        The points hold from the second step on. The first step has no last change.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return plain values, `name` among them, that determine the result."""
        ...

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """Return the next release and state; neither argument is changed."""
        ...

    def apply_in_place(
        self, released: Released, state: State
    ) -> tuple[Released, dict[str, Tensor]]:
        """Return the result of `apply`, which may use the memory of the arguments."""
        ...


class PostProcessBase:
    """Defaults of a post-processing step: a linear map of one release at the parameters."""

    is_filter: bool = False
    is_optimizer_step: bool = False
    needs_variance: bool = False
    momentum_allowed: bool = False

    @property
    def evaluations(self) -> tuple[EvaluationPoint, ...] | None:
        """Return None: gradients are taken at the parameters."""
        return None

    def apply(self, released: Released, state: State) -> tuple[Released, dict[str, Tensor]]:
        """Return the next release and state; neither argument is changed."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(released, state)")

    def apply_in_place(
        self, released: Released, state: State
    ) -> tuple[Released, dict[str, Tensor]]:
        """Return the result of `apply`."""
        return self.apply(released, state)


def get_tensor(state: State, kind: str, name: str) -> Tensor | None:
    """Return the tensor of one kind for one parameter, None before the first step."""
    return state.get(f"{kind}/{name}")


def state_entries(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all parameters under the names that `get_tensor` reads."""
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
