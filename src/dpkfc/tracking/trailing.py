"""Rules for operations on trailing dimensions, and for normalisation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from dpkfc.tracking.batch_rules import (
    RULES,
    Answer,
    Operation,
    Rule,
    dimension_of,
    fits,
    rule_for,
    rule_of_first,
)
from dpkfc.tracking.elementwise import broadcast_axis, has_batched_weights
from dpkfc.tracking.states import BatchAxis


def common_axis(operation: Operation, tensors: Iterable[Tensor], why: str) -> BatchAxis:
    """Return the one axis of all batched tensors; where they have several, `why` is the reason."""
    axes = {axis for axis in map(operation.axis, tensors) if axis is not None}
    operation.require(len(axes) == 1, why)
    return axes.pop()


def _trailing(count: int) -> Rule:
    """Return the rule of an operation that works within the last `count` dimensions."""

    def rule(operation: Operation) -> Answer:
        batched = list(filter(operation.is_batched, operation.tensors))
        axis = common_axis(operation, batched, "it works along the batch axis")
        kept_dims = min(x.dim() for x in batched) - count
        operation.require(axis.dim < kept_dims, "it works along the batch axis")
        are_shared = fits(operation, operation.tensors, axis)
        operation.require(are_shared, "it pairs examples with their places")
        return axis

    return rule


_TRAILING_DIMS = {
    1: """
        avg_pool1d adaptive_avg_pool1d max_pool1d upsample_nearest1d _upsample_nearest_exact1d
        upsample_linear1d reflection_pad1d replication_pad1d
    """,
    2: """
        avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d max_pool2d
        max_pool2d_with_indices upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
        upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d
        replication_pad2d col2im tril triu affine_grid_generator linalg_inv_ex linalg_cholesky_ex
        linalg_qr _linalg_svd _linalg_eigh linalg_matrix_exp _linalg_det _linalg_slogdet
        _linalg_solve_ex linalg_solve_triangular cholesky_solve linalg_pinv linalg_eig linalg_lu
        linalg_lu_factor_ex cholesky_inverse
    """,
    3: """
        avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_unpool2d
        max_pool3d_with_indices upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d
        reflection_pad3d replication_pad3d pixel_shuffle pixel_unshuffle im2col grid_sampler_2d
    """,
    4: "max_unpool3d grid_sampler_3d",
}
for _count, _names in _TRAILING_DIMS.items():
    RULES.update(dict.fromkeys(_names.split(), _trailing(_count)))


@rule_of_first("fractional_max_pool2d fractional_max_pool3d")
def _fractional_max_pool(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a pool over random windows, which are drawn for each example."""
    windows = operation.argument("random_samples")
    spatial_dims = len(operation.args[1])
    has_rows = axis.dim == 0 and x.dim() == windows.dim() + spatial_dims - 1
    operation.require(has_rows, "the batch is not dimension 0 of the input")
    operation.require(fits(operation, [windows], axis), "windows belong to other examples")
    return axis


@rule_for("searchsorted")
def _searchsorted(operation: Operation) -> Answer:
    boundaries, values = operation.args[:2]
    if boundaries.dim() > 1:
        return _trailing(1)(operation)
    others = [x for x in operation.tensors if x is not values]
    are_public = not any(map(operation.is_batched, others))
    operation.require(are_public, "every entry is compared with the entries of all examples")
    return operation.axis(values)


@rule_for("linalg_cross")
def _cross(operation: Operation) -> Answer:
    y = operation.result
    why = "a cross product works along the batch axis"
    axis = broadcast_axis(operation, operation.args[:2], y.dim(), why)
    operation.require(axis.dim != dimension_of(operation, y), why)
    return axis


@rule_of_first("constant_pad_nd")
def _pad(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    # The list of paddings begins with the last dimension, two numbers for each.
    place = 2 * (x.dim() - 1 - axis.dim)
    paddings = operation.argument("pad")[place:]
    operation.require(not any(paddings[:2]), "padding is added along the batch axis")
    return axis


# -- normalisation ---------------------------------------------------------------------------------


@rule_of_first("native_layer_norm layer_norm _fused_rms_norm rms_norm")
def _layer_norm(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    kept_dims = x.dim() - len(operation.args[1])
    is_kept = axis.dim < kept_dims and not has_batched_weights(operation)
    operation.require(is_kept, "it normalises over the batch axis")
    return axis


@rule_of_first(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "miopen_batch_norm"
)
def _batch_norm(operation: Operation, x: Tensor, axis: BatchAxis) -> Answer:
    """Return the axis of a batch norm.

    Its statistics are frozen, or belong to channels of one example each, as in an instance norm.
    """
    are_public = not has_batched_weights(operation)
    operation.require(are_public, "a batched operand in an unusual place")
    if not operation.argument("training", "with_update" in operation.name):
        operation.require(axis.dim != 1, "channels are examples")
        return [axis, None, None, None]
    operation.require(axis.dim == 1, "statistics are taken over the batch")
    channel_axis = axis.move(0)
    are_shared = fits(operation, operation.args[1:3], channel_axis)
    operation.require(are_shared, "weights depend on the places of the examples")
    return [axis, channel_axis, channel_axis, None]
