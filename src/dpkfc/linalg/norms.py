"""Per-example gradient norms in a metric, each an upper bound of the norm of what is summed.

`per_example_norms` takes the block of one layer and its map, and the file of its kind does the
rest. A linear layer or a convolution (`linear_norms`) has one of three methods with the same
result: rank-one (one position), Gram (T×T products, no gradient formed) and materialised
(gradients formed in chunks). A rule on the widths of a layer picks one (`norm_methods`). The
clipped sum is taken of the whitened rows themselves where these are kept. Gradients are summed
before they are mapped, and the bound counts what the map of the sum may round.

The bound of an example may not depend on other examples. A longer neighbour pads all rows of a
micro-batch. If it changed an example's bound, the contribution of that example would change, and
the sum by more than the sensitivity. So the widths of a layer alone decide between Gram and
materialised, never T. The norm of one position is rounded up as by the method for several.
Positions whose output gradient is zero do not enter the slack. Where rounding could move a norm by
more than a small fraction, it is recomputed in float64.

In floating point a Gram norm can come out far too small when positions cancel. The norm of a
gradient that is formed again for the sum can differ from the norm that clipped it. Explicit bounds
on the rounding error cover both, with u the unit roundoff and λ = 4 in the probabilistic model of
Higham and Mary (2019):

* Gram: the squared norm loses at most (T + d_in + d_out) u (Σ_t ‖a_t‖‖b_t‖)², where T counts the
  example's own positions;
* formed twice: the norm loses at most
  T u ‖U_A‖‖U_G‖ Σ_t ‖a_t‖‖b_t‖ + λ (√d_in + √d_out) u ‖U_A‖‖U_G‖‖g‖.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from dpkfc.linalg.blocks import (
    AnyBlock,
    Lookup,
    MaterializedGradients,
    PerExample,
    Tied,
    roundoff,
)
from dpkfc.linalg.eigenbasis_norms import eigenbasis_norms
from dpkfc.linalg.input_cache import InputCache
from dpkfc.linalg.linear_norms import materialised_norms, norms_from_rows
from dpkfc.linalg.lookup_norms import lookup_norms
from dpkfc.linalg.metric import Eigenbasis, Elementwise, Entry, Kronecker
from dpkfc.linalg.norm_bounds import (
    IDENTITY,
    LayerNorms,
    MatrixMap,
    matrix_norms,
)
from dpkfc.linalg.norm_methods import choose_norm_method
from dpkfc.linalg.tied_norms import tied_norms


def per_example_norms(
    block: AnyBlock,
    metric: Entry | None,
    method: str | None = None,
    cache: InputCache | None = None,
) -> LayerNorms:
    """Return upper bounds of ‖U_G g_n U_A‖ for every example of a block.

    Args:
        block: one layer's contribution.
        metric: the layer's map, None for the identity.
        method: gram or materialised to overrule the rule (layers of matrices only).
        cache: results for inputs that several layers of one micro-batch read. None shares nothing.

    Returns:
        Norms `[N]`, NaN or infinite where the example's gradient is. They are at least the exact
        norm up to the last bits.

    Raises:
        ValueError: a metric of the wrong kind or size for the block.
    """
    result = _compute_norms(block, metric, method, cache or InputCache())
    summed = result.block
    if isinstance(summed, MaterializedGradients):
        return result
    entry = None if result.whitened else metric

    def recompute() -> Tensor:
        return _compute_norms(summed, entry, method, InputCache()).norms

    return replace(result, recompute=recompute)


def _compute_norms(
    block: AnyBlock, metric: Entry | None, method: str | None, cache: InputCache
) -> LayerNorms:
    """Return the norms by the method of the block's kind. The arguments are the caller's."""
    if isinstance(block, PerExample):
        return LayerNorms(_elementwise_norms(block, metric), block)
    if isinstance(block, MaterializedGradients):
        return _take_gradient_norms(block, metric)
    metric = metric or IDENTITY
    if isinstance(metric, Elementwise):
        raise ValueError(
            "this layer needs a Kronecker metric, but the preconditioner holds an elementwise one"
        )
    if isinstance(block, Lookup):
        return LayerNorms(lookup_norms(block, metric), block)
    if isinstance(block, Tied):
        return tied_norms(block, metric, method)
    if isinstance(metric, Eigenbasis):
        return eigenbasis_norms(block, metric)
    method = method or choose_norm_method(block)
    if method == "materialised":
        return materialised_norms(block, metric)
    return norms_from_rows(block, metric, method, cache)


def _take_gradient_norms(block: MaterializedGradients, metric: Entry | None) -> LayerNorms:
    """Return norms of gradients that are materialised already, of the numbers that are summed."""
    z = block.gradients
    if isinstance(metric, MatrixMap) and not metric.is_identity:
        if block.crosswise:
            z = metric.apply(z.mT).mT
        else:
            z = metric.apply(z)
    norms = matrix_norms(z, block.groups)
    fraction_lost = 2 * math.sqrt(block.num_entries) * roundoff(z)
    norms *= 1 + fraction_lost
    summed = replace(block, gradients=z)
    return LayerNorms(norms, summed, whitened=True)


# --------------------------------------------------------------------------------------------------
# Gradients by role: norm layers, recurrent layers, the fallback.


def _elementwise_norms(block: PerExample, metric: Entry | None) -> Tensor:
    """Return norms over all roles, each entry times its scale."""
    if isinstance(metric, Kronecker) and not metric.is_identity:
        raise ValueError(
            "this layer needs an elementwise metric, but the preconditioner holds a Kronecker one"
        )
    mapped = block.grads
    if metric is not None:
        mapped = metric.apply_roles(mapped)
    squares = []
    for z in mapped.values():
        # An axis more: a parameter may have no axis of its own.
        norms = matrix_norms(z.unsqueeze(-1))
        squares.append(norms.square())
    terms = 2 * math.sqrt(block.num_entries)
    fraction_lost = terms * roundoff(block.like)
    total = reduce(torch.add, squares)
    return total.sqrt() * (1 + fraction_lost)
