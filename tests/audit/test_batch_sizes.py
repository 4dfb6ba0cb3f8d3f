"""Batches of many sizes and low bits of releases: sound steps pass, and the checks reach what they
claim to test.
"""

import pytest

from dpkfc.audit.batch_sizes import check_batch_sizes, random_sizes
from dpkfc.audit.findings import select_failed
from dpkfc.audit.low_bits import check_low_bits
from dpkfc.audit.replay import World, _neighbouring_pairs
from tests.audit.sizes import size
from tests.injected_bugs.leak import note_batches
from tests.injected_bugs.subjects import SUBJECTS, B, N, canaries_of, subject_of, vectors


@pytest.mark.parametrize("name", size(("rounded noise", "DP-SGD in float32"), tuple(SUBJECTS)))
def test_low_bits_of_sound_steps_raise_no_alarm(name):
    assert check_low_bits(subject_of(name)).passed


def test_sizes_reach_twice_the_expected_one_and_beyond_127_rows():
    assert all(200 <= s <= 256 for _ in range(20) for s in random_sizes(200))
    assert all(
        sizes[-1] == 160 and max(sizes[:-1]) <= 2 * B
        for sizes in (random_sizes(B) for _ in range(20))
    )


def test_batches_have_the_rows_and_the_order_that_the_check_names(
    monkeypatch,
):
    seen, rows = note_batches(monkeypatch), []
    real = World.step

    def step(self, *args):
        released = real(self, *args)
        rows.append(seen[0][1].indices.tolist())
        return released

    monkeypatch.setattr(World, "step", step)
    assert not select_failed(check_batch_sizes(vectors(), sizes=(6,)))
    assert rows[::2] == [[]] * 7
    assert [len(batch) for batch in rows[1::2]] == [6, 6, 3, 3, 6, 6, 6]
    assert [batch.index(N + 12) for batch in rows[9::2]] == [0, 3, 5]


def test_a_step_without_a_release_cannot_be_judged(monkeypatch):
    monkeypatch.setattr(World, "step", lambda self, *_: None)
    with pytest.raises(RuntimeError, match="made no release"):
        check_batch_sizes(vectors(), sizes=(4,))


def test_neighbours_differ_in_the_first_the_middle_and_the_last_row():
    places = set()
    for name, one, other in _neighbouring_pairs(vectors(), canaries_of("DP-SGD"), (7,)):
        if not name.startswith("control"):
            [place] = [k for k, unit in enumerate(other) if unit >= N]
            assert [*other[:place], *other[place + 1 :]] == one
            places.add(place)
    assert places == {0, 3, 7}
