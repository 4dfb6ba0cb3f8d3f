"""The coordinates of a run: the preconditioner that is in force, its metric at a step, and when it is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import probe_examples
from dpkfc.curvature.kfac import Preconditioner
from dpkfc.curvature.probe_pass import Capture, agreed, blocks_on_probe, digest_of_probes, moved_to, undisturbed
from dpkfc.curvature.refresh import SCALE_SIZE
from dpkfc.distributed import Ranks, advice, check_in_step
from dpkfc.fsdp import is_divided, reshard
from dpkfc.gradients.clipped_sum import capture
from dpkfc.gradients.clipping import diagonal_metric
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.blocks import write_out_patches
from dpkfc.linalg.metric import Metric
from dpkfc.memory import MicroBatchSize
from dpkfc.privacy.mechanism import Released
from dpkfc.rng_state import device_of

# --------------------------------------------------------------------------------------------------
# How many examples of a probe a refresh runs at once: no more than a step of the run holds.
#
# Where that is fewer than the examples on which the scale of a metric is measured, it is half as
# many: a refresh holds the factors of all layers beside what it runs, and no pass is saved by more,
# as those examples run through the model a second time either way (or none do, where a method has
# no such scale). With all of them at once they run once, which halving would undo.
#
# The number comes from public settings alone; where these are "auto", also from what passes over
# the PROBE take of the memory. What steps have found for their own micro-batches is not asked:
# private batches have decided it, and the last bits of a metric, which depend on how sums are cut,
# are not protected by any noise.

T = TypeVar("T")


def at_once(config: Any, most: int) -> int:
    """Examples at once of a preconditioner with a `chunk`, where a step holds `most`; at least 1."""
    rows: int = min(config.chunk, most)
    if not hasattr(config, "probe"):
        return rows
    smallest = getattr(config, "later_probe_size", None) or probe_examples(config.probe, getattr(config, "probe_size", None))
    return rows if rows >= min(config.chunk, SCALE_SIZE, smallest) else -(-rows // 2)


class ProbeRows:
    """The examples at once of all refreshes of one run.

    Args:
        most: what a step holds; None leaves preconditioners as they are.
        automatic: whether fewer are tried where memory runs out; otherwise that is an error.
    """

    def __init__(self, most: int | None = None, automatic: bool = False) -> None:
        self._most, self._size = most, MicroBatchSize(automatic=automatic, what="probe example")

    def measure(
        self, config: Any, model: nn.Module, capture: Capture, step: int, *, ranks: Ranks, device: torch.device
    ) -> None:
        """Before the first refresh of an automatic run on a CPU: bound the number by the bytes of a few probe examples.

        Args:
            config: the preconditioner.
            model: looked at on its probe, and left as it is.
            capture: as for `build`.
            step: names the probe's random stream.
            ranks: all of which take the least that any of them finds; one for a refresh that one process makes.
            device: of the model.
        """
        rows = self._rows(config)
        if rows is None or not self._size.automatic or self._size.bound is not None or not hasattr(config, "run_at"):
            return

        def look(n: int) -> None:
            run = replace(config.run_at(step), size=n, chunk=n)
            with undisturbed(model), torch.no_grad():
                for piece in blocks_on_probe(model, capture, run):
                    for name in piece.blocks:
                        write_out_patches(piece.blocks[name])

        self._size.measure(look, rows, device)
        self._size.bound = min(ranks.everyone(min(rows, self._size.bound or rows)))

    def fit(self, config: Any, build: Callable[[Any], T]) -> T:
        """The result of `build` for the preconditioner with as many examples at once as may be.

        Args:
            config: the preconditioner.
            build: builds with a preconditioner that differs from it in `chunk` alone, and keeps nothing when it fails. Where
                several processes build together, it raises on all or on none.

        Raises:
            RuntimeError: it is out of memory at a number that was given, or with one example.
        """
        rows = self._rows(config)
        if rows is None:
            return build(config)
        if not self._size.automatic:
            self._size.bound = rows
        return self._size.fit(partial(_with_rows, config, build, rows), rows)

    def _rows(self, config: Any) -> int | None:
        """Examples at once, None where that is not to be changed: of a loss that draws numbers of its own it is a setting."""
        chunk: int | None = getattr(config, "chunk", None) if is_dataclass(config) else None
        own = getattr(config, "loss", None) is not None
        return None if self._most is None or chunk is None or own else at_once(config, self._most)


def _with_rows(config: Any, build: Callable[[Any], T], rows: int, bound: int | None) -> T:
    return build(replace(config, chunk=min(rows, bound or rows)))


# --------------------------------------------------------------------------------------------------

_ALONE = Ranks()


class Coordinates:
    """Holds what `PrivacyConfig.preconditioner` builds. Functions of probes, released weights, releases and the step only.

    `refreshed` lists the steps before which that was, for the card; what came with a checkpoint is not among them.

    Args:
        config: with `due(step)` and `build(...)`; optionally `metric_at(preconditioner, step)` for a metric that changes
            between refreshes, `observe(released, past)` for one that is made from past releases, `continues` for one whose
            refresh takes up the one before, and `divides` for one whose refresh processes can share (`build(..., team=)`);
            others are built by the first process. None: the identity.
        model, layers: the model and its layers.
        ranks: the processes that share a refresh.
        rows: examples of a probe that a refresh may run at once, and whether fewer are tried where memory runs out; see
            `PrivacyConfig.refresh_rows`. The default leaves the preconditioner's own number as it is.
    """

    def __init__(
        self,
        config: Any,
        model: nn.Module,
        layers: Sequence[Layer],
        ranks: Ranks = _ALONE,
        rows: tuple[int | None, bool] = (None, False),
    ) -> None:
        self._config, self._model, self._layers, self._ranks, self._rows = config, model, layers, ranks, ProbeRows(*rows)
        self.current: Preconditioner | None = None
        self.past: Mapping[str, Tensor] = {}
        self.refreshed: list[int] = []
        self._step = 0

    @property
    def metric(self) -> Metric:
        """The metric in which this step clips and adds noise."""
        if self.current is None:
            return {}
        changing = getattr(self._config, "metric_at", None)
        return self.current.metric if changing is None else changing(self.current, self._step)

    def refresh(self, step: int) -> None:
        """Rebuild the metric before a step, when its interval has passed."""
        self._step = step
        if self._config is None or not (self.current is None or self._config.due(step)):
            return
        if self.current is not None and self.current.step == step:
            return
        more: dict[str, Any] = {"previous": self.current} if getattr(self._config, "continues", False) else {}
        if hasattr(self._config, "observe"):
            more |= {"past": self.past, "diagonal": lambda scales: diagonal_metric(self._layers, scales)}
        check_in_step(self._ranks, {n: p for n, p in self._model.named_parameters() if p.requires_grad}, "refresh")
        more |= {"rules": {layer.name: layer.rule for layer in self._layers}}
        if self._ranks.world_size == 1:
            self.current = self._built(step, _ALONE, **more)
        elif (divided := is_divided(self._model)) or getattr(self._config, "divides", False):
            more |= {} if divided else {"team": self._ranks}
            build = partial(self._built, step, self._ranks, **more)  # through a divided model all make the same passes
            if divided:  # and none of them sees that another has other inputs: what differs would be put down to rounding
                agreed("probe", self._ranks.everyone(self._ranks.together(partial(digest_of_probes, self._config, step))))
            self.current = self._ranks.in_step(build) if divided else build()
            self._ranks.agree(lambda: {"metric": ("", self.current and self.current.digest)}, advice)
        else:
            self.current = self._from_first(step, **more)
        if self.current is not None and self.current.step not in self.refreshed[-1:]:  # one that stands is no refresh
            self.refreshed.append(self.current.step)

    def _built(self, step: int, ranks: Ranks, **more: Any) -> Preconditioner:
        """Built by these processes, with as many examples at once as fit on all of them."""
        alike = ranks.together if "team" in more else None  # or memory that one lacks would end the run on it alone

        def build(config: Any) -> Preconditioner:
            make: Callable[[], Preconditioner] = partial(config.build, self._model, self._capture, step, **more)
            return make() if alike is None else alike(make)

        self._rows.measure(self._config, self._model, self._capture, step, ranks=ranks, device=device_of(self._layers))
        built = self._rows.fit(self._config, build)
        reshard(self._model)
        return built

    def _capture(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Mapping[str, Any]:
        return capture(model, self._layers, loss)

    def _from_first(self, step: int, **more: Any) -> Preconditioner:
        """Built on the first rank, while the others wait: what does not say how to be divided."""
        cpu, here = torch.device("cpu"), device_of(self._layers)
        return moved_to(self._ranks.from_first(lambda: moved_to(self._built(step, _ALONE, **more), cpu)), here)

    def loaded(self, state: Mapping[str, Tensor]) -> Preconditioner:
        """The preconditioner of a checkpoint, once it is known to fit the model.

        Raises:
            ValueError: it does not.
        """
        kind: type[Preconditioner] = getattr(self._config, "result", Preconditioner)
        preconditioner = kind.from_state_dict(dict(state)).to(device_of(self._layers))
        preconditioner.check({layer.name: {r: layer.tensor(r).shape for r in layer.parameters} for layer in self._layers})
        return preconditioner

    def observe(self, released: Released) -> None:
        """Let a preconditioner that is made from past releases see this one, in the coordinates it was released in."""
        if hasattr(self._config, "observe"):
            self.past = self._config.observe(released, self.past)
