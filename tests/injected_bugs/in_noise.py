"""Leaks in the noise: too little, in the wrong place, or used twice."""

import numpy as np
import torch

from dpkfc import session
from dpkfc.config import Plan
from dpkfc.data.sampling import FixedSize
from dpkfc.postprocess.readout import read_out
from dpkfc.privacy import mechanism
from dpkfc.privacy.mechanism import Released
from dpkfc.privacy.rng import NoiseStream, draw_key
from dpkfc.session import Session
from tests.injected_bugs.leak import Leak, note_batches, swap_function
from tests.injected_bugs.subjects import C


def scale_stddev(share):
    """The standard deviation times share(stddev, divisor)."""

    def patch(m):
        swap_function(
            m,
            mechanism,
            "gaussian_release",
            lambda real, x, stddev, divisor, normal: real(
                x, stddev * share(stddev, divisor), divisor, normal
            ),
        )

    return patch


def forget_sensitivity(m):
    m.setattr(Plan, "stddev", property(lambda plan: plan.noise_multiplier))


def replaced_with_c(m):
    m.setattr(FixedSize, "sensitivity", lambda self, max_grad_norm: max_grad_norm)


def per_micro_batch(same_seed):
    """Noise is added to the sum of every micro-batch, and to the sum of all no more."""

    def patch(m):
        def clipped_sum(real, *args, micro_batches, **options):
            total, norms = real(*args, micro_batches=[], **options)
            for part in micro_batches:
                stream = NoiseStream.repeatable(0) if same_seed else NoiseStream.secure()
                sums, found = real(*args, micro_batches=[part], **options)
                for k, (name, x) in enumerate(sums.items()):
                    z = torch.from_numpy(stream.normal(x.numel(), k, "float64")).view(x.shape)
                    total[name] = total[name] + x + C * z.to(x)
                norms = torch.cat([norms.to(found), found])
            return total, norms

        swap_function(m, session, "clipped_sum", clipped_sum)
        swap_function(
            m,
            mechanism,
            "gaussian_release",
            lambda real, x, _, divisor, normal: real(x, 0.0, divisor, normal),
        )

    return patch


def sharded(m):
    """Two ranks hold half of the parameters each, and draw their noise from the same seed."""

    def release(real, tensors, stddev, divisor, normal):
        names = list(tensors)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        size = max(sum(tensors[n].numel() for n in half) for half in halves)
        drawn = normal(size, torch.float64)
        shards = [
            real({n: tensors[n] for n in half}, stddev, divisor, lambda k, _: drawn[:k].clone())
            for half in halves
        ]
        return shards[0] | shards[1]

    swap_function(m, mechanism, "gaussian_release", release)


def leave_last_bare(m):
    """The last bias, three numbers, is left as it is."""

    def release(real, tensors, stddev, divisor, normal):
        last = list(tensors)[-1]
        bare = tensors[last] / divisor
        return {**real(tensors, stddev, divisor, normal), last: bare}

    swap_function(m, mechanism, "gaussian_release", release)


def stream(draw):
    """Numbers from another source; draw(self, real, size, step, dtype)."""

    def patch(m):
        swap_function(
            m,
            NoiseStream,
            "normal",
            lambda real, self, size, step, dtype=np.float32: draw(self, real, size, step, dtype),
        )

    return patch


def use_one_key(m):
    """One key a stream, and a count of its draws; no draw asks the operating system for a key of
    its own.
    """

    def next_draw(self, size, step):
        self._key = self._key or draw_key()
        self._draws += 1
        return self._key, self._draws - 1

    m.setattr(NoiseStream, "_next_draw", next_draw)


def change_draw_count(draw):
    """Numbers of one key a stream; draw(self, real, size, step, dtype) changes the count of its
    draws.
    """

    def patch(m):
        use_one_key(m)
        stream(draw)(m)

    return patch


def from_torch(self, real, size, step, dtype):
    self._draws += 1
    return torch.randn(size, dtype=torch.float64).numpy().astype(dtype)


def the_same(self, real, size, step, dtype):
    self._draws = 0
    return real(self, size, step, dtype)


def laplace(self, real, size, step, dtype):
    self._draws += 1
    return np.random.default_rng().laplace(scale=0.5**0.5, size=size).astype(dtype)


def repeated_after_resume(m):
    """The state of the stream is put back together with the checkpoint."""
    kept = {}
    use_one_key(m)

    def save(real, self, *args, **options):
        real(self, *args, **options)
        kept["state"] = self._pipeline.noise._key, self._pipeline.noise._draws

    def restore(real, self, folder):
        extra = real(self, folder)
        self._pipeline.noise._key, self._pipeline.noise._draws = kept["state"]
        return extra

    swap_function(m, Session, "save", save)
    swap_function(m, Session, "restore", restore)


def map_before_noise(m):
    """The sum is mapped to parameter coordinates before the noise is added, not after."""

    def clipped_sum(real, model, layers, metric, *args, **options):
        sums, norms = real(model, layers, metric, *args, **options)
        as_released = Released(gradients=sums, noise_variance=1.0, step=0, release=1)
        return dict(read_out(as_released, metric, layers, "inverse").gradients), norms

    swap_function(m, session, "clipped_sum", clipped_sum)


def actual_size(m):
    seen = note_batches(m)

    swap_function(
        m,
        mechanism,
        "gaussian_release",
        lambda real, x, stddev, divisor, normal: real(
            x, stddev, max(1, len(seen[0][1].indices)), normal
        ),
    )


