"""Everything between a release and the optimizer, in order: read-out, then one post-processing step after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.clipping import matrix_of, on_groups, split_sum, spread
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import EMBEDDING, Elementwise, Entry, Metric, Subspace
from dpkfc.postprocess.optimizers import SOFIM, WeightEMA
from dpkfc.postprocess.protocol import AT_PARAMETERS, Evaluation, LookAhead, PostProcess, State
from dpkfc.privacy.mechanism import Released

# --------------------------------------------------------------------------------------------------
# The read-out of a release along a public basis: the embedding is mapped back, and the residual
# added to it.
#
# The step is S₁ / α · L w̃ + S₂ / β · r̃, and its noise has (S₁ / α)² diag(L Lᵀ) + (S₂ / β)² times
# the variance of the release.


def joined(released: Released, basis: Subspace, layers: Sequence[Layer]) -> Released:
    """A release of embedding and residual as gradients of the parameters.

    Args:
        released: the embedding under its own name, and the residual of each parameter unless it is dropped.
        basis: the one it was clipped along.
        layers: of the model.

    Raises:
        ValueError: a release whose noise is not that of a release, or that has no embedding.
    """
    variance = released.noise_variance
    if not isinstance(variance, float) or EMBEDDING not in released.gradients:
        raise ValueError("embedding and residual are joined in a release itself, before any other post-processing")
    embedding = released.gradients[EMBEDDING] / basis.embedding_scale
    along = spread(basis, layers, lambda span: span.combine(embedding), split_sum)
    diagonal = spread(basis, layers, lambda span: span.diagonal, split_sum)
    gradients: dict[str, Tensor] = dict(along)
    variances: dict[str, Tensor | float] = {
        name: x * (variance / basis.embedding_scale**2) for name, x in diagonal.items()
    }
    for name, residual in released.gradients.items():
        if name == EMBEDDING:
            continue
        own = residual / basis.residual_scale
        gradients[name] = own + along[name].to(own.dtype) if name in along else own
        variances[name] = variances.get(name, 0.0) + variance / basis.residual_scale**2
    return replace(released, gradients=gradients, noise_variance=variances)


# --------------------------------------------------------------------------------------------------
# Read-outs: from the coordinates in which noise was added to the step that the optimizer takes.
#
#     whitened   z itself: the step is P ḡ, noise is isotropic in it          (DP-KFC, Algorithm 1)
#     natural    P z: the net map is P², the natural gradient; noise ∝ P²     (DP-NGD, Algorithm 1, Theorem 3.1)
#     inverse    P⁻¹ z: the metric shapes clip and noise only; noise ∝ P⁻²
#
# All of it happens after the noise. The variance of every entry is carried along: with P symmetric
# it is that of the release times the diagonal of P² (natural) or P⁻² (inverse).

READOUTS = ("whitened", "natural", "inverse")


@dataclass(frozen=True)
class Map:
    """What a read-out needs of one entry of a metric: the map, and the variance of every entry for a release of variance `v`."""

    entry: Entry
    change: Entry
    v: float
    variances: Mapping[str, Tensor]


def read_out(
    released: Released, metric: Metric, layers: Sequence[Layer], how: str, maps: dict[str, Map] | None = None
) -> Released:
    """The release in another read-out.

    Args:
        released: in the coordinates of the metric.
        metric: the one it was clipped and noised in; a layer without an entry is left as it is.
        layers: of the model.
        how: whitened, natural or inverse.
        maps: kept from step to step, so that inverses and variances are formed once for an entry of a metric.

    Raises:
        ValueError: an unknown read-out, or a release whose noise is not that of a release.
    """
    if how not in READOUTS:
        raise ValueError(f"readout must be one of {', '.join(READOUTS)}; got {how!r}")
    if isinstance(metric, Subspace):  # has no entries to map by, so that all three are the same
        return joined(released, metric, layers)
    if how == "whitened" or not metric:
        return released
    if not isinstance(released.noise_variance, float):
        raise ValueError("a read-out is taken of a release itself, before any other post-processing")
    gradients = dict(released.gradients)
    variances: dict[str, Tensor | float] = dict.fromkeys(gradients, released.noise_variance)
    for layer in layers:
        entry = metric.get(layer.name)
        if entry is None:
            continue
        held = None if maps is None else maps.get(layer.name)
        if held is None or held.entry is not entry or held.v != released.noise_variance:
            change = entry if how == "natural" else entry.inverse()
            found = _variances(layer, gradients, change, released.noise_variance)
            held = Map(entry, change, released.noise_variance, found)
        if maps is not None:
            maps[layer.name] = held
        gradients.update(_mapped(layer, gradients, held.change))
        variances.update(held.variances)
    return replace(released, gradients=gradients, noise_variance=variances)


def _mapped(layer: Layer, tensors: Mapping[str, Tensor], entry: Entry) -> Mapping[str, Tensor]:
    if isinstance(entry, Elementwise):
        return {full: tensors[full] * entry.scale[role] for role, full in layer.parameters.items() if role in entry.scale}
    return _on_matrix(layer, tensors, entry.whiten)


def _variances(layer: Layer, tensors: Mapping[str, Tensor], entry: Entry, variance: float) -> dict[str, Tensor]:
    if isinstance(entry, Elementwise):
        own = {full: entry.scale[role] for role, full in layer.parameters.items() if role in entry.scale}
        return {full: variance * scale.square() for full, scale in own.items()}
    found = _on_matrix(layer, tensors, lambda g: (variance * entry.variance().to(g)).expand(g.shape))
    return {full: x.contiguous() for full, x in found.items()}


def _on_matrix(layer: Layer, tensors: Mapping[str, Tensor], work: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
    return split_sum(layer, on_groups(layer, matrix_of(layer, tensors), work))


# --------------------------------------------------------------------------------------------------

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
