"""K-FAC on a probe: the configuration, and the preconditioner that a refresh yields.

    factors on the probe → scale → damping and root, one side at a time → metric → one factor for the whole metric

Nothing here can be handed a private tensor. The metric depends on the probe, a public random stream and the model's
released parameters, so it costs no privacy and leaves the sensitivity of the clipped sum as it is.

Source: DP-KFC, Algorithms 1 and 2.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.blocks import Block
from dpkfc.curvature.damping import Damping, elementwise_scale, side_of
from dpkfc.curvature.factors import LayerAccumulator, LayerFactors, Structure
from dpkfc.curvature.likelihood import LABELS, LIKELIHOODS
from dpkfc.curvature.norms import probe_norms
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.probing import Capture, ProbeRun, blocks_on_probe, undisturbed
from dpkfc.curvature.report import UNREACHED, layer_rows, unreached_row
from dpkfc.curvature.state import mismatch, moved, pack, unpack
from dpkfc.metric import Elementwise, Kronecker, Metric, scale_metric

__all__ = ["KFAC", "RULES", "Preconditioner"]

_log = logging.getLogger(__name__)

RULES = ("linear", "conv", "embedding", "norm", "fallback")
_CHOICES: dict[str, tuple[str, ...]] = {
    "labels": LABELS,
    "likelihood": LIKELIHOODS,
    "sides": ("both", "input", "output"),
    "damping_mode": ("relative", "absolute"),
    "scale": ("probe", "trace", "balanced", "raw"),
    "sharing": ("expand", "reduce"),
    "oversize": ("diagonal", "identity"),
}
_SCALE_SIZE = 64  # probe examples over which the two medians of `probe` and `balanced` are taken
_POSITIVE = ("probe_size", "chunk", "every", "max_factor_size")
_SHORT = {"input": "A", "output": "G"}


@dataclass(frozen=True, kw_only=True)
class KFAC:
    """How curvature is measured and turned into a metric.

    Attributes:
        probe: where inputs come from; see `probes`.
        probe_size: examples a refresh looks at. A public constant, never the size of a private batch.
        chunk: probe examples a forward pass; bounds memory and changes nothing else (a `loss` of your own may draw
            other numbers).
        labels: `model` draws them from the model's predictive distribution (Fisher), `uniform` at random, `given` takes
            the probe's.
        likelihood: categorical, gaussian or bernoulli; see `likelihood`.
        loss: maps (model output, generator) to losses `[N]`, instead of a likelihood.
        sides: both, input (A only) or output (G only). The other side becomes the identity times what its mean
            eigenvalue would give, so that every layer keeps its scale and only the directions differ.
        damping: ρ of relative, π of absolute damping.
        damping_mode: relative (π-balanced, scale-free) or absolute (the paper's); see `damping`.
        gamma: γ of absolute damping.
        exponent: root p in (0, 1/2] taken of each side.
        scale: `raw` takes the factors as they are. `trace` divides each factor by its mean eigenvalue first: layers
            keep their relative gradient sizes, and directions are whitened within them. `probe` is raw times one number
            for the whole metric, such that the median norm over the probe is the same with and without it: the clipping
            norm then means the same as in DP-SGD. `balanced` is trace with that number.
        every: steps between refreshes.
        sharing: expand or reduce, for layers with several positions; see `factors`.
        max_factor_size: largest matrix that is decomposed; wider sides stay low-rank while the probe has few rows.
        oversize: what other wider sides become, diagonal or identity.
        layer_rules: kinds of layers to precondition (linear, conv, embedding, norm, fallback), None for all; the others
            are only scaled, as the other side of `sides`.
        rank_tolerance: eigenvalues below this fraction of the damping are not kept in low-rank sides.
        max_rank: eigenpairs kept of a side at least four times as wide, None for all; the rest keep their mean, so that
            the trace stays. Eigenvalues far below the first few are sampling noise of the probe anyway.
        seed: of the probe's own random stream, one stream a step.
    """

    probe: Probe
    probe_size: int = 256
    chunk: int = 64
    labels: str = "model"
    likelihood: str = "categorical"
    loss: Callable[[Any, torch.Generator], Tensor] | None = None
    sides: str = "both"
    damping: float = 0.1
    damping_mode: str = "relative"
    gamma: float = 0.0
    exponent: float = 0.5
    scale: str = "balanced"
    every: int = 50
    sharing: str = "expand"
    max_factor_size: int = 4096
    oversize: str = "diagonal"
    layer_rules: tuple[str, ...] | None = None
    rank_tolerance: float = 1e-2
    max_rank: int | None = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.probe, Probe):
            raise ValueError(f"probe must have sample() and describe(), as PinkNoise(shape) has; got {self.probe!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.layer_rules is not None:
            object.__setattr__(self, "layer_rules", tuple(self.layer_rules))
            unknown = [rule for rule in self.layer_rules if rule not in RULES]
            if unknown or not self.layer_rules:
                raise ValueError(f"layer_rules must name some of {', '.join(RULES)}; got {list(self.layer_rules)}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        self._damping()

    @property
    def name(self) -> str:
        """Short name: kfac, kfac-a (inputs only) or kfac-g (output gradients only)."""
        return {"both": "kfac", "input": "kfac-a", "output": "kfac-g"}[self.sides]

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        probe = self.probe.describe()
        described = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("probe", "loss")}
        described["layer_rules"] = None if self.layer_rules is None else list(self.layer_rules)
        source = probe.get("source", "unknown")
        return {
            "name": self.name,
            **described,
            "probe": probe,
            "loss": None if self.loss is None else _function_name(self.loss),
            "curvature_source": f"{source}: {probe['provenance']}" if "provenance" in probe else source,
            "uses_private_data": False,
        }

    def due(self, step: int) -> bool:
        """Whether the metric is to be rebuilt before this step (from 0)."""
        return step % self.every == 0

    def run_at(self, step: int) -> ProbeRun:
        """The probe of one refresh."""
        return ProbeRun(
            probe=self.probe, size=self.probe_size, chunk=self.chunk, labels=self.labels,
            likelihood=self.likelihood, loss=self.loss, seed=self.seed, step=step,
        )  # fmt: skip

    def factors(
        self, model: nn.Module, capture: Capture, step: int = 0, rules: Mapping[str, str] | None = None
    ) -> dict[str, LayerFactors]:
        """Undamped factors of every layer that the probe reaches, as they are before any scaling.

        Args:
            model: any module; left exactly as it is, and run in evaluation mode.
            capture: maps (model, loss) to layer name and block.
            step: names the random stream.
            rules: layer name to kind; needed for `layer_rules`.

        Raises:
            ValueError: as `build`.
        """
        if self.layer_rules is not None and rules is None:
            raise ValueError("layer_rules was set, so build() needs rules={layer name: rule}")
        structure = Structure(
            sharing=self.sharing, sides=self.sides, max_factor_size=self.max_factor_size,
            oversize=self.oversize, rules=self.layer_rules,
        )  # fmt: skip
        layers: dict[str, LayerAccumulator] = {}
        with undisturbed(model), torch.no_grad():
            for index, blocks in enumerate(blocks_on_probe(model, capture, self.run_at(step))):
                size = min(self.chunk, self.probe_size - index * self.chunk)
                for name in blocks:
                    block = blocks[name]
                    if name not in layers:
                        layers[name] = LayerAccumulator(block, structure, (rules or {}).get(name))
                    _add_named(layers[name], name, block, size)
        return {name: layer.result() for name, layer in layers.items()}

    def build(
        self, model: nn.Module, capture: Capture, step: int, rules: Mapping[str, str] | None = None
    ) -> Preconditioner:
        """Measure curvature on the probe at the model's present parameters.

        Args:
            model: any module; parameters, gradients, buffers, modes and the global random state stay as they are.
            capture: maps (model, loss) to layer name and block; `loss(model)` gives per-example losses `[N]`. Blocks
                are looked up one at a time, so the mapping may form them on demand.
            step: step of training; with `seed` it names the probe's random stream.
            rules: layer name to kind (linear, conv, embedding, norm, fallback).

        Returns:
            The preconditioner; never with a NaN in it.

        Raises:
            ValueError: the model's output, loss or a layer's contribution on the probe is not finite or does not fit.
        """
        factors = self.factors(model, capture, step, rules)
        damping = self._damping()
        used = {n: f.normalised() for n, f in factors.items()} if self.scale in ("trace", "balanced") else factors
        metric: Metric = {name: _entry(f, damping, self.max_factor_size) for name, f in used.items()}
        scale = 1.0
        if self.scale in ("probe", "balanced"):
            scale = self._probe_scale(model, capture, step, metric)
            metric = scale_metric(metric, scale)
        rows = [row for n in metric for row in layer_rows(n, factors[n], used[n], metric[n], damping)]
        unreached = [name for name in rules or {} if name not in metric]
        rows += [unreached_row(name) for name in unreached]
        if unreached:
            _log.warning("the probe does not reach these layers, which keep the identity: %s", ", ".join(unreached))
        return Preconditioner(
            metric=metric,
            step=step,
            report=tuple(rows),
            scale=scale,
            spectra={n: {_SHORT.get(s, s): x.values.cpu() for s, x in f.sides.items()} for n, f in factors.items()},
            shapes={n: {"kind": f.kind, **{s: list(x) for s, x in f.shapes.items()}} for n, f in factors.items()},
        )

    def _damping(self) -> Damping:
        return Damping(
            value=self.damping, mode=self.damping_mode, gamma=self.gamma,
            exponent=self.exponent, rank_tolerance=self.rank_tolerance, max_rank=self.max_rank,
        )  # fmt: skip

    def _probe_scale(self, model: nn.Module, capture: Capture, step: int, metric: Metric) -> float:
        """Median ‖g‖ ÷ median ‖P g‖ over a small probe of the same stream; 1 where a median is zero."""
        run = self.run_at(step)
        run = replace(run, size=min(run.size, _SCALE_SIZE))
        plain: list[Tensor] = []
        mapped: list[Tensor] = []
        with undisturbed(model), torch.no_grad():
            for blocks in blocks_on_probe(model, capture, run):
                for pieces, norms in zip((plain, mapped), probe_norms(blocks, {}, metric), strict=True):
                    pieces.append(norms)
        ratio = _median(plain) / max(_median(mapped), 1e-300)
        return ratio if ratio > 0 and math.isfinite(ratio) else 1.0


def _add_named(layer: LayerAccumulator, name: str, block: Block, size: int) -> None:
    if block.batch_size != size:
        raise ValueError(f"layer '{name}': capture returned {block.batch_size} examples instead of {size}")
    try:
        layer.add(block)
    except ValueError as error:
        raise ValueError(f"layer '{name}': {error}") from error


def _function_name(function: Callable[..., Any]) -> str:
    """Where a function comes from; its contents are the caller's to keep fixed."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _median(pieces: list[Tensor]) -> float:
    return float(torch.quantile(torch.cat(pieces), 0.5))


def _entry(factors: LayerFactors, damping: Damping, widest: int) -> Kronecker | Elementwise:
    if factors.kind == "elementwise":
        return Elementwise(
            {
                role: elementwise_scale(factor, damping, factors.shapes[role], factors.dtype).to(factors.device)
                for role, factor in factors.sides.items()
            }
        )
    sides = {name: side_of(f, damping, factors.dtype, widest_dense=widest) for name, f in factors.sides.items()}
    return Kronecker(sides["input"], sides["output"])


@dataclass(frozen=True, kw_only=True)
class Preconditioner:
    """A metric built at one step, with what is worth knowing about it.

    Attributes:
        metric: layer name to map; layers that are absent keep the identity.
        step: step at which it was built.
        report: one row a side: layer, side, dim, kind (dense, lowrank, diagonal, identity), rank, trace,
            condition_before, condition_after, note.
        scale: the one factor of the whole metric, already in `metric`.
        spectra: layer to `A` and `G` (or the role of an elementwise parameter) to undamped, unscaled eigenvalues.
        shapes: layer to its kind and the sizes of its sides, for `check`.
    """

    metric: Metric
    step: int
    report: tuple[Mapping[str, Any], ...] = ()
    scale: float = 1.0
    spectra: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors, ready for safetensors; `from_state_dict` restores every bit."""
        rest = {"step": self.step, "scale": self.scale, "shapes": dict(self.shapes)}
        rest["report"] = [dict(row) for row in self.report]
        return pack(self.metric, self.spectra, rest)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Preconditioner:
        """The preconditioner that wrote this state.

        Raises:
            ValueError: tensors that `state_dict` did not write.
        """
        metric, spectra, rest = unpack(state)
        return cls(
            metric=metric, step=rest["step"], report=tuple(rest["report"]), scale=rest["scale"],
            spectra=spectra, shapes=rest["shapes"],
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """SHA-256 of the whole state."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            flat = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {flat.dtype} {tuple(flat.shape)} ".encode())
            digest.update(flat.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Preconditioner:
        """The same preconditioner with its metric on another device."""
        return replace(self, metric={name: moved(entry, device) for name, entry in self.metric.items()})

    def check(self, layers: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Raise unless this preconditioner fits a model.

        Args:
            layers: layer name to the shapes of its trainable parameters, role to shape.

        Raises:
            ValueError: naming the first layer that is missing or of another shape.
        """
        missing = [name for name in self.metric if name not in layers]
        extra = [name for name in layers if name not in self.metric and name not in self._unreached]
        problems = [(n, "is not in the model") for n in missing] + [(n, "has no entry in it") for n in extra]
        for name, shape in self.shapes.items() if not problems else ():
            what = mismatch(shape, {role: tuple(s) for role, s in layers[name].items()})
            problems += [] if what is None else [(name, f"has {what}")]
        for name, what in problems:
            raise ValueError(f"the preconditioner belongs to another model: layer '{name}' {what}; build a new one")

    @property
    def _unreached(self) -> set[str]:
        return {row["layer"] for row in self.report if row["note"] == UNREACHED}
