"""The contract of a preconditioner: its settings, and the state that a refresh builds."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpkfc._checks import LARGEST_INTEGER, check_integer, check_one_of, check_optional_integer
from dpkfc.curvature.factor_history import History
from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.layer_factors import Rules
from dpkfc.curvature.likelihood import LABELS, LIKELIHOODS
from dpkfc.curvature.probe_pass import Capture, ProbeLoss, ProbeSpec
from dpkfc.curvature.probes import Probe
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Kronecker, Metric
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank
from dpkfc.linalg.subspace import Span, Subspace
from dpkfc.tensors import (
    NamedTensors,
    Tensors,
    content_bytes,
    copy_to_device,
    pack,
    separate,
    unpack,
)

_TEXT = "meta"
DEFAULT_EXAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class PreconditionerState:
    """A metric built at one step, and facts about it for people and for the next refresh.

    Attributes:
        metric: layer name to map; layers that are absent keep the identity.
        step: step of the refresh that built the metric, or that found too little drift to build
            one.
        report: one row a side: layer, side, dim, kind (dense, lowrank, diagonal, identity), rank,
            trace, condition_before, condition_after, note.
        scale: the one factor of the whole metric, already in `metric`.
        spectra: layer to `A` and `G` (or the role of an elementwise parameter) to undamped,
            unscaled eigenvalues; those beyond the first `max_rank` of a wide side by their mean.
        note: what the privacy card should say next to the settings.
        running: sums that the next refresh continues, one entry a probe; empty unless
            `Preconditioner.uses_previous_state`.
        drift: how far the factors had moved at the last refresh, None if no refresh measured that.
    """

    metric: Metric
    step: int
    report: tuple[Mapping[str, Any], ...] = ()
    scale: float = 1.0
    spectra: Mapping[str, NamedTensors] = field(default_factory=dict)
    note: str = ""
    running: tuple[History, ...] = ()
    drift: float | None = None

    def state_dict(self) -> Tensors:
        """Return flat tensors, ready for safetensors; `from_state_dict` restores every bit.

        Layers that share a tensor share it in the result. Everything but tensors is one JSON text.
        """
        tensors: Tensors = {}
        text = json.dumps(pack(self, "state", tensors, _STORED))
        tensors[_TEXT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return separate(tensors)

    @classmethod
    def from_state_dict(cls, state: NamedTensors) -> PreconditionerState:
        """Return the state that `state_dict` wrote.

        Raises:
            ValueError: tensors that `state_dict` did not write.
        """
        # Tensors read from a file can begin anywhere in memory, and a product of unaligned tensors
        # can differ in its last bit.
        tensors = {name: x.clone() for name, x in state.items()}
        try:
            text = json.loads(bytes(tensors[_TEXT].tolist()))
            restored = unpack(text, tensors, _STORED)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"not the state of a preconditioner, or a damaged one: {error!r}"
            ) from error
        if not isinstance(restored, PreconditionerState):
            raise ValueError(f"not the state of a preconditioner: {type(restored).__name__}")
        return restored

    @property
    def digest(self) -> str:
        """SHA-256 of the whole state."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(content_bytes(tensor))
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> PreconditionerState:
        """Return the same state with its metric and its sums on another device."""
        metric, running = copy_to_device((self.metric, self.running), torch.device(device))
        return replace(self, metric=metric, running=running)


# What a state consists of.
_STORED = (
    PreconditionerState,
    FactorAccumulator,
    *(Kronecker, Eigenbasis, Elementwise),
    *(Identity, Diagonal, Dense, LowRank),
    *(Subspace, Span),
)


