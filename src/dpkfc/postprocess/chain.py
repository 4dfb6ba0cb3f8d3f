"""Everything between a release and the optimizer, in order: read-out, then one post-processing step after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.layers import Layer
from dpkfc.metric import Metric
from dpkfc.postprocess.base import AT_PARAMETERS, Evaluation, LookAhead, PostProcess, State
from dpkfc.postprocess.ema import WeightEMA
from dpkfc.postprocess.readout import READOUTS, Map, read_out
from dpkfc.postprocess.sofim import SOFIM
from dpkfc.privacy.mechanism import Released

__all__ = ["Chain", "check_chain", "check_not_a_step", "check_with_optimizer"]

_SMOOTH_HINT = "say momentum_allowed=True in the filter if you want both"
# Options by which torch's optimizers that divide by second moments or signs are known, and the one with a line search.
_ADAPTIVE = {"betas", "alpha", "lr_decay", "rho", "etas", "beta2_decay", "ns_steps", "ns_coefficients", "max_iter"}


class Chain:
    """The post-processing of one run, with the states of its steps.

    Args:
        steps: in order.
        readout: whitened, natural or inverse.

    Raises:
        ValueError: steps that do not go together, with the reason.
    """

    def __init__(self, steps: Sequence[PostProcess], readout: str = "whitened") -> None:
        check_chain(steps, readout)
        self._steps, self._readout = tuple(steps), readout
        self._states: list[State] = [{} for _ in steps]
        self._maps: dict[str, Map] = {}
        self._before: dict[str, Tensor] | None = None
        self._ahead = next((step.evaluations for step in steps if isinstance(step, LookAhead)), AT_PARAMETERS)

    @property
    def needs_points(self) -> bool:
        """Whether gradients are taken anywhere else than at the parameters alone."""
        return self._ahead != AT_PARAMETERS

    def evaluations(self, all_of_them: bool = False) -> tuple[Evaluation, ...]:
        """The points of this step: before the first change of the parameters all of them coincide, and one is enough."""
        return self._ahead if all_of_them or self._before is not None else AT_PARAMETERS

    def displaced(self, parameters: Mapping[str, Tensor], ahead: float) -> dict[str, Tensor] | None:
        """θ + ahead · d as new tensors, None for θ itself; d is the last change of the parameters."""
        if ahead == 0 or self._before is None:
            return None
        with torch.no_grad():
            return {n: p.detach() + ahead * (p.detach() - self._before[n]) for n, p in parameters.items()}

    def apply(self, released: Released, metric: Metric, layers: Sequence[Layer], *, spare: bool = False) -> Released:
        """What the optimizer is handed.

        Args:
            released: of this step.
            metric: the coordinates of the release.
            layers: of the model.
            spare: whether nobody needs the release any more, so that its memory may hold the result.
        """
        with torch.no_grad():
            value, filters = read_out(released, metric, layers, self._readout, self._maps), 0
            states = list(self._states)
            for i, step in enumerate(self._steps):
                if spare and i == 0 and isinstance(step, SOFIM):
                    value, states[i] = step.apply(value, states[i], spare=True)
                else:
                    value, states[i] = step.apply(value, states[i])
                filters += step.smooths
                if filters > 1:  # a filter takes noise to be independent between steps, which that of a filter is not
                    value = replace(value, noise_variance=None)
            self._states = states
        return value

    def before_update(self, parameters: Mapping[str, Tensor]) -> None:
        """Note the parameters that the optimizer is about to change, where the next step looks ahead."""
        if self.needs_points:
            self._before = {name: p.detach().clone() for name, p in parameters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors, all functions of releases."""
        flat = {f"{i}.{key}": tensor for i, state in enumerate(self._states) for key, tensor in state.items()}
        return flat | {f"before.{name}": x for name, x in (self._before or {}).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        states: list[dict[str, Tensor]] = [{} for _ in self._steps]
        before: dict[str, Tensor] = {}
        for key, tensor in state.items():
            owner, _, rest = key.partition(".")
            if owner == "before":
                before[rest] = tensor
            elif owner.isdigit() and int(owner) < len(states):
                states[int(owner)][rest] = tensor
            else:
                raise ValueError(f"the state '{key}' belongs to another chain of post-processing steps")
        self._states, self._before = list(states), before or None


def check_chain(steps: Sequence[PostProcess], readout: str) -> None:
    """Raise where post-processing steps do not go together.

    Raises:
        ValueError: with the reason and the fix.
    """
    if readout not in READOUTS:
        raise ValueError(f"readout must be one of {', '.join(READOUTS)}; got {readout!r}")
    names = []
    for i, step in enumerate(steps):
        if not isinstance(step, PostProcess):
            raise ValueError(
                f"{type(step).__name__} in postprocess has no apply(released, state): a preconditioner acts before the clip "
                "and belongs into preconditioner=, an average of the weights into weight_average=, and a torch optimizer is "
                "handed to the session"
            )
        names.append(step.describe()["name"])
        earlier = [names[k] for k in range(i) if steps[k].adaptive]
        if step.needs_variance and earlier:
            raise ValueError(
                f"{names[i]} needs the variance of the noise, which is not known behind the adaptive step {earlier[0]}; keep one "
                "of them"
            )
        filters = [names[k] for k in range(i) if steps[k].smooths]
        if step.needs_variance and len(filters) > 1:
            raise ValueError(
                f"{names[i]} needs the variance of the noise, which is not known behind two filters ({' and '.join(filters)}): "
                "the noise that the second one takes in is not independent between steps; keep one of them"
            )
        if step.smooths and earlier:
            raise ValueError(
                f"the filter {names[i]} stands behind the adaptive step {earlier[0]}; filters come first, on the releases"
            )
    twice = [step for step in steps if step.adaptive]
    if len(twice) > 1:
        raise ValueError(f"{names[-1]} would rescale what {twice[0].describe()['name']} has rescaled; keep one of them")
    if sum(isinstance(step, LookAhead) for step in steps) > 1:
        raise ValueError("only one step can decide where gradients are taken (DiSK)")


def check_not_a_step(preconditioner: Any, weight_average: Any) -> None:
    """Raise where a value that belongs into `postprocess` was given to another field, or the other way round.

    Raises:
        ValueError: naming the field that the value belongs into.
    """
    if isinstance(preconditioner, PostProcess):
        raise ValueError(
            f"{type(preconditioner).__name__} acts on releases, behind the noise, and is no preconditioner: give it as "
            "postprocess=(...,)"
        )
    if weight_average is not None and not isinstance(weight_average, WeightEMA):
        raise ValueError(
            f"weight_average must be WeightEMA(...) or None, got {type(weight_average).__name__}; what averages gradients "
            "belongs into postprocess="
        )


def check_with_optimizer(steps: Sequence[PostProcess], optimizer: Any) -> None:
    """Raise where a torch optimizer does not go with the steps before it.

    Raises:
        ValueError: momentum behind a filter without asking; a second adaptive scaling.
    """
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    momentum = any(g.get("momentum", 0) for g in groups)
    adaptive = any(_ADAPTIVE & set(g) for g in groups)
    for step in steps:
        name = step.describe()["name"]
        if step.smooths and momentum and not step.momentum_allowed:
            raise ValueError(
                f"momentum on top of the filter {name} doubles the lag: use an optimizer without momentum, or {_SMOOTH_HINT}"
            )
        if step.adaptive and (momentum or adaptive):
            raise ValueError(
                f"{name} gives the step itself, so {type(optimizer).__name__} "
                f"{'rescales it once more' if adaptive else 'averages it once more'}; use torch.optim.SGD without momentum"
            )
