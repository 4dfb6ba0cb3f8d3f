"""Leaks in the clip: of the wrong thing, by the wrong norm, or with a bound that others move."""

import math
from dataclasses import replace

import numpy as np
import torch

from dpkfc import session
from dpkfc.data.loading import Part
from dpkfc.gradients import clip, subspace_clip
from dpkfc.gradients import clipped_summer as sums
from dpkfc.gradients.clipped_summer import ClippedSummer, Groups
from dpkfc.linalg import blocks as row_lengths
from dpkfc.linalg import linear_norms as gram
from dpkfc.linalg.blocks import Lookup, Outer, PerExample, Tied
from dpkfc.linalg.input_cache import InputCache
from dpkfc.privacy import mechanism
from tests.injected_bugs.leak import COMMON, Leak, swap_function
from tests.injected_bugs.subjects import C
from tests.patching import patch_linalg


def clip_after_noise(m):
    """Examples are summed as they are, and the noisy sum is clipped."""
    m.setattr(sums, "clip_factors", lambda found, *_: torch.isfinite(found).to(found))

    def release(real, tensors, stddev, divisor, normal):
        noisy = real(tensors, stddev, divisor, normal)
        length = divisor * math.sqrt(sum(float(x.square().sum()) for x in noisy.values()))
        return {name: x * min(1.0, C / length) for name, x in noisy.items()}

    swap_function(m, mechanism, "gaussian_release", release)


def norms_of(change):
    """Other norms for the clip, and the same sum; change(block, metric, real)."""

    def patch(m):
        swap_function(
            m,
            sums,
            "per_example_norms",
            lambda real, block, metric, *more, **named: replace(
                real(block, metric, *more, **named), norms=change(block, metric, real)
            ),
        )

    return patch


def measure_unwhitened(block, metric, real):
    return real(block, None).norms


def leave_out_bias(block, metric, real):
    return real(
        replace(block, homogeneous=False) if isinstance(block, Outer) else block, metric
    ).norms


def leave_out_blocks(kind):
    def change(block, metric, real):
        found = real(block, metric).norms
        return 0 * found if isinstance(block, kind) else found

    return change


def clip_by_parts(block, metric, real):
    """As if the two uses of a tied weight were two parameters."""
    if not isinstance(block, Tied):
        return real(block, metric).norms
    return torch.hypot(
        real(block.lookup, metric).norms.double(), real(block.outer, metric).norms.double()
    )


def measure_in_half_precision(block, metric, real):
    return real(block, metric).norms.bfloat16().double()


def points_apart(m):
    """The gradients at the two points of DiSK are clipped one by one, and then combined."""

    def clipped_sum(real, *args, micro_batches, points, **options):
        parts = list(micro_batches)
        found = [
            real(*args, micro_batches=parts, points=[replace(x, weight=1.0)], **options)
            for x in points
        ]
        weighted = [(x.weight, sums) for x, (sums, _) in zip(points, found, strict=True)]
        return {
            name: sum(c * sums[name] for c, sums in weighted) for name in weighted[0][1]
        }, found[0][1]

    swap_function(m, session, "clipped_sum", clipped_sum)


def layout_of(change):
    return lambda m: swap_function(m, session, "layout", change)


def views_apart(real, rows, bound, reduction, views, least):
    return real(np.repeat(rows, views), bound, reduction, 1, least)


def records_apart(real, rows, bound, reduction, views, least):
    return real(rows[rows >= 0], bound, reduction, views, least)


def padding_counts(real, rows, bound, reduction, views, least):
    """The rows that fill a micro-batch up, copies of its first one, are examples like all
    others.
    """
    return [
        Part(part.records, None, len(part.records))
        for part in real(rows, bound, reduction, views, least)
    ]


def clip_micro_batches(m):
    """What is accumulated is clipped, not what an example adds to it."""
    swap_function(
        m,
        ClippedSummer,
        "add",
        lambda real, self, calls, batch_size, groups=None: real(
            self, calls, batch_size, Groups(1, batch_size)
        ),
    )


def clip_by_median(m):
    """Adaptive clipping without noise: C is the median norm of the micro-batch."""
    swap_function(
        m,
        sums,
        "clip_factors",
        lambda real, found, c, *rest: real(
            found, max(1e-9, float(found.nanmedian())) if len(found) else c, *rest
        ),
    )


def c_for_every_layer(m):
    m.setattr(
        ClippedSummer,
        "_factors",
        lambda self, own, found: {
            n: sums.clip_factors(x, C) * torch.isfinite(found) for n, x in own.items()
        },
    )


def residual_unclipped(m):
    swap_function(
        m,
        subspace_clip,
        "clip_factors",
        lambda real, found, c: real(found, c) if c == 0.5 else torch.isfinite(found).to(found),
    )


# -- bounds that others move, as they were before they were reviewed -------------------------------


