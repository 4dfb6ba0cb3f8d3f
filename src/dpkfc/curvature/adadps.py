"""AdaDPS: every entry of a gradient divided by the root of its second moment on public data, before the clip.

    v = mean over mini-batches of (mean gradient of a mini-batch)²      at the released parameters
    z_i = g_i ⊘ √(v + ε),   clip_C(z_i),   + noise;   the step is z̄ (nothing is mapped back)

v reads public data or synthetic inputs only, so the cost is that of DP-SGD. An entry without any gradient on the probe has
the factor 1/√ε: with an absolute ε of 1e-10 such entries are multiplied by 1e5 and fill every clipped gradient. Here ε is a
share of the mean of v, and one number for the whole map keeps the median gradient norm of the probe what it is without it.

Source: Li et al. (2022), Algorithm 1 (RMSProp form, public data).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import check_choices, check_positive, check_probe, described, probe_examples
from dpkfc.curvature.damping import identity_row
from dpkfc.curvature.kfac import Preconditioner
from dpkfc.curvature.layer_factors import is_known
from dpkfc.curvature.ngd import PER, Moments, Sums, condition, eigenvalues, squared_gradients, summed_gradients
from dpkfc.curvature.probe_loss import LABELS, LIKELIHOODS
from dpkfc.curvature.probe_pass import Capture, Piece, ProbeRun, blocks_on_probe, undisturbed
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.refresh import kept_for_scale, probe_scale
from dpkfc.linalg.blocks import write_out_patches
from dpkfc.linalg.metric import Entry, Metric, scale_metric

# (added inside the root, added to the root, refreshed) of the code that others have released
_RELEASED = {"adadps": (1e-10, 0.0, True), "dp2": (0.0, 1e-7, True), "dp-kfc": (1e-10, 0.0, False)}


@dataclass(frozen=True, kw_only=True)
class AdaDPS:
    """How a diagonal metric is made from public data or synthetic inputs.

    Attributes:
        probe: where inputs come from: `PublicData(inputs, labels, ...)`, or noise (`PinkNoise(...)`, "pink AdaDPS").
        batch_size: examples of a public mini-batch; None takes the whole probe as one.
        probe_size: examples a refresh; None takes all that the probe holds (256 of an endless one). Rounded down to whole
            mini-batches.
        floor: ε as a share of the mean of v over all entries of the model.
        every: steps between refreshes.
        decay: β of v ← β v + (1 − β) v_new over the refreshes; 0 keeps the last one alone.
        per: `batch` squares the mean gradient of a mini-batch, `example` every example's own.
        labels: None takes the probe's labels where it has some, and draws them from the model elsewhere; or as in `KFAC`.
        likelihood, loss: as in `KFAC`.
        scale: `probe` keeps the median norm on the probe, `raw` takes 1/√(v + ε) as it is.
        as_released: the absolute ε and raw scale of published code, for reproductions: `adadps` (1e-10 inside the root), `dp2`
            (1e-7 added to the root; with batch_size=None, decay=0.9, every=1) or `dp-kfc` (as adadps, and never refreshed).
        seed: of the probe's own random stream.
        chunk: examples of a mini-batch in one forward pass; bounds memory and changes nothing else (a `loss` of your own may
            draw other numbers).
    """

    probe: Probe
    batch_size: int | None = 20
    probe_size: int | None = None
    floor: float = 1e-3
    every: int = 50
    decay: float = 0.0
    per: str = "batch"
    labels: str | None = None
    likelihood: str = "categorical"
    loss: Callable[[Any, torch.Generator], Tensor] | None = None
    scale: str = "probe"
    as_released: str | None = None
    seed: int = 0
    chunk: int = 64

    def __post_init__(self) -> None:
        check_probe(self.probe)
        choices = {"labels": (None, *LABELS), "likelihood": LIKELIHOODS, "per": PER, "scale": ("probe", "raw")}
        check_choices(self, {**choices, "as_released": (None, *_RELEASED)})
        check_positive(self, ("probe_size", "every", "chunk"))
        size = self.batch_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"batch_size must be an integer of at least 1 or None, got {size!r}")
        if not (self.floor > 0 and math.isfinite(self.floor)):
            raise ValueError(f"floor must be positive and finite, got {self.floor}; 1e-3 is a good start")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")

    @property
    def continues(self) -> bool:
        """Whether a refresh takes up the one before."""
        return self.decay > 0

    @property
    def resolved_labels(self) -> str:
        """Where labels come from."""
        if self.labels is not None:
            return self.labels
        return "given" if self.probe.describe().get("labelled") else "model"

    def describe(self) -> dict[str, Any]:
        """JSON-able description for the plan's hash and the privacy card."""
        run = self.run_at(0)
        name = "adadps" if self.as_released is None else f"adadps as released by {self.as_released}"
        own = described(self, name, probe_size=run.size, labels=run.labels)
        return {what: value for what, value in own.items() if (what, value) != ("chunk", 64)}  # older plans keep their hash

    def due(self, step: int) -> bool:
        """Whether the metric is to be rebuilt before this step (from 0)."""
        refreshed = self.as_released is None or _RELEASED[self.as_released][2]
        return step % self.every == 0 if refreshed else step == 0

    def run_at(self, step: int) -> ProbeRun:
        """The probe of one refresh, in whole mini-batches."""
        size = probe_examples(self.probe, self.probe_size)
        batch = min(size, self.batch_size or size)
        return ProbeRun(
            probe=self.probe, size=size // batch * batch, chunk=min(batch, self.chunk), labels=self.resolved_labels,
            likelihood=self.likelihood, loss=self.loss, seed=self.seed, step=step, within=batch,
        )  # fmt: skip

    def build(
        self,
        model: nn.Module,
        capture: Capture,
        step: int,
        rules: Mapping[str, str] | None = None,
        previous: Preconditioner | None = None,
    ) -> Preconditioner:
        """Measure second moments on the probe at the model's present parameters; arguments as in `KFAC.build`.

        Args:
            model: any module; left as it is.
            capture: maps (model, loss) to layer name and block.
            step: names the random stream.
            rules: layer name to kind.
            previous: what the last refresh built, read where `decay` is not 0.

        Raises:
            ValueError: what the model gives on the probe is not finite, or nothing has a gradient there.
        """
        with undisturbed(model), torch.no_grad():
            moments, last, note = self._moments(model, capture, step)
            values = {name: self._averaged(name, of, previous) for name, of in moments.items()}
            shift = self.floor * _mean(values)
            if not shift > 0:
                raise ValueError("no parameter has a gradient on the probe; check its labels and the model's output on it")
            metric: Metric = {n: of.entry({r: self._root(v, shift) for r, v in values[n].items()}) for n, of in moments.items()}
            scale = 1.0
            if self.as_released is None and self.scale == "probe":
                scale = probe_scale(model, capture, self.run_at(step), metric, last=last)
                metric = scale_metric(metric, scale)
        unreached = [identity_row(name) for name in rules or {} if name not in metric]
        spectra = {name: {role: x.flatten().cpu() for role, x in of.items()} for name, of in values.items()}
        return Preconditioner(
            metric=metric,
            step=step,
            report=(*(row for n in metric for row in _rows(n, metric[n], spectra[n], shift)), *unreached),
            scale=scale,
            spectra=spectra,
            shapes={name: of.shapes for name, of in moments.items()},
            note=note,
        )

    def _moments(self, model: nn.Module, capture: Capture, step: int) -> tuple[dict[str, Moments], Piece | None, str]:
        """Second moments of every layer, the last micro-batch if the scale can be measured on it, and what became of labels."""
        found: dict[str, Moments] = {}
        pending: dict[str, Sums] = {}  # of the mini-batch that is not over
        last, note = None, ""
        run = self.run_at(step)
        for piece in blocks_on_probe(model, capture, run):
            whole = run.within or run.size
            ends = piece.rows.stop % whole == 0
            for name in piece.blocks:
                if not is_known(block := write_out_patches(piece.blocks[name])):
                    continue
                with _named(name):
                    if self.per == "example":
                        _add(found, name, squared_gradients(block, self.per))
                    else:
                        _add(pending, name, summed_gradients(block))
                        if ends:
                            _add(found, name, pending.pop(name).squared(whole))
                del block
            for name in list(pending) if ends else ():  # layers that its last part has not called
                with _named(name):
                    _add(found, name, pending.pop(name).squared(whole))
            last, note = kept_for_scale(piece, run), piece.note
            del piece
        return found, last, note

    def _averaged(self, name: str, of: Moments, previous: Preconditioner | None) -> dict[str, Tensor]:
        """v of a layer, with what the refreshes before have left in it."""
        if previous is None or not self.decay or name not in previous.spectra:
            return of.mean
        before = eigenvalues(previous.metric[name], previous.spectra[name])
        return {role: self.decay * before[role].to(x) + (1 - self.decay) * x for role, x in of.mean.items()}

    def _root(self, values: Tensor, shift: float) -> Tensor:
        inside, outside, _ = (shift, 0.0, True) if self.as_released is None else _RELEASED[self.as_released]
        return 1 / ((values + inside).sqrt() + outside)


_Added = TypeVar("_Added", Moments, Sums)


def _add(held: dict[str, _Added], name: str, new: _Added) -> None:
    held[name] = held[name].plus(new) if name in held else new


@contextmanager
def _named(name: str) -> Iterator[None]:
    """An error of a layer's values with the name of the layer."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer '{name}': {error}") from error


def _mean(values: Mapping[str, Mapping[str, Tensor]]) -> float:
    """Mean of v over all entries of the model."""
    held = [x for of in values.values() for x in of.values()]
    return sum(float(x.sum()) for x in held) / max(1, sum(x.numel() for x in held))


def _rows(name: str, entry: Entry, spectrum: Mapping[str, Tensor], shift: float) -> list[dict[str, Any]]:
    values = eigenvalues(entry, spectrum)
    return [
        {
            "layer": name,
            "side": role,
            "dim": v.numel(),
            "kind": "diagonal",
            "rank": int((v > 0).sum()),
            "trace": float(v.sum()),
            "condition_before": condition({role: v}),
            "condition_after": condition({role: v + shift}),
            "note": "" if bool((v > 0).all()) else f"{float((v == 0).double().mean()):.0%} without a gradient on the probe",
        }
        for role, v in values.items()
    ]
