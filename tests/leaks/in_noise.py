"""Leaks in the noise: too little, in the wrong place, or used twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpkfc import session
from dpkfc.data.sampling import FixedSize
from dpkfc.plan import Plan
from dpkfc.postprocess.readout import read_out
from dpkfc.privacy import mechanism
from dpkfc.privacy.mechanism import Released
from dpkfc.privacy.rng import NoiseStream
from dpkfc.session import Session
from tests.leaks.leak import Leak, Patch, noting_batches, swapped
from tests.leaks.subjects import C


def scaled(share: Any) -> Patch:
    """The standard deviation times share(stddev, divisor)."""

    def patch(m: pytest.MonkeyPatch) -> None:
        swapped(
            m, mechanism, "gaussian_release",
            lambda real: lambda x, stddev, divisor, normal: real(x, stddev * share(stddev, divisor), divisor, normal),
        )  # fmt: skip

    return patch


def without_sensitivity(m: pytest.MonkeyPatch) -> None:
    m.setattr(Plan, "stddev", property(lambda plan: plan.noise_multiplier))


def replaced_with_c(m: pytest.MonkeyPatch) -> None:
    m.setattr(FixedSize, "sensitivity", lambda self, max_grad_norm: max_grad_norm)


def per_micro_batch(same_seed: bool) -> Patch:
    """Noise is added to the sum of every micro-batch, and to the sum of all no more."""

    def patch(m: pytest.MonkeyPatch) -> None:
        def make(real: Any) -> Any:
            def clipped_sum(*args: Any, micro_batches: Any, **options: Any) -> Any:
                total, norms = real(*args, micro_batches=[], **options)
                for part in micro_batches:
                    stream = NoiseStream.repeatable(0) if same_seed else NoiseStream.secure()
                    sums, found = real(*args, micro_batches=[part], **options)
                    for k, (name, x) in enumerate(sums.items()):
                        z = torch.from_numpy(stream.normal(x.numel(), k, "float64")).view(x.shape)
                        total[name] = total[name] + x + C * z.to(x)
                    norms = torch.cat([norms.to(found), found])
                return total, norms

            return clipped_sum

        swapped(m, session, "clipped_sum", make)
        swapped(m, mechanism, "gaussian_release", lambda real: lambda x, _, divisor, normal: real(x, 0.0, divisor, normal))

    return patch


def sharded(m: pytest.MonkeyPatch) -> None:
    """Two ranks hold half of the parameters each, and draw their noise from the same seed."""

    def make(real: Any) -> Any:
        def release(tensors: Any, stddev: float, divisor: float, normal: Any) -> Any:
            names = list(tensors)
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            size = max(sum(tensors[n].numel() for n in half) for half in halves)
            drawn = normal(size, torch.float64)
            shards = [real({n: tensors[n] for n in half}, stddev, divisor, lambda k, _: drawn[:k].clone()) for half in halves]
            return shards[0] | shards[1]

        return release

    swapped(m, mechanism, "gaussian_release", make)


def without_one(m: pytest.MonkeyPatch) -> None:
    """The last bias, three numbers, is left as it is."""

    def make(real: Any) -> Any:
        def release(tensors: Any, stddev: float, divisor: float, normal: Any) -> Any:
            last = list(tensors)[-1]
            return {**real(tensors, stddev, divisor, normal), last: tensors[last] / divisor}

        return release

    swapped(m, mechanism, "gaussian_release", make)


def stream(draw: Any) -> Patch:
    """Numbers from another source; draw(self, real, size, step, dtype)."""

    def patch(m: pytest.MonkeyPatch) -> None:
        def make(real: Any) -> Any:
            return lambda self, size, step, dtype=np.float32: draw(self, real, size, step, dtype)

        swapped(m, NoiseStream, "normal", make)

    return patch


def from_torch(self: Any, real: Any, size: int, step: int, dtype: Any) -> Any:
    self._draws += 1
    return torch.randn(size, dtype=torch.float64).numpy().astype(dtype)


def the_same(self: Any, real: Any, size: int, step: int, dtype: Any) -> Any:
    self._draws = 0
    return real(self, size, step, dtype)


def laplace(self: Any, real: Any, size: int, step: int, dtype: Any) -> Any:
    self._draws += 1
    return np.random.default_rng().laplace(scale=0.5**0.5, size=size).astype(dtype)


def repeated_after_resume(m: pytest.MonkeyPatch) -> None:
    """The state of the stream is put back together with the checkpoint."""
    kept: dict[str, Any] = {}

    def saving(real: Any) -> Any:
        def save(self: Session, *args: Any, **options: Any) -> None:
            real(self, *args, **options)
            kept["state"] = self._noise._key, self._noise._draws

        return save

    def restoring(real: Any) -> Any:
        def restore(self: Session, folder: Any) -> Any:
            extra = real(self, folder)
            self._noise._key, self._noise._draws = kept["state"]
            return extra

        return restore

    swapped(m, Session, "save", saving)
    swapped(m, Session, "restore", restoring)


def in_parameter_coordinates(m: pytest.MonkeyPatch) -> None:
    """The sum is mapped back before the noise is added, not after."""

    def make(real: Any) -> Any:
        def clipped_sum(model: Any, layers: Any, metric: Any, *args: Any, **options: Any) -> Any:
            sums, norms = real(model, layers, metric, *args, **options)
            as_released = Released(gradients=sums, noise_variance=1.0, step=0, release=1)
            return dict(read_out(as_released, metric, layers, "inverse").gradients), norms

        return clipped_sum

    swapped(m, session, "clipped_sum", make)


def actual_size(m: pytest.MonkeyPatch) -> None:
    seen = noting_batches(m)

    def make(real: Any) -> Any:
        return lambda x, stddev, divisor, normal: real(x, stddev, max(1, len(seen[0][1].indices)), normal)

    swapped(m, mechanism, "gaussian_release", make)


NOISE, REPLAY = ("noise law",), ("replay",)
LEAKS = [
    Leak(name="noise scaled as if C were 1", subject="wide", patch=scaled(lambda s, b: C), by=NOISE),
    Leak(name="noise divided by the batch size twice", subject="DP-SGD", patch=scaled(lambda s, b: 1 / b), by=NOISE),
    Leak(name="98 % of the noise", subject="wide", patch=scaled(lambda s, b: 0.98), by=NOISE),
    Leak(name="95 % of the noise", subject="wide", patch=scaled(lambda s, b: 0.95), by=NOISE),
    Leak(name="90 % of the noise", subject="DP-SGD", patch=scaled(lambda s, b: 0.90), by=NOISE),
    Leak(
        name="noise without the sensitivity, by a wrong plan", subject="batches of one size", patch=without_sensitivity,
        by=("accounting", "noise law"),
    ),
    Leak(name="replacing one example counted as adding one", subject="batches of one size", patch=replaced_with_c, by=REPLAY),
    Leak(name="noise per micro-batch", subject="DP-SGD", patch=per_micro_batch(False), by=NOISE),
    Leak(name="noise per micro-batch from the same seed", subject="DP-SGD", patch=per_micro_batch(True), by=NOISE),
    Leak(name="shards draw noise from the same seed", subject="DP-SGD", patch=sharded, by=NOISE),
    Leak(name="one bias without noise", subject="DP-SGD", patch=without_one, by=NOISE),
    Leak(name="noise from torch's seeded generator", subject="DP-SGD", patch=stream(from_torch), by=NOISE),
    Leak(name="the same noise at every step", subject="DP-SGD", patch=stream(the_same), by=NOISE),
    Leak(name="Laplace noise accounted as Gaussian", subject="wide", patch=stream(laplace), by=NOISE),
    Leak(name="noise stream repeated after a resume", subject="wide", patch=repeated_after_resume, by=NOISE),
    Leak(
        name="noise in parameter coordinates", subject="DP-KFC", patch=in_parameter_coordinates, by=REPLAY,
        canaries=("stretched",),
    ),
    Leak(name="division by the actual batch size", subject="DP-SGD", patch=actual_size, by=REPLAY),
]  # fmt: skip
