"""Turn a noisy release into the gradient for the optimizer: the read-out, then each step in order.

The average of the weights, which is for evaluation only, is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpkfc._checks import check_in_range, check_one_of
from dpkfc.gradients.evaluation_points import AT_MODEL_PARAMETERS, EvaluationPoint
from dpkfc.gradients.layer_matrices import map_groups, matrix_of, split_sum
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.subspace_clip import spread
from dpkfc.linalg.metric import EMBEDDING, Entry, Metric, Subspace
from dpkfc.privacy.mechanism import NamedTensors, Released, Tensors

# --------------------------------------------------------------------------------------------------
# The protocol of a step. It takes (release, state), and returns a new release and a new state.

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


# --------------------------------------------------------------------------------------------------
# The read-out of a release along a public basis L: the step is S₁ / α · L w̃ + S₂ / β · r̃, where
# w̃ is the released embedding and r̃ the released residual. The variance of its noise is the
# release's times (S₁ / α)² diag(L Lᵀ) + (S₂ / β)².


def combine_subspace_release(
    released: Released, basis: Subspace, layers: Sequence[Layer]
) -> Released:
    """Return a release of embedding and residual as gradients of the parameters.

    Args:
        released: the embedding under its own name, and the residual of each parameter unless it is
            dropped.
        basis: the basis along which the sum was clipped.
        layers: of the model.

    Raises:
        ValueError: the noise does not have one variance, or there is no embedding.
    """
    variance = released.noise_variance
    if not isinstance(variance, float) or EMBEDDING not in released.gradients:
        raise ValueError("embedding and residual are joined before any other post-processing")
    embedding = released.gradients[EMBEDDING] / basis.embedding_scale
    in_subspace = spread(basis, layers, lambda span: span.combine(embedding))
    diagonal = spread(basis, layers, lambda span: span.diagonal)
    gradients: Tensors = dict(in_subspace)
    variances: dict[str, Tensor | float] = {}
    for name, entries in diagonal.items():
        variances[name] = entries * (variance / basis.embedding_scale**2)
    for name, residual in released.gradients.items():
        if name == EMBEDDING:
            continue
        gradient = residual / basis.residual_scale
        if name in in_subspace:
            gradient = gradient + in_subspace[name].to(gradient.dtype)
        gradients[name] = gradient
        variances[name] = variances.get(name, 0.0) + variance / basis.residual_scale**2
    return replace(released, gradients=gradients, noise_variance=variances)


# --------------------------------------------------------------------------------------------------
# Read-outs: from the preconditioned space, in which noise was added, to the step of the optimizer.
#
#     whitened   z itself: the step is P ḡ, its noise is isotropic  (DP-KFC, Algorithm 1)
#     natural    P z: the natural-gradient step P² ḡ, noise ∝ P²  (DP-NGD, Algorithm 1, Theorem 3.1)
#     inverse    P⁻¹ z: P shapes clip and noise only, noise ∝ P⁻²
#
# P is symmetric, so the variance of an entry is the release's times the diagonal of P² (natural) or
# P⁻² (inverse).

READOUTS = ("whitened", "natural", "inverse")


@dataclass(frozen=True)
class CachedReadout:
    """The map of one entry of a metric, with the variance of each number for one noise variance.

    Attributes:
        entry: P, the entry of the metric.
        map_to_step: maps a released gradient to the step: P or P⁻¹.
        noise_variance: the variance of the noise in every number of a release.
        variances: parameter name to the variance of the noise in each number of the step.
    """

    entry: Entry
    map_to_step: Entry
    noise_variance: float
    variances: NamedTensors


def read_out(
    released: Released,
    metric: Metric,
    layers: Sequence[Layer],
    how: str,
    cache: dict[str, CachedReadout] | None = None,
) -> Released:
    """Return the release in another read-out.

    Args:
        released: in the preconditioned space.
        metric: the metric of clip and noise; a layer without an entry is left as it is.
        layers: of the model.
        how: whitened, natural or inverse.
        cache: inverses and variances by layer, which stay valid while an entry stays the same
            object.

    Raises:
        ValueError: a release whose noise does not have one variance.
    """
    if isinstance(metric, Subspace):
        # A subspace has no entries, so that all three read-outs are the same.
        return combine_subspace_release(released, metric, layers)
    if how == "whitened" or not metric:
        return released
    variance = released.noise_variance
    if not isinstance(variance, float):
        raise ValueError("a read-out comes before any other post-processing")
    cache = {} if cache is None else cache
    gradients = dict(released.gradients)
    variances: dict[str, Tensor | float] = dict.fromkeys(gradients, variance)
    for layer in layers:
        entry = metric.get(layer.name)
        if entry is None:
            continue
        cached = cache.get(layer.name)
        if cached is None or cached.entry is not entry or cached.noise_variance != variance:
            map_to_step = entry if how == "natural" else entry.inverse()
            layer_variances = _variances(layer, gradients, map_to_step, variance)
            cached = CachedReadout(entry, map_to_step, variance, layer_variances)
            cache[layer.name] = cached
        gradients.update(_apply_entry(layer, gradients, cached.map_to_step))
        variances.update(cached.variances)
    return replace(released, gradients=gradients, noise_variance=variances)


def _scales(layer: Layer, entry: Entry) -> Tensors:
    """Return the factors of an elementwise entry by full parameter name."""
    scales = entry.scales
    return {name: scales[role] for role, name in layer.parameters.items() if role in scales}


def _apply_entry(layer: Layer, tensors: NamedTensors, entry: Entry) -> NamedTensors:
    if entry.is_elementwise:
        return {name: tensors[name] * scale for name, scale in _scales(layer, entry).items()}
    return _map_matrix(layer, tensors, entry.apply)


def _variances(layer: Layer, tensors: NamedTensors, entry: Any, variance: float) -> Tensors:
    if entry.is_elementwise:
        return {name: variance * scale.square() for name, scale in _scales(layer, entry).items()}

    def matrix_variance(gradient: Tensor) -> Tensor:
        return (variance * entry.variance().to(gradient)).expand(gradient.shape)

    variances = _map_matrix(layer, tensors, matrix_variance)
    return {name: value.contiguous() for name, value in variances.items()}


def _map_matrix(
    layer: Layer, tensors: NamedTensors, function: Callable[[Tensor], Tensor]
) -> NamedTensors:
    matrix = matrix_of(layer, tensors)
    return split_sum(layer, map_groups(layer, matrix, function))


# --------------------------------------------------------------------------------------------------

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
        """Return the gradient for the optimizer.

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
        return value

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


