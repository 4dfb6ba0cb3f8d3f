"""Norms of embeddings, whose rows with the same id add up before the norm."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.linalg import vector_norm

from dpkfc.linalg.blocks import Lookup, roundoff
from dpkfc.linalg.deferred_flags import is_any_set
from dpkfc.linalg.metric import Eigenbasis
from dpkfc.linalg.norm_bounds import IDENTITY, MAX_ROUNDING_FRACTION, MatrixMap, root
from dpkfc.linalg.row_norms import TINY, row_norms
from dpkfc.linalg.sides import Identity


def lookup_norms(block: Lookup, metric: MatrixMap) -> Tensor:
    """Return norms by a Gram matrix masked to equal ids."""
    if isinstance(metric, Eigenbasis):
        return _eigenbasis_lookup_norms(block, metric)
    b = metric.output.apply(block.b)
    b = metric.input.apply_at(b, block.ids)
    whitened = replace(block, b=b)
    pairs = block.ids.shape[1] ** 2

    def bound(part: Lookup) -> Tensor:
        square, slack = _lookup_squares(part)
        return root(square, slack)

    norms = whitened.map_examples(bound, pairs)
    if isinstance(metric.output, Identity):
        return norms
    whitening = 4 * math.sqrt(block.d_out) * metric.output.operator_norm
    magnitudes = row_norms(block.b).sum(1)
    magnitudes *= metric.input.operator_norm
    return norms + whitening * roundoff(b) * magnitudes


def _eigenbasis_lookup_norms(block: Lookup, metric: Eigenbasis) -> Tensor:
    """Return norms from rows that are scaled, with what the rotation may take."""
    norms = lookup_norms(block.scale_rows(metric), IDENTITY)
    if metric.output is None:
        return norms
    rotation = 8 * math.sqrt(block.d_out) * metric.operator_norm
    magnitudes = vector_norm(block.b, dim=-1)
    return norms + rotation * roundoff(block.b) * magnitudes.sum(1)


def _lookup_squares(block: Lookup) -> tuple[Tensor, Tensor]:
    """Return ‖Σ_t e(id_t) b_tᵀ‖² and what rounding may take from it, `[n]` in float64."""
    b = block.b
    same = block.find_same_ids()
    norms = row_norms(b)
    products = torch.bmm(b, b.mT) * same
    square = products.sum((1, 2)).double()
    magnitudes = torch.einsum("nt,nts,ns->n", norms, same.double(), norms)
    terms = (norms > 0).sum(1) + block.d_out
    slack = terms * roundoff(b) * magnitudes
    is_sure = (slack <= MAX_ROUNDING_FRACTION * square) & (square >= TINY)
    unsure = ~is_sure & (magnitudes > 0)
    if b.dtype == torch.float32 and is_any_set(unsure):
        exact = block.select(unsure).double()
        square[unsure] = _lookup_squares(exact)[0]
    return square, slack
