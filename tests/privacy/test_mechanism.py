"""The choke point: the scale of the noise, what is charged when, and what is refused before it is
charged.
"""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from dpkfc.config import PrivacyConfig
from dpkfc.privacy import mechanism
from dpkfc.privacy.ledger import BudgetExhausted, Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.privacy.mechanism import ClippedSum, gaussian_release, release
from dpkfc.privacy.rng import CHUNK, NoiseStream

N, B = 1000, 50


def make_plan(noise_multiplier=1.3, **changes):
    settings = {"expected_batch_size": B, "steps": 5, "max_grad_norm": 2.0} | changes
    return PrivacyConfig(**settings).with_noise(noise_multiplier, 1e-5, N)


def make_ledger(plan):
    return Ledger.open(None, plan.hash, max_releases=plan.steps)


def zeros(plan, **tensors):
    tensors = tensors or {"a": torch.zeros(100, 150), "b": torch.zeros(5000)}
    return ClippedSum(tensors, plan.max_grad_norm, plan.clipping)


def test_a_release_takes_the_memory_of_the_sum_over_the_expected_batch_size():
    plan = make_plan(noise_multiplier=1e-9)
    sums = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2, 5, dtype=torch.float64).T,
        "c": torch.tensor(1.5),
    }
    kept = {k: v.clone() for k, v in sums.items()}
    released = release(zeros(plan, **sums), plan, plan.noise_stream(), make_ledger(plan), 3)
    for name, value in kept.items():
        assert released.gradients[name].dtype == value.dtype
        assert torch.allclose(released.gradients[name], value / B, atol=1e-8)
    assert torch.equal(sums["a"], released.gradients["a"])
    assert torch.equal(sums["b"], kept["b"])  # a view
    assert (released.step, released.release) == (3, 1)


def test_no_noise_is_exact_and_still_charged():
    plan = make_plan(noise_multiplier=0.0)
    ledger, x = make_ledger(plan), torch.randn(7)
    released = release(zeros(plan, a=x.clone()), plan, plan.noise_stream(), ledger, 0)
    assert torch.equal(released.gradients["a"], x / B)
    assert released.noise_variance == 0
    assert ledger.count == 1


class Watching(NoiseStream):
    """A stream that reads the ledger when noise is drawn."""

    def normal(self, size, step, dtype=np.float32):
        self.seen = len(verify(self.path).releases)
        return super().normal(size, step, dtype)


def test_the_ledger_is_on_the_disk_before_the_noise_is_drawn(tmp_path):
    plan, noise = make_plan(), Watching.secure()
    noise.path = tmp_path / "ledger.jsonl"
    with Ledger.open(noise.path, plan.hash) as ledger:
        released = release(zeros(plan), plan, noise, ledger, 4)
        record = ledger.releases[0]
    assert noise.seen == 1
    assert released.noise_variance == pytest.approx((plan.stddev / B) ** 2)
    assert (record["step"], record["noise_multiplier"]) == (4, plan.noise_multiplier)
    assert (record["stddev"], record["sensitivity"]) == (plan.stddev, plan.sensitivity)


def test_beyond_the_plan_nothing_is_released():
    plan = make_plan(steps=2)
    ledger, noise = make_ledger(plan), plan.noise_stream()
    for step in range(2):
        release(zeros(plan), plan, noise, ledger, step)
    with pytest.raises(BudgetExhausted, match="the plan allows 2 releases"):
        release(zeros(plan), plan, noise, ledger, 2)
    assert ledger.count == 2
    ledger.close()
    with pytest.raises(LedgerError, match="it is closed"):
        release(zeros(plan), plan, noise, ledger, 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.tensor([1.0, math.nan])}, "the clipped sum of 'w' is not finite"),
        ({"w": torch.tensor([math.inf])}, "the clipped sum of 'w' is not finite"),
        (
            {"w": torch.zeros(2, dtype=torch.bfloat16)},
            "the clipped sum of 'w' is torch.bfloat16; .* need float32",
        ),
        ({"w": torch.zeros(2, dtype=torch.int64)}, "the clipped sum of 'w' is torch.int64"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")},
            r"on several devices: \['cpu', 'meta'\]",
        ),
    ],
)
def test_a_sum_that_cannot_be_released_is_refused_before_it_is_charged(tensors, message):
    plan = make_plan()
    ledger = make_ledger(plan)
    with pytest.raises(ValueError, match=message):
        release(zeros(plan, **tensors), plan, plan.noise_stream(), ledger, 0)
    assert ledger.count == 0


