"""Hold the preconditioner in force during a run, and rebuild it when it is due.

A forward pass of a refresh runs no more probe examples than a step of the run holds.

A refresh holds the factors of all layers next to its micro-batch. Below the number of examples on
which the scale of a metric is measured, the micro-batch is therefore half of what a step holds:
these examples run through the model a second time in any case. With all of them in one
micro-batch they run once, which halving would undo.

The number follows from public settings. With "auto" it also follows from the memory that passes
over the PROBE take. It never follows from the micro-batch size that steps have found: private
batches have decided that, and no noise protects the last bits of a metric, which depend on how
sums are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.base import Preconditioner, PreconditionerState
from dpkfc.curvature.metric_scale import SCALE_SIZE
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import digest_of_probes, run_probe
from dpkfc.curvature.refresh_group import check_same_probe
from dpkfc.distributed.consistency import check_in_step, fix_hint
from dpkfc.distributed.context import SINGLE_PROCESS, DistributedContext
from dpkfc.distributed.fsdp import is_divided, reshard
from dpkfc.gradients.layer_contributions import capture
from dpkfc.gradients.layer_matrices import map_groups, matrix_of
from dpkfc.gradients.layers import Layer, device_of_layers
from dpkfc.linalg.metric import Entry, Metric
from dpkfc.memory import MicroBatchSize, RowLimit
from dpkfc.tensors import NamedTensors, copy_to_device

_NO_LIMIT = RowLimit()


def refresh_microbatch_size(
    config: Preconditioner, most: int | None, *, first: bool = True
) -> int | None:
    """Return the probe examples of one forward pass, at least 1; None if it must not be changed.

    Args:
        config: the preconditioner.
        most: examples that a step holds; None leaves preconditioners as they are.
        first: whether the refresh continues from none; a later one may have fewer examples.
    """
    size = config.microbatch_size
    if size is None or most is None:
        return None
    rows = min(size, most)
    examples = config.fewest_probe_examples
    if first:
        examples = max([examples, *(spec.size for spec in config.probe_specs(0))])
    if rows >= min(size, SCALE_SIZE, examples):
        return rows
    return math.ceil(rows / 2)


class PreconditionerManager:
    """Holds the state of the preconditioner of a run, and rebuilds it when it is due.

    The state is a function of probes, released weights and the step only. `refreshed`
    lists the steps of refreshes, for the privacy card; a state from a checkpoint adds none.

    Args:
        config: the preconditioner; None is the identity.
        model, layers: the model and its layers.
        ranks: the processes that share a refresh.
        probe_limit: the probe examples that a refresh may run at once, from
            `PrivacyConfig.refresh_rows`. By default the preconditioner decides.
    """

    def __init__(
        self,
        config: Preconditioner | None,
        model: nn.Module,
        layers: Sequence[Layer],
        ranks: DistributedContext = SINGLE_PROCESS,
        probe_limit: RowLimit = _NO_LIMIT,
    ) -> None:
        self._config = config
        self._model = model
        self._layers = layers
        self._ranks = ranks
        self._most_rows = probe_limit.most
        # The probe micro-batch size of all refreshes.
        self._size = MicroBatchSize(automatic=probe_limit.automatic, what="probe example")
        self.current: PreconditionerState | None = None
        self.refreshed: list[int] = []
        self._step = 0

    @property
    def metric(self) -> Metric:
        """The metric in which this step clips and adds noise."""
        if self._config is None or self.current is None:
            return {}
        return self._config.metric_at(self.current, self._step)

    def set_state(self, state: PreconditionerState) -> None:
        """Take a state that was built from a release."""
        self.current = state
        self.refreshed.append(state.step)

    def refresh(self, step: int) -> None:
        """Rebuild the metric before a step if it is due."""
        self._step = step
        config = self._config
        if config is None:
            return
        if self.current is not None and (self.current.step == step or not config.is_due(step)):
            return
        trainable = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        check_in_step(self._ranks, trainable, "refresh")
        self.current = self._build_on_ranks(config, step)
        # A refresh with too little drift keeps the state, and a step is listed once.
        if self.current.step not in self.refreshed[-1:]:
            self.refreshed.append(self.current.step)

    def _build_on_ranks(self, config: Preconditioner, step: int) -> PreconditionerState:
        """Build on this process, on all of them together, or on the first."""
        arguments: dict[str, Any] = {"rules": {layer.name: layer.rule for layer in self._layers}}
        if config.uses_previous_state:
            arguments["previous"] = self.current
        ranks = self._ranks
        if ranks.world_size == 1:
            return self._build(config, step, SINGLE_PROCESS, **arguments)
        if is_divided(self._model):
            # All processes make the same passes through a sharded model. A process cannot notice
            # that another drew a different probe: the difference looks like rounding. So the
            # hashes of the probes are compared first.
            specs = config.probe_specs(step)
            digests = ranks.all_gather(ranks.run_on_all(partial(digest_of_probes, specs)))
            check_same_probe(digests)
            state = ranks.run_collective(partial(self._build, config, step, ranks, **arguments))
        elif config.supports_distributed_build:
            state = self._build(config, step, ranks, team=ranks, **arguments)
        else:
            return self._build_on_first(config, step, **arguments)
        ranks.check_consistent(lambda: {"metric": ("", state.digest)}, fix_hint)
        return state

    def _build(
        self, config: Preconditioner, step: int, ranks: DistributedContext, **arguments: Any
    ) -> PreconditionerState:
        """Build on these processes, with a micro-batch that fits on all of them."""

        def build(config: Preconditioner) -> PreconditionerState:
            make = partial(config.build, self._model, self._capture, step, **arguments)
            # A team retries together, or a lack of memory on one process would end the run there.
            return ranks.run_on_all(make) if "team" in arguments else make()

        rows = refresh_microbatch_size(config, self._most_rows, first=self.current is None)
        if rows is None:
            state = build(config)
        else:
            self._bound_size(config, step, rows, ranks)
            most: int = rows

            def build_with(bound: int | None) -> PreconditionerState:
                return build(config.with_microbatch_size(min(most, bound or most)))

            state = self._size.fit(build_with, rows)
        reshard(self._model)
        return state

    def _bound_size(
        self, config: Preconditioner, step: int, rows: int, ranks: DistributedContext
    ) -> None:
        """Bound the probe examples of a pass by what a step holds.

        The first automatic refresh bounds them by the bytes of a few examples too. All processes
        take the smallest bound.
        """
        size = self._size
        if not size.automatic:
            size.bound = rows
            return
        specs = config.probe_specs(step)
        if not specs or size.bound is not None:
            return

        def run_examples(count: int) -> None:
            spec = replace(specs[0], size=count, chunk=count)
            with preserve_model(self._model), torch.no_grad():
                for microbatch in run_probe(self._model, self._capture, spec):
                    # Formed on demand, one at a time.
                    for name in microbatch.blocks:
                        microbatch.blocks[name].explicit()

        size.measure(run_examples, rows, device_of_layers(self._layers))
        own_bound = min(rows, size.bound or rows)
        size.bound = min(ranks.all_gather(own_bound))

    def _capture(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Mapping[str, Any]:
        return capture(model, self._layers, loss)

    def _build_on_first(
        self, config: Preconditioner, step: int, **arguments: Any
    ) -> PreconditionerState:
        """Build on the first process while the others wait, and send the state to all."""
        cpu = torch.device("cpu")

        def build() -> PreconditionerState:
            return copy_to_device(self._build(config, step, SINGLE_PROCESS, **arguments), cpu)

        return copy_to_device(
            self._ranks.broadcast_from_rank0(build), device_of_layers(self._layers)
        )

    def restore(self, tensors: NamedTensors) -> PreconditionerState:
        """Return the state of a checkpoint.

        Raises:
            ValueError: the state is damaged, or has an entry for a layer of another model.
        """
        state = PreconditionerState.from_state_dict(tensors)
        layers = {layer.name: layer for layer in self._layers}
        for name, entry in state.metric.items():
            is_known = name in layers
            if not is_known or not _fits(layers[name], entry):
                difference = "has other shapes" if is_known else "is not in the model"
                raise ValueError(
                    f"the preconditioner belongs to another model: layer '{name}' {difference};"
                    " build a new one"
                )
        return state.to(device_of_layers(self._layers))


def _fits(layer: Layer, entry: Entry) -> bool:
    """Return whether an entry maps gradients of the shapes of a layer's parameters."""
    if entry.is_elementwise:
        shapes = {role: layer.tensor(role).shape for role in layer.parameters}
        return all(shapes.get(role) == scale.shape for role, scale in entry.scales.items())
    # An entry is kept in single or in double precision.
    return any(_maps_zeros(layer, entry, dtype) for dtype in (torch.float32, torch.float64))


def _maps_zeros(layer: Layer, entry: Entry, dtype: torch.dtype) -> bool:
    zeros = {}
    for role, name in layer.parameters.items():
        zeros[name] = torch.zeros(layer.tensor(role).shape, dtype=dtype)
    matrix = matrix_of(layer, zeros)
    try:
        mapped = map_groups(layer, matrix, entry.apply)
    except (RuntimeError, ValueError):
        return False
    return mapped.shape == matrix.shape