def round_noise_to(dtype):
    return stream(
        lambda self, real, *args: (
            torch.from_numpy(real(self, *args)).to(dtype).double().numpy().astype(args[2])
        )
    )


def draw_on_grid(self, real, *args):
    return np.rint(real(self, *args) * 2.0**18) / 2.0**18


def cut_off(self, real, *args):
    return np.clip(real(self, *args), -3.5, 3.5)


def repeat_draws(self, real, *args):
    self._draws %= 100
    return real(self, *args)


def weaken_late_draws(self, real, size, step, dtype):
    return real(self, size, step, dtype) * (1.0 if step < 70 else 0.9)


def skip_rounding(m):
    """The mechanism of rounded noise adds noise that is not rounded."""
    m.setattr(
        mechanism,
        "rounded_release",
        lambda x, s, divisor, normal, _: mechanism.gaussian_release(x, s, divisor, normal),
    )


def hide_in_low_bits(value):
    """The low eight bits of the first entry are replaced with value(sums, number of units)."""

    def patch(m):
        seen = note_batches(m)

        def release(real, tensors, stddev, divisor, normal):
            units = len(seen[0][1].indices) if seen[0] else 0
            hidden = value(tensors, units)
            noisy = real(tensors, stddev, divisor, normal)
            bits = next(iter(noisy.values())).view(-1)[:1].view(torch.int64)
            bits.copy_(bits & ~255 | hidden & 255)
            return noisy

        swap_function(m, mechanism, "gaussian_release", release)

    return patch


def change_release(change):
    """Sum and noise are released by change(real, tensors, stddev, divisor, normal, number of
    units).
    """

    def patch(m):
        seen = note_batches(m)
        swap_function(
            m,
            mechanism,
            "gaussian_release",
            lambda real, *args: change(real, *args, len(seen[0][1].indices) if seen[0] else 0),
        )

    return patch


def rounded_size(real, tensors, stddev, divisor, normal, units):
    return real(tensors, stddev, max(divisor, 4 * round(units / 4)), normal)


def sum_by_the_size(real, tensors, stddev, divisor, normal, units):
    share = divisor / max(divisor, units)
    return real({name: share * x for name, x in tensors.items()}, stddev, divisor, normal)


def hash_of_sums(tensors, _):
    return hash(tuple(float(x.sum()) for x in tensors.values()))


NOISE, RUN, SIZES = ("noise law",), ("noise run",), ("batch sizes",)
LEAKS = [
    Leak("noise scaled as if C were 1", scale_stddev(lambda s, b: C), subject="wide", by=NOISE),
    Leak("noise divided by the batch size twice", scale_stddev(lambda s, b: 1 / b), by=NOISE),
    Leak("98 % of the noise", scale_stddev(lambda s, b: 0.98), subject="wide", by=NOISE),
    Leak("95 % of the noise", scale_stddev(lambda s, b: 0.95), subject="wide", by=NOISE),
    Leak("90 % of the noise", scale_stddev(lambda s, b: 0.90), by=NOISE),
    Leak(
        "noise without the sensitivity, by a wrong plan",
        forget_sensitivity,
        subject="batches of one size",
        by=("accounting", "noise law"),
    ),
    Leak(
        "replacing one example counted as adding one",
        replaced_with_c,
        subject="batches of one size",
    ),
    Leak("noise per micro-batch", per_micro_batch(False), by=NOISE),
    Leak("noise per micro-batch from the same seed", per_micro_batch(True), by=NOISE),
    Leak("shards draw noise from the same seed", sharded, by=NOISE),
    Leak("one bias without noise", leave_last_bare, by=NOISE),
    Leak("noise from torch's seeded generator", stream(from_torch), by=NOISE),
    Leak("the same noise at every step", change_draw_count(the_same), by=NOISE),
    Leak("Laplace noise accounted as Gaussian", stream(laplace), subject="wide", by=NOISE),
    Leak("noise stream repeated after a resume", repeated_after_resume, subject="wide", by=NOISE),
    Leak(
        "noise in parameter coordinates",
        map_before_noise,
        subject="DP-KFC",
        canaries=("stretched",),
    ),
    Leak("noise rounded to bfloat16", round_noise_to(torch.bfloat16), by=RUN),
    Leak(
        "noise rounded to float16",
        round_noise_to(torch.float16),
        subject="DP-SGD in float32",
        by=RUN,
    ),
    Leak(
        "noise on a grid of 2^-18 standard deviations",
        stream(draw_on_grid),
        subject="DP-SGD in float32",
        by=RUN,
    ),
    Leak("rounded noise that is not rounded", skip_rounding, subject="rounded noise", by=RUN),
    Leak("tails cut off at 3.5 standard deviations", stream(cut_off), by=RUN),
    Leak("noise that repeats after 100 draws", change_draw_count(repeat_draws), by=RUN),
    Leak("noise that weakens from step 70 on", stream(weaken_late_draws), by=RUN),
    Leak("batch size in the low bits of the release", hide_in_low_bits(lambda _, n: n), by=SIZES),
    Leak("a hash of the sum in the low bits", hide_in_low_bits(hash_of_sums), by=("low bits",)),
    Leak("division by a rounded realised batch size", change_release(rounded_size), by=SIZES),
    Leak("a sum divided by the realised batch size", change_release(sum_by_the_size), by=SIZES),
    Leak("division by the actual batch size", actual_size),
]
