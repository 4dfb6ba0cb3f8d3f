"""Streams: independent of every seed, never repeated, never stored; in test mode a function of
(seed, step).
"""

import copy
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from dpkfc.privacy.normal_numbers import fill_normal
from dpkfc.privacy.rng import CHUNK, NoiseStream, SamplingStream

STREAMS = [NoiseStream, SamplingStream]


def test_chunks_have_nothing_to_do_with_one_another():
    """Whichever thread fills them: no chunk repeats another, nor is one filled twice or left
    out.
    """
    z = NoiseStream.secure().normal(33 * CHUNK + 5, 0)
    chunks = z[: 33 * CHUNK].reshape(33, CHUNK).astype(float)
    # 528 pairs of secret noise
    assert np.abs(np.corrcoef(chunks) - np.eye(33)).max() < 7 / CHUNK**0.5
    assert np.isfinite(z).all() and len({chunk.tobytes() for chunk in chunks}) == 33


def test_the_tail_has_more_bits_than_the_rest():
    """Words of zeros are the farthest radius; without further bits it would end at 6.8 and take few
    values.
    """
    zeros = torch.zeros(8, dtype=torch.int64)
    out = torch.empty(8)
    fill_normal(out, lambda count, bits: zeros[:count])
    assert 10.9 < out.max() < 10.95  # sqrt(2 · 86 · ln 2)
    fine = {32: zeros, 53: torch.arange(4) << 51}
    fill_normal(out, lambda count, bits: fine[bits][:count])
    assert len(out[:4].unique()) == 4


def test_draws_and_chunks_use_counters_that_never_overlap():
    """A chunk of the largest size takes far fewer blocks of the cipher than its counter has room
    for.
    """
    assert 16 * CHUNK / 16 + 2 * CHUNK < 2**32