# --------------------------------------------------------------------------------------------------
# An exponential moving average of the weights, for evaluation only (De et al. 2022).
#
#     μ_t = min(μ, (1 + t) / (10 + t)),    average ← μ_t average + (1 − μ_t) θ,    t updates so far
#
# It is a function of released weights: it costs no privacy and does not change the training.


@dataclass(frozen=True)
class WeightEMA:
    """Settings of the average.

    Attributes:
        decay: μ in [0, 1).
        warmup: use μ_t in place of μ, so that the first updates forget faster. Without a warm-up
            the initial weights count until 1 / (1 − μ) steps have passed.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        check_in_range("decay of WeightEMA", self.decay, "[0, 1)")

    def decay_at(self, update: int) -> float:
        """Return μ_t of an update, counted from 0."""
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + update) / (10 + update))

    def describe(self) -> dict[str, Any]:
        """Return plain values that determine the result."""
        return {"name": "WeightEMA", **asdict(self)}


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


class WeightAverage:
    """The average of one run, in float32 at least; without settings it does nothing.

    Args:
        settings: None for no average.
        parameters: trainable parameters, by name; frozen ones do not move.
    """

    def __init__(self, settings: WeightEMA | None, parameters: NamedTensors) -> None:
        self._settings = settings
        self._parameters = dict(parameters)
        self._updates = 0
        self._average: Tensors | None = None
        self._trained_weights: Tensors | None = None

    def start(self) -> None:
        """Start from the weights that the first step changes.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        self.check_swapped_out()
        if self._settings is not None and self._average is None:
            self._average = {name: _widen(p).clone() for name, p in self._parameters.items()}

    def update(self) -> None:
        """Average the parameters after a step."""
        if self._settings is None or self._average is None:
            return
        weight = 1 - self._settings.decay_at(self._updates)
        with torch.no_grad():
            for name, p in self._parameters.items():
                self._average[name].lerp_(_widen(p), weight)
        self._updates += 1

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Put the averaged weights into the model, and restore the trained weights to the bit.

        Raises:
            RuntimeError: there is no average, or it is in the model already.
        """
        if self._settings is None:
            raise RuntimeError(
                "no average of the weights is kept: use PrivacyConfig(weight_average=WeightEMA())"
            )
        self.check_swapped_out()
        # Before the first step the average is the weights themselves.
        average = self._average or {}
        self._trained_weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(average)
            yield
        finally:
            self._write(self._trained_weights)
            self._trained_weights = None

    def check_swapped_out(self) -> None:
        """Refuse to go on while the averaged weights are in the model.

        A step would be lost, and a checkpoint would hold the wrong weights.

        Raises:
            RuntimeError: the averaged weights are in the model.
        """
        if self._trained_weights is not None:
            raise RuntimeError(
                "the averaged weights are in the model: leave `with session.averaged_weights()`"
                " first"
            )

    def _write(self, values: NamedTensors) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)

    def state_dict(self) -> Tensors:
        """Return the average and the number of updates; nothing before the first."""
        self.check_swapped_out()
        if not self._average:
            return {}
        state = {f"average.{name}": value for name, value in self._average.items()}
        state["updates"] = torch.tensor(self._updates)
        return state

    def load_state_dict(self, state: NamedTensors) -> None:
        """Continue from `state_dict`; an empty one starts the average at the next step."""
        self.check_swapped_out()
        average = {}
        for name, value in state.items():
            if name != "updates":
                average[name.removeprefix("average.")] = value.clone()
        self._average = average or None
        self._updates = int(state["updates"]) if average else 0


def _widen(p: Tensor) -> Tensor:
    """Return a parameter in a type that holds small changes."""
    if p.dtype == torch.float64:
        return p.detach()
    return p.detach().float()