def test_parts_of_different_plans_are_refused_before_anything_is_charged():
    plan, tested = make_plan(), make_plan(test_mode_seed=0)
    ledger = make_ledger(plan)
    good = zeros(plan)
    cases = [
        (
            dataclasses.replace(good, max_grad_norm=1.0),
            plan.noise_stream(),
            ledger,
            "clipped with max_grad_norm=1.0 ",
        ),
        (
            dataclasses.replace(good, clipping="normalised"),
            plan.noise_stream(),
            ledger,
            r"2.0 \(normalised\), the plan",
        ),
        (
            good,
            tested.noise_stream(),
            ledger,
            "the noise stream is repeatable and the plan is not in test mode",
        ),
        (
            good,
            plan.noise_stream(),
            Ledger.open(None, "other"),
            "the ledger belongs to the plan other",
        ),
        (ClippedSum({}, 2.0), plan.noise_stream(), ledger, "has no tensors"),
    ]
    for clipped, noise, book, message in cases:
        with pytest.raises(ValueError, match=message):
            release(clipped, plan, noise, book, 0)
    with pytest.raises(ValueError, match="the noise stream is secure and the plan is in test mode"):
        release(good, tested, plan.noise_stream(), make_ledger(tested), 0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        release(good, plan, plan.noise_stream(), ledger, -1)
    assert ledger.count == 0


def test_gaussian_release_draws_once_over_all_tensors():
    tensors = {"a": torch.ones(2, 3), "b": torch.full((4,), 2.0)}
    drawn = []

    def normal(size, dtype):
        drawn.append((size, dtype))
        return torch.arange(size, dtype=dtype)

    out = gaussian_release(tensors, 0.5, 4.0, normal)
    assert drawn == [(10, torch.float32)]
    assert torch.equal(out["a"], (1 + 0.5 * torch.arange(6.0).view(2, 3)) / 4)
    assert torch.equal(out["b"], (2 + 0.5 * torch.arange(6.0, 10.0)) / 4)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("noise", ["gaussian", "rounded"])
def test_threads_finish_their_own_pieces_of_all_tensors(noise, threads):
    """Tensors without entries, of one entry, and views among tensors of many pieces."""
    sums = {
        "first": torch.zeros(0, 3),
        "one": torch.randn(()),
        "view": torch.randn(CHUNK // 64, 260)[:, :-1],
        "empty": torch.zeros(0),
        "few": torch.randn(7),
        "last": torch.randn(9 * CHUNK + 5),
    }
    before_noise = {name: x.clone() for name, x in sums.items()}
    numbers = sum(x.numel() for x in sums.values())

    def source():
        stream = NoiseStream.repeatable(3)
        return mechanism._choose_source(stream, 5, torch.device("cpu"), numbers)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if noise == "gaussian":
            out = gaussian_release(sums, 0.5, 4.0, source())
        else:
            out = mechanism.rounded_release(sums, 0.5, 4.0, source(), 2.0**-40)
    finally:
        torch.set_num_threads(before)
    z = source()(numbers, torch.float32 if noise == "gaussian" else torch.float64)
    assert out.keys() == sums.keys()
    for name, part in zip(sums, z.split([x.numel() for x in sums.values()]), strict=True):
        expected = (before_noise[name].flatten() + 0.5 * part) / 4
        assert out[name].shape == sums[name].shape
        assert torch.allclose(out[name].flatten(), expected.float(), rtol=0, atol=1e-6)


RELEASES = [gaussian_release, partial(mechanism.rounded_release, grid=2.0**-40)]


@pytest.mark.parametrize("stddev", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("release_of", RELEASES, ids=["gaussian", "rounded"])
def test_a_release_refuses_a_bad_scale(release_of, stddev):
    with pytest.raises(ValueError, match="stddev must be finite and >= 0, got"):
        release_of({"a": torch.zeros(1)}, stddev, 1.0, torch.zeros)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("release_of", RELEASES, ids=["gaussian", "rounded"])
def test_a_release_refuses_a_bad_divisor(release_of, divisor):
    with pytest.raises(ValueError, match="divisor must be positive and finite, got"):
        release_of({"a": torch.zeros(1)}, 1.0, divisor, torch.zeros)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 5, (torch.float64,) * 5, (torch.float32, torch.float64) * 3]
)
def test_a_release_is_the_same_in_pieces(dtypes, monkeypatch):
    """Tensors that end within a chunk, at its end, and lie across several; one that is not
    contiguous.
    """
    shapes = ((3, 5), (CHUNK - 15,), (2 * CHUNK + 7,), (0,), (401, 331))
    tensors = {
        f"p{i}": torch.randn(shape, dtype=dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    tensors["p4"] = tensors["p4"].T
    copies = {name: x.clone() for name, x in tensors.items()}
    plan = make_plan(test_mode_seed=5)
    threads = torch.get_num_threads()
    with monkeypatch.context() as one_piece:
        one_piece.setattr(mechanism, "CHUNK", sum(x.numel() for x in tensors.values()))
        whole = release(
            zeros(plan, **tensors), plan, plan.noise_stream(), make_ledger(plan), 3
        ).gradients
    stream = plan.noise_stream()
    parts = release(zeros(plan, **copies), plan, stream, make_ledger(plan), 3).gradients
    assert stream._draws == 1 and torch.get_num_threads() == threads
    for name, x in whole.items():
        assert (
            torch.equal(x, parts[name]) and x.dtype == parts[name].dtype == tensors[name].dtype
        ), name


def test_a_draw_that_fails_leaves_the_threads_of_torch_alone(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)

    def fail(size, dtype):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gaussian_release({"a": torch.zeros(1)}, 1.0, 1.0, fail)
    assert numbers == [1, 3]
