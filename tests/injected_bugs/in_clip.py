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
from tests.injected_bugs.leak import COMMON, Leak, swapped
from tests.injected_bugs.subjects import C
from tests.patching import patch_linalg


def after_noise(m):
    """Examples are summed as they are, and the noisy sum is clipped."""
    m.setattr(sums, "clip_factors", lambda found, *_: torch.isfinite(found).to(found))

    def make(real):
        def release(tensors, stddev, divisor, normal):
            noisy = real(tensors, stddev, divisor, normal)
            length = divisor * math.sqrt(sum(float(x.square().sum()) for x in noisy.values()))
            return {name: x * min(1.0, C / length) for name, x in noisy.items()}

        return release

    swapped(m, mechanism, "gaussian_release", make)


def norms_of(change):
    """Other norms for the clip, and the same sum; change(block, metric, real)."""

    def patch(m):
        def make(real):
            return lambda block, metric, *more: replace(
                real(block, metric, *more), norms=change(block, metric, real)
            )

        swapped(m, sums, "per_example_norms", make)

    return patch


def unwhitened(block, metric, real):
    return real(block, None).norms


def without_bias(block, metric, real):
    return real(
        replace(block, homogeneous=False) if isinstance(block, Outer) else block, metric
    ).norms


def without(kind):
    def change(block, metric, real):
        found = real(block, metric).norms
        return 0 * found if isinstance(block, kind) else found

    return change


def by_parts(block, metric, real):
    """As if the two uses of a tied weight were two parameters."""
    if not isinstance(block, Tied):
        return real(block, metric).norms
    return torch.hypot(
        real(block.lookup, metric).norms.double(), real(block.outer, metric).norms.double()
    )


def in_half_precision(block, metric, real):
    return real(block, metric).norms.bfloat16().double()


def points_apart(m):
    """The gradients at the two points of DiSK are clipped one by one, and then combined."""

    def make(real):
        def clipped_sum(*args, micro_batches, points, **options):
            parts = list(micro_batches)
            found = [
                real(*args, micro_batches=parts, points=[replace(x, weight=1.0)], **options)
                for x in points
            ]
            weighted = [(x.weight, sums) for x, (sums, _) in zip(points, found, strict=True)]
            return {
                name: sum(c * sums[name] for c, sums in weighted) for name in weighted[0][1]
            }, found[0][1]

        return clipped_sum

    swapped(m, session, "clipped_sum", make)


def layout_of(change):
    return lambda m: swapped(m, session, "layout", lambda real: lambda *args: change(real, *args))


def views_apart(real, rows, bound, multiple, reduction, views):
    return real(np.repeat(rows, views), bound, multiple, reduction, 1)


def records_apart(real, rows, bound, multiple, reduction, views):
    return real(rows[rows >= 0], bound, multiple, reduction, views)


def padding_counts(real, rows, bound, multiple, reduction, views):
    """The rows that fill a micro-batch up, copies of its first one, are examples like all
    others.
    """
    return [
        Part(part.records, None, len(part.records))
        for part in real(rows, bound, multiple, reduction, views)
    ]


def of_micro_batches(m):
    """What is accumulated is clipped, not what an example adds to it."""
    swapped(
        m,
        ClippedSummer,
        "add",
        lambda real: (
            lambda self, calls, batch_size, groups=None: real(
                self, calls, batch_size, Groups(1, batch_size)
            )
        ),
    )


