"""Everything between a release and the optimizer, in order: read-out, then one post-processing step after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.layers import Layer
from dpkfc.metric import Metric
from dpkfc.postprocess.base import AT_PARAMETERS, Evaluation, LookAhead, PostProcess, State
from dpkfc.postprocess.readout import READOUTS, read_out
from dpkfc.privacy.mechanism import Released

__all__ = ["Chain", "check_chain", "check_with_optimizer"]

_SMOOTH_HINT = "say momentum_allowed=True in the filter if you want both"


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
        self._before: dict[str, Tensor] | None = None
        self._ahead = next((step.evaluations for step in steps if isinstance(step, LookAhead)), AT_PARAMETERS)

    @property
    def needs_points(self) -> bool:
        """Whether gradients are taken anywhere else than at the parameters alone."""
        return self._ahead != AT_PARAMETERS

    def evaluations(self) -> tuple[Evaluation, ...]:
        """The points of this step; before the first change of the parameters all of them coincide."""
        return AT_PARAMETERS if self._before is None else self._ahead

    def displaced(self, parameters: Mapping[str, Tensor], ahead: float) -> dict[str, Tensor] | None:
        """θ + ahead · d as new tensors, None for θ itself; d is the last change of the parameters."""
        if ahead == 0 or self._before is None:
            return None
        with torch.no_grad():
            return {n: p.detach() + ahead * (p.detach() - self._before[n]) for n, p in parameters.items()}

    def apply(self, released: Released, metric: Metric, layers: Sequence[Layer]) -> Released:
        """What the optimizer is handed."""
        with torch.no_grad():
            value = read_out(released, metric, layers, self._readout)
            for i, step in enumerate(self._steps):
                value, self._states[i] = step.apply(value, self._states[i])
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
                "and belongs into preconditioner=, a torch optimizer is handed to the session"
            )
        names.append(step.describe()["name"])
        earlier = [names[k] for k in range(i) if steps[k].adaptive]
        if step.needs_variance and earlier:
            raise ValueError(
                f"{names[i]} needs the variance of the noise, which is not known behind the adaptive step {earlier[0]}; put "
                f"{names[i]} in its place or leave one of them out"
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


def check_with_optimizer(steps: Sequence[PostProcess], optimizer: Any) -> None:
    """Raise where a torch optimizer does not go with the steps before it.

    Raises:
        ValueError: momentum behind a filter without asking; a second adaptive scaling.
    """
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    momentum = any(g.get("momentum", 0) for g in groups)
    adaptive = any("betas" in g or "alpha" in g or "lr_decay" in g for g in groups)
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