def padded_slack(m):
    """The slack counts the positions of the longest example of the micro-batch."""

    def norms_of(block, reread=None):
        square, lengths, _ = gram._gram_squares(block, reread or InputCache())
        terms = block.a.shape[1] + block.d_in + block.b.shape[2]
        return (
            square.clamp(min=0) + terms * gram.roundoff(block.a) * lengths.square() + 0 * square
        ).sqrt()

    patch_linalg(m, "gram_norms", norms_of)


def no_slack(m):
    """The norm of positions that cancel, by Gram matrices in float32 and no more.

    It loses as much as their rounding may take, on any processor.
    """

    def norms_of(block, reread=None):
        inputs = torch.bmm(block.a, block.a.mT) + float(block.homogeneous)
        terms = inputs * torch.bmm(block.b, block.b.mT)
        lost = torch.finfo(terms.dtype).eps * terms.abs().sum((1, 2))
        return (terms.sum((1, 2)) - lost).clamp(min=0).sqrt()

    patch_linalg(m, "gram_norms", norms_of)


def switched_precision(m):
    """One row beyond the range of float32 takes all rows to float64, where no rounding is added."""

    def lengths(x, *_):
        d, info = x.shape[-1], torch.finfo(x.dtype)
        if x.dtype == torch.float32 and d <= 4096:
            square = torch.linalg.vector_norm(x, dim=-1).double().square()
            if bool(torch.isfinite(square).all()):
                return (square * (1 + (d + 2) * info.eps) + d * info.tiny).sqrt()
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)

    patch_linalg(m, "row_norms", lengths)


def denormal_factors(m):
    m.setattr(clip, "_LEAST", 0.0)


def keep_nan(m):
    """An example that is not finite is multiplied by 0, which leaves NaN; what is NaN in the
    release is set to 0.
    """
    m.setattr(row_lengths, "_mask", lambda x, excluded, each=1: x)
    m.setattr(mechanism, "_check_finite", lambda tensors: None)
    swap_function(
        m,
        mechanism,
        "gaussian_release",
        lambda real, *args: {name: x.nan_to_num(0, 0, 0) for name, x in real(*args).items()},
    )


def late_rows_unclipped(m):
    """The rows of a micro-batch beyond the 127th are not clipped."""

    def own_factors(real, found, *rest):
        factors = real(found, *rest).clone()
        factors[127:] = torch.isfinite(found[127:]).to(factors)
        return factors

    swap_function(m, sums, "clip_factors", own_factors)


SHARES = ("shares", "replay")
LEAKS = [
    Leak("clip after noise", clip_after_noise),
    Leak(
        "norm before whitening",
        norms_of(measure_unwhitened),
        subject="DP-KFC",
        canaries=("stretched",),
    ),
    Leak("norm before whitening (DP-NGD)", norms_of(measure_unwhitened), subject="DP-NGD"),
    Leak("biases left out of the norm", norms_of(leave_out_bias)),
    Leak("norm gains left out of the norm", norms_of(leave_out_blocks(PerExample))),
    Leak("embedding left out of the norm", norms_of(leave_out_blocks(Lookup)), subject="texts"),
    Leak(
        "recurrent weights left out of the norm",
        norms_of(leave_out_blocks(PerExample)),
        subject="LSTM",
    ),
    Leak("tied weights clipped by parts", norms_of(clip_by_parts), subject="tied texts"),
    Leak("norms rounded to half precision", norms_of(measure_in_half_precision)),
    Leak("DiSK's two points clipped apart", points_apart, subject="DiSK"),
    Leak("augmented views clipped apart", layout_of(views_apart), subject="views"),
    Leak("records of a unit clipped apart", layout_of(records_apart), subject="patients"),
    Leak("padding counted as examples", layout_of(padding_counts), subject="padded micro-batches"),
    Leak("rows beyond the 127th not clipped", late_rows_unclipped, by=("batch sizes",)),
    Leak("clip of the micro-batch", clip_micro_batches),
    Leak("clip at the median norm of the batch", clip_by_median),
    Leak("every layer clipped to C", c_for_every_layer, subject="per-layer clipping"),
    Leak("GEP's residual not clipped", residual_unclipped, subject="GEP"),
    Leak(
        "slack that follows the longest of a micro-batch",
        padded_slack,
        subject="cancelling sequences",
        by=SHARES,
    ),
    Leak(
        "an overflow switches everybody's precision",
        switched_precision,
        subject="long vectors",
        by=SHARES,
        canaries=("input × 1e20",),
    ),
    Leak(
        "a norm of cancelling positions that rounds to nothing",
        no_slack,
        subject="long texts",
        canaries=("cancel",),
    ),
    Leak(
        "a clip factor rounded up from a denormal number",
        denormal_factors,
        subject="DP-SGD in float32",
        canaries=("2^149",),
    ),
    Leak(
        "an example that is not finite takes the noise away",
        keep_nan,
        canaries=("NaN", "infinite", *COMMON),
    ),
]