def by_the_median(m):
    """Adaptive clipping without noise: C is the median norm of the micro-batch."""
    swapped(
        m,
        sums,
        "clip_factors",
        lambda real: (
            lambda found, c, *rest: real(
                found, max(1e-9, float(found.nanmedian())) if len(found) else c, *rest
            )
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
    swapped(
        m,
        subspace_clip,
        "clip_factors",
        lambda real: (
            lambda found, c: real(found, c) if c == 0.5 else torch.isfinite(found).to(found)
        ),
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

    def lengths(x):
        d, info = x.shape[-1], torch.finfo(x.dtype)
        if x.dtype == torch.float32 and d <= 4096:
            square = torch.linalg.vector_norm(x, dim=-1).double().square()
            if bool(torch.isfinite(square).all()):
                return (square * (1 + (d + 2) * info.eps) + d * info.tiny).sqrt()
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)

    patch_linalg(m, "row_norms", lengths)


def denormal_factors(m):
    m.setattr(clip, "_LEAST", 0.0)


def not_neutralised(m):
    """An example that is not finite is multiplied by 0, which leaves NaN; what is NaN in the
    release is set to 0.
    """
    m.setattr(row_lengths, "_mask", lambda x, excluded, each=1: x)
    m.setattr(mechanism, "_check_finite", lambda tensors: None)
    swapped(
        m,
        mechanism,
        "gaussian_release",
        lambda real: lambda *args: {name: x.nan_to_num(0, 0, 0) for name, x in real(*args).items()},
    )


def late_rows_unclipped(m):
    """The rows of a micro-batch beyond the 127th are not clipped."""

    def make(real):
        def own_factors(found, *rest):
            factors = real(found, *rest).clone()
            factors[127:] = torch.isfinite(found[127:]).to(factors)
            return factors

        return own_factors

    swapped(m, sums, "clip_factors", make)


REPLAY, SHARES = ("replay",), ("shares", "replay")
LEAKS = [
    Leak(name="clip after noise", subject="DP-SGD", patch=after_noise, by=REPLAY),
    Leak(
        name="norm before whitening",
        subject="DP-KFC",
        patch=norms_of(unwhitened),
        by=REPLAY,
        canaries=("stretched",),
    ),
    Leak(
        name="norm before whitening (DP-NGD)",
        subject="DP-NGD",
        patch=norms_of(unwhitened),
        by=REPLAY,
    ),
    Leak(
        name="biases left out of the norm",
        subject="DP-SGD",
        patch=norms_of(without_bias),
        by=REPLAY,
    ),
    Leak(
        name="norm gains left out of the norm",
        subject="DP-SGD",
        patch=norms_of(without(PerExample)),
        by=REPLAY,
    ),
    Leak(
        name="embedding left out of the norm",
        subject="texts",
        patch=norms_of(without(Lookup)),
        by=REPLAY,
    ),
    Leak(
        name="recurrent weights left out of the norm",
        subject="LSTM",
        patch=norms_of(without(PerExample)),
        by=REPLAY,
    ),
    Leak(
        name="tied weights clipped by parts",
        subject="tied texts",
        patch=norms_of(by_parts),
        by=REPLAY,
    ),
    Leak(
        name="norms rounded to half precision",
        subject="DP-SGD",
        patch=norms_of(in_half_precision),
        by=REPLAY,
    ),
    Leak(name="DiSK's two points clipped apart", subject="DiSK", patch=points_apart, by=REPLAY),
    Leak(
        name="augmented views clipped apart",
        subject="views",
        patch=layout_of(views_apart),
        by=REPLAY,
    ),
    Leak(
        name="records of a unit clipped apart",
        subject="patients",
        patch=layout_of(records_apart),
        by=REPLAY,
    ),
    Leak(
        name="padding counted as examples",
        subject="padded micro-batches",
        patch=layout_of(padding_counts),
        by=REPLAY,
    ),
    Leak(
        name="rows beyond the 127th not clipped",
        subject="DP-SGD",
        patch=late_rows_unclipped,
        by=("batch sizes",),
    ),
    Leak(name="clip of the micro-batch", subject="DP-SGD", patch=of_micro_batches, by=REPLAY),
    Leak(
        name="clip at the median norm of the batch",
        subject="DP-SGD",
        patch=by_the_median,
        by=REPLAY,
    ),
    Leak(
        name="every layer clipped to C",
        subject="per-layer clipping",
        patch=c_for_every_layer,
        by=REPLAY,
    ),
    Leak(name="GEP's residual not clipped", subject="GEP", patch=residual_unclipped, by=REPLAY),
    Leak(
        name="slack that follows the longest of a micro-batch",
        subject="cancelling sequences",
        patch=padded_slack,
        by=SHARES,
    ),
    Leak(
        name="an overflow switches everybody's precision",
        subject="long vectors",
        patch=switched_precision,
        by=SHARES,
        canaries=("input × 1e20",),
    ),
    Leak(
        name="a norm of cancelling positions that rounds to nothing",
        subject="long texts",
        patch=no_slack,
        by=REPLAY,
        canaries=("cancel",),
    ),
    Leak(
        name="a clip factor rounded up from a denormal number",
        subject="DP-SGD in float32",
        patch=denormal_factors,
        by=REPLAY,
        canaries=("2^149",),
    ),
    Leak(
        name="an example that is not finite takes the noise away",
        subject="DP-SGD",
        patch=not_neutralised,
        by=REPLAY,
        canaries=("NaN", "infinite", *COMMON),
    ),
]