@pytest.mark.parametrize("size", [1, 2, 3, CHUNK + 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_odd_sizes(size, dtype):
    z = NoiseStream.secure().normal(size, 0, dtype=dtype)
    assert z.shape == (size,) and np.isfinite(z).all() and z.dtype == dtype


def test_float64_is_generated_not_widened():
    z = NoiseStream.repeatable(1).normal(1000, 0, dtype=np.float64)
    assert z.dtype == np.float64
    assert np.any(z != z.astype(np.float32))


def test_draws_of_a_secure_stream_never_repeat():
    stream, other = NoiseStream.secure(), NoiseStream.secure()
    draws = [stream.normal(1000, step) for step in (0, 0, 1)] + [other.normal(1000, 0)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert not np.intersect1d(a.view(np.uint32), b.view(np.uint32)).size > 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.2


@pytest.mark.parametrize("size", [0, 1, 5 * CHUNK, 12 * CHUNK + 3])
@pytest.mark.parametrize("threads", [1, 3, 40])
def test_a_draw_that_is_handed_out_is_the_draw_in_order(size, threads):
    handed = np.full(size, np.nan, np.float32)

    def use(begin, z):
        assert np.isnan(handed[begin : begin + len(z)]).all()
        handed[begin : begin + len(z)] = z

    NoiseStream.repeatable(4).draw(size, 2).hand_out(use, threads)
    assert np.array_equal(handed, NoiseStream.repeatable(4).normal(size, 2))


def test_a_draw_that_fails_ends_when_no_thread_uses_it_any_more():
    working = set()
    has_begun = threading.Event()

    def use(begin, z):
        if threading.current_thread() is threading.main_thread():
            has_begun.wait()
            raise MemoryError
        working.add(begin)
        has_begun.set()
        time.sleep(0.05)
        working.remove(begin)

    with pytest.raises(MemoryError):
        NoiseStream.secure().draw(12 * CHUNK, 0).hand_out(use, 3)
    assert not working


def test_what_fails_in_another_thread_is_raised():
    def use(begin, z):
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.05)
        else:
            raise MemoryError

    with pytest.raises(MemoryError):
        NoiseStream.secure().draw(12 * CHUNK, 0).hand_out(use, 3)


def test_test_mode_is_a_function_of_seed_and_step():
    first = NoiseStream.repeatable(7)
    run = [first.normal(50, step) for step in range(4)]
    resumed = NoiseStream.repeatable(7)
    assert np.array_equal(resumed.normal(50, 2), run[2])
    assert np.array_equal(resumed.normal(50, 3), run[3])
    assert not np.intersect1d(run[0], run[1]).size
    assert not np.intersect1d(run[0], NoiseStream.repeatable(8).normal(50, 0)).size
    assert first.device_seed(1) == NoiseStream.repeatable(7).device_seed(1) != first.device_seed(2)


@pytest.mark.parametrize("kind", STREAMS)
def test_global_seeds_do_not_reach_a_secure_stream(kind):
    seen = set()
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        stream = kind.secure()
        seen.add(stream.normal(1, 0)[0] if kind is NoiseStream else stream.generator(0).random())
    assert len(seen) == 2


def test_noise_and_sampling_of_one_seed_share_nothing():
    noise = NoiseStream.repeatable(3).normal(1000, 0, dtype=np.float64)
    other = SamplingStream.repeatable(3).generator(0).standard_normal(1000)
    assert not np.intersect1d(noise, other).size


def test_sampling_is_fresh_when_a_step_is_repeated_and_repeatable_in_test_mode():
    secure, test = SamplingStream.secure(), SamplingStream.repeatable(1)
    assert secure.generator(4).random() != secure.generator(4).random()
    assert test.generator(4).random() == SamplingStream.repeatable(1).generator(4).random()
    assert test.generator(4).random() != test.generator(5).random()


@pytest.mark.parametrize("stream", [SamplingStream.secure(), SamplingStream.repeatable(1)])
def test_steps_of_one_shuffled_epoch_share_a_draw(stream):
    draws = [stream.generator(step, steps_per_draw=3).random() for step in range(6)]
    assert draws[0] == draws[1] == draws[2] != draws[3] == draws[4] == draws[5]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(
    "make", [lambda k: k.secure(), lambda k: k.repeatable(0)], ids=["secure", "repeatable"]
)
@pytest.mark.parametrize(
    "store", [pickle.dumps, copy.copy, copy.deepcopy, lambda s: s.__getstate__()]
)
def test_a_stream_is_never_stored(kind, make, store):
    with pytest.raises(TypeError, match="never copied or pickled.*exposes the difference"):
        store(make(kind))


def test_is_secure():
    assert NoiseStream.secure().is_secure
    assert not NoiseStream.repeatable(0).is_secure


@pytest.mark.parametrize("seed", [-1, 1.5, True, "1"])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match=r"must be an integer >= 0, got"):
        NoiseStream.repeatable(seed)


def test_bad_arguments():
    with pytest.raises(ValueError, match="size and step must be >= 0, got size=-1"):
        NoiseStream.secure().normal(-1, 0)
    with pytest.raises(ValueError, match="need step >= 0 and steps_per_draw >= 1"):
        SamplingStream.secure().generator(0, 0)


def test_no_numbers_are_fine():
    assert NoiseStream.secure().normal(0, 0).shape == (0,)


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 9 * CHUNK + 3, 40 * CHUNK])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chunks_are_the_draw_in_its_order(size, dtype):
    whole = NoiseStream.repeatable(4).normal(size, 2, dtype)
    chunks = [chunk.copy() for chunk in NoiseStream.repeatable(4).draw(size, 2, dtype)]
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK] * (len(chunks) - 1)
    assert np.array_equal(np.concatenate([*chunks, np.zeros(0, dtype)]), whole)


def test_each_draw_has_numbers_of_its_own():
    stream = NoiseStream.secure()
    first, second = stream.draw(5, 0), stream.draw(5, 0)
    assert not set(next(iter(second))) & set(next(iter(first))) and stream._draws == 2
    with pytest.raises(ValueError, match="size and step"):
        stream.draw(-1, 0)