class Preconditioner(ABC):
    """The settings of a preconditioner: what a session asks of them, with a default for the rest.

    Derive from this class, best as a frozen dataclass, and define `describe`, `is_due` and `build`.
    Everything else has a default. No method is ever given a private tensor.
    """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return plain values that decide the result, for the plan's hash and the privacy card."""

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Return whether the metric is to be rebuilt before this step (from 0)."""

    @abstractmethod
    def build(
        self, model: nn.Module, capture: Capture, step: int, rules: Rules | None = None
    ) -> PreconditionerState:
        """Build the metric at the model's present parameters.

        More keyword arguments follow from the members below: `previous` (the last state) with
        `uses_previous_state`, and `team` (the processes) with `supports_distributed_build`.

        Args:
            model: any module; leave its parameters, gradients, buffers and modes as they are.
            capture: maps (model, loss) to layer name and block.
            step: step of training.
            rules: layer name to the rule of its gradients, such as "conv" (`Layer.rule`).
        """

    @property
    def purpose(self) -> str:
        """The release beside the steps that the metric is built from; empty for a probe."""
        return ""

    def build_from_release(
        self, model: nn.Module, vector: NDArray[np.float64], stddev: float, count: int, step: int
    ) -> PreconditionerState:
        """Build the metric from the release named by `purpose`.

        Args:
            model: any module.
            vector: what was released.
            stddev: of its noise.
            count: public number of rows or units.
            step: of training.
        """
        raise NotImplementedError

    @property
    def required_clipping(self) -> str | None:
        """The only clipping that a plan may have with this preconditioner, None for any."""
        return None

    @property
    def supports_distributed_build(self) -> bool:
        """Whether processes can share a build; the first process builds alone otherwise."""
        return False

    @property
    def uses_previous_state(self) -> bool:
        """Whether a build continues from the state of the one before."""
        return False

    def check_plan(self, steps: int, readout: str) -> None:  # noqa: B027
        """Refuse a plan that these settings do not fit, with a ValueError. The default accepts all.

        Args:
            steps: of the plan.
            readout: `PrivacyConfig.readout`.
        """

    def metric_at(self, state: PreconditionerState, step: int) -> Metric:
        """Return the metric of a step, for one that changes between refreshes."""
        return state.metric

    @property
    def probes(self) -> dict[str, Probe]:
        """Attribute name to probe; their public examples must not be private ones too.

        Raises:
            ValueError: `probe` or `output_probe` does not derive from `Probe`, so that its stored
                examples are not known.
        """
        roles = ("probe", "output_probe")
        names = [*roles, *vars(self)]
        if is_dataclass(self):
            names += [f.name for f in fields(self)]
        values = {name: getattr(self, name, None) for name in names}
        for name in roles:
            if values[name] is not None and not isinstance(values[name], Probe):
                raise ValueError(
                    f"{name} of {type(self).__name__} must derive from dpkfc.curvature.Probe, got "
                    f"{type(values[name]).__name__}"
                )
        return {name: value for name, value in values.items() if isinstance(value, Probe)}

    def probe_specs(self, step: int) -> Sequence[ProbeSpec]:
        """Return what a refresh runs on probes, the main probe first; empty without a probe."""
        return ()

    @property
    def microbatch_size(self) -> int | None:
        """Probe examples in one forward pass, None if a run must not lower this number."""
        return None

    def with_microbatch_size(self, size: int) -> Preconditioner:
        """Return these settings with another `microbatch_size`; the metric must not change."""
        raise NotImplementedError(
            f"{type(self).__name__} has a microbatch_size; add with_microbatch_size"
        )

    @property
    def fewest_probe_examples(self) -> int:
        """Examples of the smallest refresh, 0 without a probe."""
        return 0


class ProbePreconditioner(Preconditioner):
    """A preconditioner that is measured on a probe at fixed intervals.

    The frozen dataclass that derives from this class has the fields below.

    Attributes:
        counts: fields that are positive integers.
        optional_counts: fields that are positive integers or None.
        takes_team: whether `build` can share the probe with other processes.
    """

    counts: ClassVar[tuple[str, ...]] = ("every", "chunk")
    optional_counts: ClassVar[tuple[str, ...]] = ("probe_size",)
    takes_team: ClassVar[bool] = False

    probe: Probe
    probe_size: int | None
    chunk: int
    labels: str | None
    likelihood: str
    loss: ProbeLoss | None
    every: int
    seed: int

    def _check(self, **choices: Sequence[Any]) -> None:
        """Refuse settings that no refresh can use.

        Args:
            choices: field to its values, besides `labels` and `likelihood`.

        Raises:
            ValueError: naming the field.
        """
        check_probe(self.probe)
        for name, allowed in {"labels": LABELS, "likelihood": LIKELIHOODS, **choices}.items():
            check_one_of(name, getattr(self, name), allowed)
        for name in self.counts:
            check_integer(name, getattr(self, name), 1)
        for name in self.optional_counts:
            check_optional_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, -LARGEST_INTEGER)

    def is_due(self, step: int) -> bool:
        """Return whether the metric is to be rebuilt before this step (from 0)."""
        return step % self.every == 0

    @property
    def supports_distributed_build(self) -> bool:
        """Whether each process may run a part of the probe.

        A loss that draws random numbers of its own has to see all of the probe.
        """
        return self.takes_team and self.loss is None

    def probe_spec(self, step: int) -> ProbeSpec:
        """Return what a refresh runs on the main probe."""
        return ProbeSpec(
            probe=self.probe,
            size=probe_examples(self.probe, self.probe_size),
            chunk=self.chunk,
            labels=self.labels or "model",
            likelihood=self.likelihood,
            loss=self.loss,
            seed=self.seed,
            step=step,
        )

    def probe_specs(self, step: int) -> Sequence[ProbeSpec]:
        """Return what a refresh runs on every probe, the main one first."""
        return [self.probe_spec(step)]

    @property
    def microbatch_size(self) -> int | None:
        """Probe examples in one forward pass, None for a loss that may draw random numbers."""
        return self.chunk if self.loss is None else None

    def with_microbatch_size(self, size: int) -> ProbePreconditioner:
        """Return these settings with another `chunk`."""
        return replace(self, chunk=size)  # type: ignore[type-var]

    @property
    def fewest_probe_examples(self) -> int:
        """Examples of the smallest refresh."""
        return probe_examples(self.probe, self.probe_size)

    def _describe(self, name: str, **more: Any) -> dict[str, Any]:
        """Return a description: the fields, the source of curvature and whether it is private."""
        probes = self.probes
        description: dict[str, Any] = {"name": name}
        for f in fields(self):  # type: ignore[arg-type]
            if f.name not in (*probes, "loss"):
                description[f.name] = getattr(self, f.name)
        description["probe_size"] = probe_examples(self.probe, self.probe_size)
        description |= more
        if description["labels"] == "given":
            description["labels_that_do_not_fit"] = "drawn from the model"
        descriptions = {role: probe.describe() for role, probe in probes.items()}
        description |= descriptions
        description["loss"] = None if self.loss is None else _qualified_name(self.loss)
        source, *others = map(_source, descriptions.values())
        if others:
            source = f"A from {source}; G from {others[0]}"
        description["curvature_source"] = source
        is_private = [d.get("uses_private_data", False) for d in descriptions.values()]
        description["uses_private_data"] = any(is_private)
        return description


def check_probe(probe: Any, name: str = "probe") -> None:
    """Refuse a value that is not a probe.

    Raises:
        ValueError: the value does not derive from `Probe`.
    """
    if not isinstance(probe, Probe):
        raise ValueError(
            f"{name} must derive from dpkfc.curvature.Probe and have sample() and describe(), "
            f"as PinkNoise(shape) does; got {probe!r}"
        )


def probe_examples(probe: Probe, wanted: int | None) -> int:
    """Return the examples of a refresh: as many as wanted, by default all of the probe.

    A probe without an end gives 256 by default.
    """
    if wanted is not None:
        return wanted
    return int(probe.describe().get("examples", DEFAULT_EXAMPLES))


def choose_labels(probe: Probe, labels: str) -> str:
    """Return where labels come from: `given` becomes `model` for a probe without labels."""
    if labels == "given" and not probe.describe().get("labelled"):
        return "model"
    return labels


def _source(description: Mapping[str, Any]) -> str:
    source = str(description.get("source", "unknown"))
    if "provenance" in description:
        return f"{source}: {description['provenance']}"
    return source


def _qualified_name(function: Callable[..., Any]) -> str:
    """Return module and name of a function; its owner keeps its contents fixed."""
    named = function if hasattr(function, "__qualname__") else type(function)
    # Hashes of plans hold this name, so a module keeps its first name in them.
    module = named.__module__.replace("dpkfc.curvature.refresh", "dpkfc.curvature.likelihood")
    return f"{module}.{named.__qualname__}"
