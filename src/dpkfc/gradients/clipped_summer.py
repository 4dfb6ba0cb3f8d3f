"""The clipped sum of a logical batch, from the calls or blocks of its micro-batches.

Norms are taken in the metric, each example is clipped once over all layers, unwhitened sums are
accumulated, and every layer's sum is whitened once at the end. Any split into micro-batches gives
the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.gradients.clip import Clip, clip_factors
from dpkfc.gradients.full_precision import full_precision
from dpkfc.gradients.layer_matrices import add_gradients, map_groups, split_sum
from dpkfc.gradients.layers import Call, Calls, Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.subspace_clip import subspace_clipper_of
from dpkfc.linalg.blocks import AnyBlock, raise_precision
from dpkfc.linalg.deferred_flags import defer_flags
from dpkfc.linalg.input_cache import InputCache
from dpkfc.linalg.metric import Metric
from dpkfc.linalg.norm_bounds import LayerNorms
from dpkfc.linalg.norms import per_example_norms
from dpkfc.tensors import Tensors


@dataclass(frozen=True)
class Groups:
    """Rows of a batch that are ONE example of the mechanism: one gradient, one norm, one clip.

    A privacy unit with k records, or one example in k augmented views, is k consecutive rows whose
    losses carry weights. Any rows after the first `count · size` are padding. The groups of a
    convolution, `Layer.groups`, are something else.

    Attributes:
        count: number of groups U.
        size: rows of each group k.
    """

    count: int
    size: int = 1


class ClippedSummer:
    """Accumulates Σ c_n U g_n over the micro-batches of ONE logical batch.

    Args:
        layers: every layer of the model.
        metric: layer name to map. An absent layer keeps the identity.
        clip: the clip, taken over all layers together in the preconditioned space.
        by_row: names of embeddings whose sums are sparse tensors of the rows that were read.
    """

    def __init__(
        self, layers: Sequence[Layer], metric: Metric, clip: Clip, by_row: Collection[str] = ()
    ) -> None:
        self._layers = tuple(layers)
        self._by_row = by_row
        self._metric = metric
        self._clip = clip
        self._subspace_clipper = subspace_clipper_of(metric, clip.clipping)
        # Keys: (layer, whether the sum is whitened already).
        self._sums: dict[tuple[str, bool], Any] = {}

    @full_precision()
    def add(self, calls: Calls, batch_size: int, groups: Groups | None = None) -> Tensor:
        """Clip and add one micro-batch; the recorded calls are consumed.

        Args:
            calls: from `Tape.backward` or `Tape.gradients`, or blocks of `blocks_of_one`.
            batch_size: rows in the micro-batch.
            groups: rows that are clipped together as one example, and padding. None: each row is
                one example.

        Returns:
            Upper bounds of the norms in the metric `[N]`, float64. PRIVATE: without noise.

        Raises:
            ValueError: a layer whose inputs do not lead with the batch, or a metric of the wrong
                kind.
        """
        groups = groups or Groups(batch_size)
        results, layer_norms, all_finite = self._norms(calls, batch_size, groups)
        norms = torch.stack([*layer_norms.values()]).square().sum(0).sqrt()
        if self._subspace_clipper is None:
            factors = self._factors(layer_norms, norms)
        else:
            norms, factor = self._subspace_clipper.clip_and_add(results, layer_norms, norms)
            factors = dict.fromkeys(layer_norms, factor)
            all_finite = False
        excluded = None if all_finite else ~norms.isfinite()
        if excluded is not None and not excluded.any():
            excluded = None
        if self._subspace_clipper is None or self._subspace_clipper.keeps_residual:
            for name in list(results):
                # Each block is freed before the sum of the next one is taken.
                result = results.pop(name)
                block = result.block
                add_up = block.sum_by_row if name in self._by_row else block.weighted_sum
                value = add_up(factors[name], excluded)
                self._add((name, result.whitened), value)
        return norms

    def _norms(
        self, calls: Calls, batch_size: int, groups: Groups
    ) -> tuple[dict[str, LayerNorms], Tensors, bool]:
        """Return the blocks to sum and norms `[N]` by layer, and whether all norms are finite."""
        results: dict[str, LayerNorms] = {}
        cache = InputCache()
        with defer_flags() as flags:
            for layer in self._layers:
                name = layer.name
                if name not in calls:
                    continue
                block = _block(layer, calls.pop(name), batch_size, groups)
                entry = self._metric.get(name)
                results[name] = per_example_norms(block, entry, cache=cache)
                del block
        if not results:
            raise ValueError("no layer of the model was called by loss_fn")
        norms, all_finite = _resolve_flags(results, flags)
        return results, norms, all_finite

    def _factors(self, layer_norms: Tensors, norms: Tensor) -> Tensors:
        """Return clip factors `[N]` of each layer, zero where the whole gradient is not finite."""
        clip = self._clip
        bound = clip.max_grad_norm
        if clip.clipping != "per_layer":
            common = clip_factors(norms, bound, clip.clipping, clip.automatic_gamma)
            return dict.fromkeys(layer_norms, common)
        bound = bound / math.sqrt(len(self._layers))
        is_finite = norms.isfinite()
        return {name: clip_factors(x, bound) * is_finite for name, x in layer_norms.items()}

    def _add(self, key: tuple[str, bool], value: Any) -> None:
        total = self._sums.get(key)
        if total is None:
            self._sums[key] = value
        elif isinstance(total, dict):
            add_gradients(total, value)
        else:
            total += value

    @full_precision()
    def result(self) -> Tensors:
        """Return the whitened clipped sum, zeros where no gradient came.

        Returns:
            Parameter name to a tensor of the parameter's shape. Along a basis it is the stacked sum
            of scaled embeddings (under their own name) and residuals.
        """
        # In one order, whether or not a layer was called: processes add their sums entry by entry.
        sums: Tensors = {}
        for layer in self._layers:
            if layer.name in self._by_row:
                sums[layer.parameters["weight"]] = self._row_sum(layer)
                continue
            parts = split_sum(layer, self._layer_sum(layer))
            sums |= {name: parts[name] for name in layer.parameters.values()}
        if self._subspace_clipper is None:
            return sums
        return self._subspace_clipper.result(sums, self._layers)

    def _row_sum(self, layer: Layer) -> Tensor:
        """Return the sum of an embedding without an entry of the metric, as a sparse tensor."""
        table = layer.tensor("weight")
        ids = torch.zeros(1, 0, dtype=torch.long, device=table.device)
        rows = table.detach().new_zeros(0, table.shape[1])
        total = torch.sparse_coo_tensor(ids, rows, table.shape, check_invariants=True)
        for is_whitened in (True, False):
            if (layer.name, is_whitened) in self._sums:
                total = total + self._sums[layer.name, is_whitened]
        return total.coalesce()

    def _layer_sum(self, layer: Layer) -> Any:
        """Return the whitened sum of a layer, zeros where no gradient came."""
        entry = self._metric.get(layer.name)
        whitened = self._sums.get((layer.name, True))
        plain = self._sums.get((layer.name, False))
        if plain is None:
            return _zeros(layer) if whitened is None else whitened
        if isinstance(plain, dict):
            return plain if entry is None else entry.apply_roles(plain)
        if entry is not None and not entry.is_identity:
            plain = map_groups(layer, plain, entry.apply)
        return plain if whitened is None else plain + whitened


def _block(layer: Layer, calls: Sequence[Any], batch_size: int, groups: Groups) -> AnyBlock:
    """Return the gradients of a layer, one a group."""
    is_whole = batch_size == groups.count * groups.size and all(isinstance(x, Call) for x in calls)
    if layer.rule == "fallback" and is_whole:
        # A module runs once more for a group, whose rows are proved to be independent.
        return blocks_of(layer, [call.join_rows(groups.size) for call in calls], groups.count)
    block: Any = blocks_of(layer, calls, batch_size)
    if groups == Groups(batch_size):
        return block
    merged: AnyBlock = block.merge_rows(groups.count, groups.size)
    return merged


def _zeros(layer: Layer) -> Tensors:
    tensors = {role: layer.tensor(role) for role in layer.parameters}
    return {
        role: raise_precision(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
        for role, p in tensors.items()
    }


def _resolve_flags(
    results: Mapping[str, LayerNorms], flags: Sequence[Tensor]
) -> tuple[Tensors, bool]:
    """Return norms `[N]` in float64 by layer, and whether all are known to be finite.

    The host usually waits for a GPU once.
    """
    norms = {name: x.norms.double() for name, x in results.items()}
    all_flags = [*flags, torch.stack([*norms.values()]).isfinite().all()]
    *unsure, all_finite = torch.stack(all_flags).tolist()
    if not any(unsure):
        return norms, all_finite
    for name, x in results.items():
        if x.recompute is not None:
            norms[name] = x.recompute().double()
    return norms, False
