"""Turn a noisy release into the optimizer's gradient: the read-out, then each step in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dpkfc._checks import check_one_of
from dpkfc.gradients.evaluation_points import AT_MODEL_PARAMETERS, EvaluationPoint
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Metric
from dpkfc.postprocess.padding import clear_padding
from dpkfc.postprocess.protocol import AT_PARAMETERS, LookaheadPoint, PostProcess, State
from dpkfc.postprocess.readout import READOUTS, CachedReadout, read_out
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy.mechanism import Released
from dpkfc.tensors import NamedTensors, Tensors

# Options of torch's optimizers that divide by second moments or signs, and of the line search.
_ADAPTIVE_OPTIONS = {
    "betas",
    "alpha",
    "lr_decay",
    "rho",
    "etas",
    "beta2_decay",
    "ns_steps",
    "ns_coefficients",
    "max_iter",
}


class PostprocessPipeline:
    """The post-processing of one run, with the states of its steps.

    Args:
        steps: in order.
        readout: whitened, natural or inverse.
        is_correlated: whether the noise of following releases is correlated.

    Attributes:
        has_lookahead: whether gradients are taken anywhere else than at the parameters alone.

    Raises:
        ValueError: steps that cannot be combined, with the reason.
    """

    def __init__(
        self,
        steps: Sequence[PostProcess],
        readout: str = "whitened",
        is_correlated: bool = False,
    ) -> None:
        check_pipeline(steps, readout, is_correlated)
        self._most_filters = _most_filters(is_correlated)
        self._steps = tuple(steps)
        self._readout = readout
        self._states: list[State] = [{} for _ in steps]
        self._cache: dict[str, CachedReadout] = {}
        self._previous_parameters: Tensors | None = None
        self._points: tuple[LookaheadPoint, ...] = AT_PARAMETERS
        for step in steps:
            if step.evaluations is not None:
                self._points = step.evaluations
        self.has_lookahead = self._points != AT_PARAMETERS

    def evaluation_points(
        self, parameters: NamedTensors, *, for_later_steps: bool = False
    ) -> list[EvaluationPoint]:
        """Return the points at which this step takes gradients.

        Before the first change of the parameters all points are the same, and the step takes one.

        Args:
            parameters: θ, by name.
            for_later_steps: return the points of all steps but the first.
        """
        previous = self._previous_parameters
        if previous is None and not for_later_steps:
            return [AT_MODEL_PARAMETERS]
        points = []
        for point in self._points:
            moved = None
            if point.lookahead and previous is not None:
                moved = _extrapolate(parameters, previous, point.lookahead)
            points.append(EvaluationPoint(moved, point.weight))
        return points

    def apply(
        self,
        released: Released,
        metric: Metric,
        layers: Sequence[Layer],
        *,
        in_place: bool = False,
    ) -> Released:
        """Return the gradient for the optimizer, zero in rows of padding.

        Args:
            released: of this step.
            metric: the metric of the release.
            layers: of the model.
            in_place: allow the result to use the memory of the release.
        """
        states: list[State] = []
        filters = 0
        with torch.no_grad():
            value = read_out(released, metric, layers, self._readout, self._cache)
            for i, step in enumerate(self._steps):
                apply = step.apply_in_place if in_place and i == 0 else step.apply
                value, state = apply(value, self._states[i])
                states.append(state)
                filters += step.is_filter
                if filters > self._most_filters:
                    # A filter needs noise that is independent between steps. The noise behind a
                    # filter is not, nor is correlated noise.
                    value = replace(value, noise_variance=None)
        self._states = states
        return clear_padding(value, layers)

    def record_parameters(self, parameters: NamedTensors) -> None:
        """Copy the parameters before the optimizer changes them, if the next step looks ahead."""
        if self.has_lookahead:
            self._previous_parameters = {name: p.detach().clone() for name, p in parameters.items()}

    def state_dict(self) -> Tensors:
        """Return flat tensors, which are all functions of releases."""
        flat = {}
        for i, state in enumerate(self._states):
            for key, tensor in state.items():
                flat[f"{i}.{key}"] = tensor
        for name, parameter in (self._previous_parameters or {}).items():
            flat[f"before.{name}"] = parameter
        return flat

    def load_state_dict(self, state: NamedTensors) -> None:
        """Continue from `state_dict`."""
        states: list[Tensors] = [{} for _ in self._steps]
        previous: Tensors = {}
        for key, tensor in state.items():
            owner, _, name = key.partition(".")
            if owner == "before":
                previous[name] = tensor
            elif owner.isdigit() and int(owner) < len(states):
                states[int(owner)][name] = tensor
            else:
                raise ValueError(f"the state '{key}' belongs to other post-processing steps")
        self._states = list(states)
        self._previous_parameters = previous or None


def _extrapolate(parameters: NamedTensors, previous: NamedTensors, lookahead: float) -> Tensors:
    """Return θ + lookahead · d as new tensors, with d the last change of the parameters."""
    points = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            current = parameter.detach()
            change = current - previous[name]
            points[name] = current + lookahead * change
    return points


def _most_filters(is_correlated: bool) -> int:
    """Return the number of filters behind which the variance of the noise is known."""
    return 0 if is_correlated else 1


def check_pipeline(steps: Sequence[PostProcess], readout: str, is_correlated: bool = False) -> None:
    """Refuse post-processing steps that cannot be combined.

    Args:
        steps: in order.
        readout: whitened, natural or inverse.
        is_correlated: whether the noise of following releases may be correlated.

    Raises:
        ValueError: with the reason and the fix.
    """
    check_one_of("readout", readout, READOUTS)
    filters: list[str] = []
    adaptive: list[str] = []
    for step in steps:
        name = _check_step(step, filters, adaptive, is_correlated)
        if step.is_filter:
            filters.append(name)
        if step.is_optimizer_step:
            adaptive.append(name)
    if len(adaptive) > 1:
        last = steps[-1].describe()["name"]
        raise ValueError(f"{last} would rescale what {adaptive[0]} has rescaled; keep one of them")
    if sum(step.evaluations is not None for step in steps) > 1:
        raise ValueError("only one step can decide where gradients are taken (DiSK)")


def _check_step(
    step: Any, filters: Sequence[str], adaptive: Sequence[str], is_correlated: bool
) -> str:
    """Return the name of a step; refuse it behind filters and adaptive steps that it cannot follow.

    Raises:
        ValueError: with the reason and the fix.
    """
    if not isinstance(step, PostProcess):
        raise ValueError(
            f"{type(step).__name__} in postprocess is not a PostProcess: derive it from"
            " this class, use preconditioner= or weight_average=, or give a torch optimizer to the"
            " session"
        )
    name: str = step.describe()["name"]
    if step.needs_variance and adaptive:
        raise ValueError(
            f"{name} needs the variance of the noise, which is not known behind the adaptive"
            f" step {adaptive[0]}; keep one of them"
        )
    if step.needs_variance and len(filters) > _most_filters(is_correlated):
        cause = "correlated noise and a filter" if is_correlated else "two filters"
        raise ValueError(
            f"{name} needs the variance of the noise, which is not known behind {cause}"
            f" ({' and '.join(filters)}); keep one of them"
        )
    if step.is_filter and adaptive:
        raise ValueError(
            f"the filter {name} stands behind the adaptive step {adaptive[0]}; filters come first"
        )
    return name


def check_with_optimizer(steps: Sequence[PostProcess], optimizer: Any) -> None:
    """Refuse a torch optimizer that cannot follow the steps.

    Raises:
        ValueError: momentum behind a filter that does not allow it, or a second adaptive scaling.
    """
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    has_momentum = any(group.get("momentum", 0) for group in groups)
    is_adaptive = any(_ADAPTIVE_OPTIONS & set(group) for group in groups)
    for step in steps:
        name = step.describe()["name"]
        if step.is_filter and has_momentum and not step.momentum_allowed:
            raise ValueError(
                f"momentum on top of the filter {name} doubles the lag: use an optimizer without"
                " momentum, or set momentum_allowed=True in the filter if you want both"
            )
        if step.is_optimizer_step and (has_momentum or is_adaptive):
            effect = "rescales it once more" if is_adaptive else "averages it once more"
            raise ValueError(
                f"{name} gives the step itself, so {type(optimizer).__name__} {effect}; use"
                " torch.optim.SGD without momentum"
            )


def check_fields(preconditioner: Any, weight_average: Any) -> None:
    """Refuse a post-processing step in another field, and a value that is not a weight average.

    Raises:
        ValueError: naming the right field.
    """
    if isinstance(preconditioner, PostProcess):
        raise ValueError(
            f"{type(preconditioner).__name__} acts on releases, behind the noise, and is not a"
            " preconditioner: give it as postprocess=(...,)"
        )
    if weight_average is not None and not isinstance(weight_average, WeightEMA):
        raise ValueError(
            f"weight_average must be WeightEMA(...) or None, got {type(weight_average).__name__};"
            " averages of gradients belong into postprocess="
        )
