"""The protocol of a post-processing step: from a release and a state to a new release and state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import NamedTensors, Tensors

State = NamedTensors  # such as "v/conv1.weight"


@dataclass(frozen=True)
class LookaheadPoint:
    """A point at which the gradient of every example is taken, with its weight in the clipped sum.

    Attributes:
        lookahead: the point is θ + lookahead · d, with d the last change of the parameters.
        weight: factor of the gradient at this point; the weights of all points sum to 1.
    """

    lookahead: float
    weight: float


AT_PARAMETERS = (LookaheadPoint(0.0, 1.0),)


@runtime_checkable
class PostProcess(Protocol):
    """A step between release and optimizer. It sees released values only, so it costs no privacy.

    Inherit from it and write `describe` and `apply`. The defaults are for a linear map of one
    release at the parameters.

    Attributes:
        is_filter: whether the step averages over time; momentum behind a filter doubles the lag.
        is_optimizer_step: whether the step divides by second moments or norms. Its result is an
            update of the parameters, whose noise has no known variance.
        needs_variance: whether the step reads `Released.noise_variance`.
        momentum_allowed: whether the caller wants momentum behind this filter.
    """

    is_filter: bool = False
    is_optimizer_step: bool = False
    needs_variance: bool = False
    momentum_allowed: bool = False

    @property
    def evaluations(self) -> tuple[LookaheadPoint, ...] | None:
        """Return the points at which gradients are taken; None leaves them at the parameters.

        The points hold from the second step on. The first step has no last change.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return plain values, `name` among them, that determine the result."""
        raise NotImplementedError(f"{type(self).__name__} must define describe()")

    def apply(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the next release and state; neither argument is changed."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(released, state)")

    def apply_in_place(self, released: Released, state: State) -> tuple[Released, Tensors]:
        """Return the result of `apply`, which may use the memory of the arguments."""
        return self.apply(released, state)


def get_tensor(state: State, kind: str, name: str) -> Tensor | None:
    """Return the tensor of one kind for one parameter, None before the first step."""
    return state.get(f"{kind}/{name}")


def state_entries(kind: str, tensors: NamedTensors) -> Tensors:
    """Return the tensors of all parameters under the names that `get_tensor` reads."""
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def number_of_step(state: State) -> int:
    """Return the number of this step, from 1."""
    return 1 + int(state.get("count/", torch.zeros(())))
