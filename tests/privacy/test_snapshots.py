"""Equal memory does not give equal numbers: snapshots that are resumed twice, forks, and kernels
that repeat their bytes.
"""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc import rng_state
from dpkfc.privacy import rng
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.privacy.rng import CHUNK, NoiseStream, SamplingStream, draw_key


def draw_in_threads(stream, step):
    out = np.empty(9 * CHUNK, np.float32)

    def use(begin, z):
        out[begin : begin + len(z)] = z

    stream.draw(len(out), step).hand_out(use, 2)
    return out


DRAWS = {
    "normal, float32": lambda stream, step: stream.normal(8, step),
    "normal, float64": lambda stream, step: stream.normal(8, step, np.float64),
    "normal, two chunks": lambda stream, step: stream.normal(CHUNK + 8, step),
    "in threads": draw_in_threads,
    "chunks": lambda stream, step: np.concatenate(list(stream.draw(8, step))),
    "batch": lambda stream, step: stream.generator(step).random(8),
    "shuffled epoch": lambda stream, step: stream.generator(3 * step, steps_per_draw=3).random(8),
}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")


def new_stream(name):
    return SamplingStream.secure() if name in ("batch", "shuffled epoch") else NoiseStream.secure()


def resume(stream):
    """Return a second stream with the memory of the first."""
    other = type(stream).secure()
    other.__dict__.clear()
    other.__dict__.update(stream.__dict__)
    return other


def read_from_child(work):
    """Fork, and return what the child computes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        result = b""
        try:
            result = work()
        finally:
            os.write(writer, result)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


@settings(max_examples=50, deadline=None)
@given(
    before=st.lists(st.sampled_from(sorted(DRAWS)), max_size=4),
    after=st.sampled_from(sorted(DRAWS)),
)
def test_two_resumptions_of_one_snapshot_draw_different_numbers(before, after):
    stream = new_stream(after)
    for step, name in enumerate(before):
        if type(new_stream(name)) is type(stream):
            DRAWS[name](stream, step)
    one, other = stream, resume(stream)
    for step in (10, 11):
        assert np.mean(DRAWS[after](one, step) == DRAWS[after](other, step)) < 0.1


def test_two_resumptions_finish_the_shuffled_epoch_of_the_snapshot_in_one_order():
    stream = SamplingStream.secure()
    first = stream.generator(0, 3).random()
    one, other = stream, resume(stream)
    assert one.generator(1, 3).random() == other.generator(2, 3).random() == first
    assert one.generator(3, 3).random() != other.generator(3, 3).random()


def test_a_stream_keeps_no_key_that_decides_a_later_draw():
    stream = NoiseStream.secure()
    keys = []
    for step in range(4):
        stream.normal(1, step)
        keys.append(stream._key)
    assert len(set(keys)) == 4 and all(len(key) == 32 for key in keys)


@needs_fork
@pytest.mark.parametrize("name", DRAWS)
def test_a_forked_child_draws_different_numbers(name, monkeypatch):
    """Also where parent and child have one process identifier, as in two PID namespaces."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    stream = new_stream(name)
    DRAWS[name](stream, 0)
    theirs = np.frombuffer(
        read_from_child(lambda: DRAWS[name](stream, 1)[:8].tobytes()), dtype=np.uint32
    )
    ours = DRAWS[name](stream, 1)[:8].view(np.uint32)
    assert len(theirs) == len(ours) and not np.array_equal(theirs, ours)


@needs_fork
def test_a_child_forked_in_the_middle_of_an_epoch_takes_another_order():
    stream = SamplingStream.secure()
    first = stream.generator(0, 3).random()
    theirs = np.frombuffer(read_from_child(lambda: stream.generator(1, 3).random(1).tobytes()))[0]
    assert stream.generator(1, 3).random() == first != theirs


@needs_fork
@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_forked_child_may_not_charge_its_parents_ledger(place, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    ledger = (
        Ledger.open(tmp_path / "ledger.jsonl", "plan")
        if place == "file"
        else Ledger.open(None, "plan")
    )

    def message():
        try:
            ledger.charge(0, None, 1.0, 1.0, 1.0)
        except LedgerError as error:
            return str(error).encode()
        return b"charged"

    assert b"a forked process needs its own ledger" in read_from_child(message)
    ledger.close()


def test_a_key_differs_where_the_kernel_repeats_its_bytes(monkeypatch):
    """A virtual machine without a generation identifier resumes with the generator of its
    kernel.
    """
    monkeypatch.setattr(rng.os, "urandom", bytes)
    keys = {draw_key() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {32}


def test_a_key_is_unknown_where_the_clock_is_known(monkeypatch):
    monkeypatch.setattr(rng.time, "time_ns", lambda: 0)
    monkeypatch.setattr(rng.time, "perf_counter_ns", lambda: 0)
    assert len({draw_key() for _ in range(100)}) == 100


def test_every_draw_asks_the_kernel(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(rng.os, "urandom", lambda count: asked.append(count) or real(count))
    for name, draw in DRAWS.items():
        stream = new_stream(name)
        for step in range(3):
            draw(stream, step)
            assert asked == [32] * (step + 1), name
        asked.clear()


def test_test_mode_asks_the_kernel_for_nothing(monkeypatch):
    monkeypatch.setattr(rng.os, "urandom", lambda count: pytest.fail("test mode drew a key"))
    noise, sampling = NoiseStream.repeatable(7), SamplingStream.repeatable(7)
    for name, draw in DRAWS.items():
        draw(sampling if name in ("batch", "shuffled epoch") else noise, 3)


def test_the_numbers_of_test_mode_never_change():
    noise, sampling = NoiseStream.repeatable(7), SamplingStream.repeatable(7)
    narrow = [1.5654619932174683, 1.2725188732147217, 1.9653215408325195, 0.8000401258468628]
    wide = [0.9645314933296009, 1.402711235141071, 1.1528432805413793, -1.6921282956279688]
    np.testing.assert_allclose(noise.normal(4, 3), narrow, rtol=1e-6)
    np.testing.assert_allclose(noise.normal(4, 3, np.float64), wide, rtol=1e-14)
    assert noise.device_seed(3) == 8948521169490412876
    assert sampling.generator(5).integers(1 << 40, size=2).tolist() == [593427246987, 742202183832]
    assert sampling.generator(5, 2).integers(1 << 40, size=2).tolist() == [
        420306606596,
        994366479230,
    ]


def test_the_global_generators_are_renewed_from_fresh_keys():
    """Dropout and augmentation: a private pass begins with numbers that no earlier memory holds."""
    states = rng_state.all_states()
    seen = []
    for _ in range(2):
        rng_state.restore_all_states(states)
        with rng_state.randomize_generators():
            seen.append(
                (rng_state.torch.rand(()).item(), np.random.rand(), rng_state.random.random())
            )
    assert all(a != b for a, b in zip(*seen, strict=True))
