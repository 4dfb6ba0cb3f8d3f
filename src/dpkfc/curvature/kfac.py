"""K-FAC on a probe: the configuration, and the preconditioner that a refresh yields.

    factors on the probe → scale → damping and root, one side at a time → metric → one factor for the whole metric

Nothing here can be handed a private tensor. The metric depends on the probe, a public random stream and the model's
released parameters, so it costs no privacy and leaves the sensitivity of the clipped sum as it is.

Source: DP-KFC, Algorithms 1 and 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import check_choices, check_positive, check_probe, described, labels_of
from dpkfc.curvature.damping import (
    SHORT,
    Damping,
    check_ranks,
    check_sides,
    layer_rows,
    left_alone,
    metric_of,
    rank_of,
    shapes_of,
)
from dpkfc.curvature.factors import DiagonalFactor, Eigen, Factor
from dpkfc.curvature.layer_factors import LayerFactors, Structure, filled
from dpkfc.curvature.probe_loss import LABELS, LIKELIHOODS
from dpkfc.curvature.probe_pass import Capture, ProbeRun, Team, moved_to, public_generator, undisturbed
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.refresh import (
    Measured,
    Running,
    decomposed,
    drift_of,
    gathered,
    measure,
    probe_scale,
    running_from,
    running_state,
)
from dpkfc.linalg.metric import Metric, mismatch, pack, scale_metric, unpack

# --------------------------------------------------------------------------------------------------
# Factors put together from several sources: hybrids of two probes, and a control without
# directions.


def combined(
    inputs: Mapping[str, LayerFactors], outputs: Mapping[str, LayerFactors] | None = None
) -> Mapping[str, LayerFactors]:
    """Input factors A of one probe beside output factors G of another, on the same model; without another, both of the one.

    Parameters without the two sides (norm layers, raw parameters) and tied tables, whose one factor is of gradients, take
    those of the probe for outputs. A layer that only one of the probes reaches has the factors of that one.
    """
    if outputs is None:
        return inputs
    found = {**outputs, **inputs}
    for name, first in inputs.items():
        other = outputs.get(name)
        if other is None:
            continue
        if first.kind in ("outer", "lookup"):
            sides = {"input": first.sides["input"], "output": other.sides["output"]}
            notes = {side: of.notes[side] for side, of in (("input", first), ("output", other)) if side in of.notes}
            found[name] = replace(other, sides=sides, notes=notes)
        else:
            found[name] = other
    return found


def randomised(layers: Mapping[str, LayerFactors], seed: int) -> dict[str, LayerFactors]:
    """The same spectra along random orthogonal directions; diagonal factors have their entries in a random order.

    The control that tells directions of curvature from a mere per-example normalisation by a metric of such a spectrum.
    The directions are those of the seed at every refresh.
    """
    generator = public_generator(seed, 0, "control")
    return {
        name: replace(of, sides={side: _randomised(factor, generator) for side, factor in of.sides.items()})
        for name, of in layers.items()
    }


def _randomised(factor: Factor, generator: torch.Generator) -> Factor:
    match factor:
        case Eigen():
            drawn = torch.randn(factor.vectors.shape, generator=generator, dtype=torch.float64)
            return replace(factor, vectors=torch.linalg.qr(drawn).Q.to(factor.vectors).contiguous())
        case DiagonalFactor():
            order = torch.randperm(factor.dim, generator=generator).to(factor.values.device)
            return DiagonalFactor(factor.values[order])
        case _:
            return factor


# --------------------------------------------------------------------------------------------------

RULES = ("linear", "conv", "embedding", "tied", "norm", "recurrent", "computed", "fallback")
_CHOICES: dict[str, tuple[str, ...]] = {
    "labels": LABELS,
    "likelihood": LIKELIHOODS,
    "sides": ("both", "input", "output"),
    "damping_mode": ("relative", "absolute"),
    "scale": ("probe", "trace", "balanced", "raw"),
    "sharing": ("expand", "reduce"),
    "oversize": ("diagonal", "identity", "low_rank"),
    "control": ("none", "random"),
}
# Left out where they are these, so that older plans keep their hash.
_LEFT_OUT: tuple[tuple[str, Any], ...] = (
    ("control", "none"), ("output_probe", None), ("tail_mass", 0.0), ("decay", 0.0), ("drift", 0.0), ("later_probe_size", None),
    ("ranks", {}),
)  # fmt: skip
_POSITIVE = ("probe_size", "later_probe_size", "chunk", "every", "max_factor_size")


@dataclass(frozen=True, kw_only=True)
class KFAC:
    """How curvature is measured and turned into a metric.

    Attributes:
        probe: where inputs come from; see `probes`.
        probe_size: examples a refresh looks at. A public constant, never the size of a private batch. A refresh costs
            little more than their forward and backward pass; for inputs alone the last 64 are differentiated and the others
            run forward only. Input factors of a sequence model are good from few examples already; output factors are not,
            where its positions have much the same gradient.
        chunk: probe examples a forward pass; bounds memory and changes nothing else (a `loss` of your own may draw
            other numbers).
        labels: `model` draws them from the model's predictive distribution (Fisher), `uniform` at random, `given` takes
            the probe's; where those do not fit the head they are drawn from the model, and the card says so.
        likelihood: categorical, gaussian or bernoulli; see `likelihood`.
        loss: maps (model output, generator) to losses `[N]`, instead of a likelihood.
        sides: input (A only), both (the DP-KFC paper) or output (G only). The other side becomes the identity times what
            its mean eigenvalue would give, so that every layer keeps its scale and only the directions differ. Whitening
            outputs too has gained nothing where it was measured, and lost half a point on MNIST's CNN; docs/results.md.
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
        oversize: what other wider sides become, diagonal or identity; low_rank draws `max_factor_size` of their rows instead.
        layer_rules: kinds of layers to precondition (those of `RULES`), None for all; the others are only scaled, as the
            other side of `sides`.
        rank_tolerance: eigenvalues below this fraction of the damping are not kept in low-rank sides.
        max_rank: pairs k kept of a side; all where narrower than 4k (k ≥ d too) or for None. Others keep their mean, so that
            the trace stays. Eigenvalues far below the first few are sampling noise of the probe anyway.
        ranks: side, such as `conv1.A`, to the eigenpairs it keeps, 0 for all, whatever `max_rank` says; see `report.structure`.
        tail_mass: share of a factor's trace that may be left out, 0 for none: a side keeps the fewest eigenpairs that hold the
            others, at most `max_rank` where it is wide, and the rest keep their mean.
        decay: share β of the past in factors that are averaged over refreshes, in [0, 1): about 1/(1 − β) probes stand behind
            each factor, so that every one of them can be small. 0 takes the newest probe alone; see `running`.
        later_probe_size: examples of every refresh after the first, at most `probe_size`, where factors are averaged: the first
            metric comes from all of `probe_size` then, the later ones cost less. None takes `probe_size` throughout.
        drift: a refresh whose probe shows factors that have moved less than this since the metric in force was built keeps that
            metric, and spares the eigenproblems; see `running.drift_of`. 0 always builds a new one.
        rows_per_dim: with `sharing="expand"`, a factor of size d is formed from about this many times d positions (4096
            or more) where the probe has more: a few of every example, chosen by a public stream and weighted so that the
            estimate stays unbiased. None takes every position.
        seed: of the probe's own random stream, one stream a step.
        output_probe: a second probe, for the output factors G; A comes from `probe` then. None takes both from one.
        control: `random` keeps every spectrum and takes random orthogonal directions, to tell curvature from scaling.
    """

    probe: Probe
    probe_size: int = 256
    chunk: int = 64
    labels: str = "model"
    likelihood: str = "categorical"
    loss: Callable[[Any, torch.Generator], Tensor] | None = None
    sides: str = "input"
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
    max_rank: int | None = 32
    ranks: Mapping[str, int] = field(default_factory=dict, hash=False)
    tail_mass: float = 0.0
    decay: float = 0.0
    later_probe_size: int | None = None
    drift: float = 0.0
    rows_per_dim: float | None = 4.0
    seed: int = 0
    output_probe: Probe | None = None
    control: str = "none"

    def __post_init__(self) -> None:
        check_probe(self.probe)
        check_probe(self.probe if self.output_probe is None else self.output_probe, "output_probe")
        check_choices(self, _CHOICES)
        check_positive(self, _POSITIVE)
        object.__setattr__(self, "ranks", check_ranks(self.ranks))
        if self.layer_rules is not None:
            object.__setattr__(self, "layer_rules", tuple(self.layer_rules))
            unknown = [rule for rule in self.layer_rules if rule not in RULES]
            if unknown or not self.layer_rules:
                raise ValueError(f"layer_rules must name some of {', '.join(RULES)}; got {list(self.layer_rules)}")
        if self.rows_per_dim is not None and not 1 <= self.rows_per_dim < float("inf"):
            raise ValueError(f"rows_per_dim must be at least 1, or None for every position; got {self.rows_per_dim}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")
        if self.later_probe_size is not None and (self.decay == 0 or self.later_probe_size > self.probe_size):
            raise ValueError(
                f"later_probe_size needs factors that are averaged over refreshes (decay above 0) and is at most probe_size = "
                f"{self.probe_size}; got {self.later_probe_size} with decay {self.decay}"
            )
        if not 0 <= self.drift < float("inf"):
            raise ValueError(f"drift must be a number of at least 0, got {self.drift}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        self._damping()

    @property
    def name(self) -> str:
        """Short name: kfac, kfac-a (inputs only) or kfac-g (output gradients only)."""
        return {"both": "kfac", "input": "kfac-a", "output": "kfac-g"}[self.sides]

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        own = described(self, self.name)
        own["layer_rules"] = None if self.layer_rules is None else list(self.layer_rules)
        return {name: value for name, value in own.items() if (name, value) not in _LEFT_OUT}

    def due(self, step: int) -> bool:
        """Whether the metric is to be rebuilt before this step (from 0)."""
        return step % self.every == 0

    def run_at(self, step: int, *, later: bool = False) -> ProbeRun:
        """The probe of one refresh; `later` where it takes up one before."""
        return ProbeRun(
            probe=self.probe, size=(later and self.later_probe_size) or self.probe_size, chunk=self.chunk,
            labels=self.labels if self.output_probe is None else labels_of(self.probe, self.labels),
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
        with undisturbed(model), torch.no_grad():
            seen = self._look(model, capture, self.run_at(step), rules)
            return dict(combined(*(decomposed(part.layers, lambda *_: None, model, past={}, share=0.0)[0] for part in seen)))

    @property
    def continues(self) -> bool:
        """Whether a refresh takes up the one before."""
        return self.decay > 0 or self.drift > 0

    @property
    def divides(self) -> bool:
        """Whether processes may each run a part of the probe; a loss that draws numbers of its own has to see all of it."""
        return self.loss is None

    def _look(
        self, model: nn.Module, capture: Capture, run: ProbeRun, rules: Mapping[str, str] | None, team: Team | None = None
    ) -> list[Measured]:
        """What a pass over `probe`, and one over `output_probe` where there is one, show."""
        if self.layer_rules is not None and rules is None:
            raise ValueError("layer_rules was set, so build() needs rules={layer name: rule}")
        structure = Structure(
            sharing=self.sharing, sides=self.sides, max_factor_size=self.max_factor_size, decays=self.decay > 0,
            oversize=self.oversize, rules=self.layer_rules, kinds=rules or {}, rows_per_dim=self.rows_per_dim,
        )  # fmt: skip
        runs = [run]
        if self.output_probe is not None:
            runs.append(replace(run, probe=self.output_probe, labels=labels_of(self.output_probe, self.labels)))
        return [measure(model, capture, run, structure, team) for run in runs]

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Mapping[str, str] | None = None,
        team: Team | None = None,
        *,
        previous: Preconditioner | None = None,
    ) -> Preconditioner:
        """Measure curvature on the probe at the model's present parameters.

        Args:
            model: any module; parameters, gradients, buffers, modes and the global random state stay as they are.
            capture: maps (model, loss) to layer name and block; `loss(model)` gives per-example losses `[N]`. Blocks
                are looked up one at a time, so the mapping may form them on demand. It is called under `torch.no_grad()`
                for examples of which inputs alone are wanted; what blocks hold as `b` is not looked at then.
            step: step of training; with `seed` it names the probe's random stream.
            rules: layer name to kind, one of `RULES`.
            team: the processes that share the refresh; each runs a part of the probe and decomposes a part of the factors.
            previous: of the refresh before, where `continues`.

        Returns:
            The preconditioner; never with a NaN in it. The previous one, with this step, where its factors have moved less
            than `drift`.

        Raises:
            ValueError: the model's output, loss or a layer's contribution on the probe is not finite or does not fit.
        """
        with undisturbed(model), torch.no_grad():
            past: tuple[Running, ...] = () if previous is None else previous.running
            run = self.run_at(step, later=any(past))
            seen = self._look(model, capture, run, rules, team)
            past = past or ({},) * len(seen)
            shown = [gathered(part.layers, model, team) for part in seen]
            moved = None
            if self.drift > 0 and any(past):
                moved = max(drift_of(layers, of, team) for layers, of in zip(shown, past, strict=True))
            if previous is not None and moved is not None and moved < self.drift:
                return replace(previous, step=step, drift=moved)
            own = [
                decomposed(layers, self._keep, model, team, past=of, share=self.decay, remember=self.continues)
                for layers, of in zip(shown, past, strict=True)
            ]
            factors = combined(*(found for found, _ in own))
            used, damping = self._used(factors), self._damping()
            check_sides(self.ranks, {name: f.sides for name, f in used.items()})
            metric, scale = metric_of(used, damping, self.max_factor_size, partial(rank_of, self.ranks)), 1.0
            if self.scale in ("probe", "balanced"):
                scale = probe_scale(model, capture, run, metric, last=seen[0].last, team=team)
                metric = scale_metric(metric, scale)
        rows = [row for n in metric for row in layer_rows(n, factors[n], used[n], metric[n], damping)]
        return Preconditioner(
            metric=metric,
            step=step,
            report=(*rows, *left_alone(metric, seen[0].unknown, rules or {})),
            scale=scale,
            spectra={n: {SHORT.get(s, s): x.spectrum.cpu() for s, x in f.sides.items()} for n, f in factors.items()},
            shapes={n: shapes_of(model, n, f) for n, f in factors.items()},
            note=seen[0].note,
            running=tuple(kept for _, kept in own) if self.continues else (),
            drift=moved,
        )

    def _used(self, factors: Mapping[str, LayerFactors]) -> Mapping[str, LayerFactors]:
        """The factors that the metric is formed of: in one scale, none of them empty, and turned at random where asked."""
        used = {n: f.normalised() for n, f in factors.items()} if self.scale in ("trace", "balanced") else factors
        used = filled(used) if self.damping_mode == "relative" else used
        return randomised(used, self.seed) if self.control == "random" else used

    def _keep(self, layer: str, side: str) -> int | None:
        return self.max_rank if (own := rank_of(self.ranks, layer, side)) is None else own or None

    def _damping(self) -> Damping:
        return Damping(
            value=self.damping, mode=self.damping_mode, gamma=self.gamma,
            exponent=self.exponent, rank_tolerance=self.rank_tolerance, max_rank=self.max_rank,
            tail_mass=self.tail_mass,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Preconditioner:
    """A metric built at one step, with what is worth knowing about it.

    Attributes:
        metric: layer name to map; layers that are absent keep the identity.
        step: step at which it was built, or found to have moved too little for that.
        report: one row a side: layer, side, dim, kind (dense, lowrank, diagonal, identity), rank, trace,
            condition_before, condition_after, note.
        scale: the one factor of the whole metric, already in `metric`.
        spectra: layer to `A` and `G` (or the role of an elementwise parameter) to undamped, unscaled eigenvalues; those
            beyond the first `max_rank` of a wide side by their mean.
        shapes: layer to its kind and the sizes of its sides, for `check`.
        note: what the card should say beside the settings.
        running: what the next refresh takes up, one entry a probe; empty unless `KFAC.continues`.
        drift: how far the factors had moved when they were looked at last, None where that was not asked.
    """

    metric: Metric
    step: int
    report: tuple[Mapping[str, Any], ...] = ()
    scale: float = 1.0
    spectra: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    note: str = ""
    running: tuple[Running, ...] = ()
    drift: float | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors, ready for safetensors; `from_state_dict` restores every bit."""
        rest = {"step": self.step, "scale": self.scale, "shapes": dict(self.shapes)}
        rest["report"] = [dict(row) for row in self.report]
        rest |= {"note": self.note} if self.note else {}
        rest |= {} if self.drift is None else {"drift": self.drift}
        kept, rest["running"] = running_state(self.running)
        return pack(self.metric, self.spectra, rest) | kept

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Preconditioner:
        """The preconditioner that wrote this state.

        Raises:
            ValueError: tensors that `state_dict` did not write.
        """
        metric, spectra, rest = unpack(state)
        return cls(
            metric=metric, step=rest["step"], report=tuple(rest["report"]), scale=rest["scale"],
            spectra=spectra, shapes=rest["shapes"], note=rest.get("note", ""), drift=rest.get("drift"),
            running=running_from(state, rest.get("running", [])),
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
        """The same preconditioner with its metric, and what the next refresh takes up, on another device."""
        running = moved_to(self.running, torch.device(device))
        return replace(self, metric={name: entry.to(device) for name, entry in self.metric.items()}, running=running)

    def check(self, layers: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Raise unless this preconditioner fits a model.

        Args:
            layers: layer name to the shapes of its trainable parameters, role to shape.

        Raises:
            ValueError: naming the first layer that is missing or of another shape.
        """
        missing = [name for name in self.metric if name not in layers]
        extra = [name for name in layers if name not in self.metric and name not in self._left_alone]
        problems = [(n, "is not in the model") for n in missing] + [(n, "has no entry in it") for n in extra]
        for name, shape in self.shapes.items() if not problems else ():
            what = mismatch(shape, {role: tuple(s) for role, s in layers[name].items()})
            problems += [] if what is None else [(name, f"has {what}")]
        for name, what in problems:
            raise ValueError(f"the preconditioner belongs to another model: layer '{name}' {what}; build a new one")

    @property
    def _left_alone(self) -> set[str]:
        return {row["layer"] for row in self.report if not row["side"]}
