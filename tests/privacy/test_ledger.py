"""The ledger never under-counts: crashes, full disks, tampering, two writers, folders that cannot
be written.
"""

import errno
import json
import os

import dp_accounting
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.privacy.events import event_from_dict
from dpkfc.privacy.ledger import BudgetExhausted, Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError
from tests import forked

EVENT = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.5))
PLAN = "a" * 64
HEADER = {"certified": True, "rng": "secure"}


def charge(ledger, step=0):
    return ledger.charge(step, EVENT, 1.5, 3.0, 2.0)


@pytest.fixture
def path(tmp_path):
    """A ledger of three releases."""
    file = tmp_path / "ledger.jsonl"
    with Ledger.open(file, PLAN, HEADER) as ledger:
        assert [charge(ledger, step) for step in (0, 1, 1)] == [1, 2, 3]
    return file


def test_what_a_ledger_says(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    header, first = lines[:2]
    assert header["format"] == 1
    assert header["plan_hash"] == PLAN
    assert header["certified"] is True
    assert header["rng"] == "secure"
    assert "created" in header
    assert [line["step"] for line in lines[1:]] == [0, 1, 1]
    assert [line["release"] for line in lines[1:]] == [1, 2, 3]
    assert (first["noise_multiplier"], first["stddev"], first["sensitivity"]) == (1.5, 3.0, 2.0)
    assert event_from_dict(first["event"]) == EVENT
    assert [line["prev"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    state = verify(path)
    assert state.releases == lines[1:]
    assert state.heads == [line["hash"] for line in lines]
    assert state.size == path.stat().st_size


def test_a_ledger_that_was_put_back_and_goes_on_has_another_head(path):
    backup = path.read_bytes()
    heads = []
    for _ in range(2):
        path.write_bytes(backup)
        with Ledger.open(path, PLAN, HEADER) as ledger:
            assert [charge(ledger, step) for step in (2, 3)] == [4, 5]
            heads.append(ledger.head)
        marks = ["resumed" in line for line in verify(path).releases]
        assert marks == [False, False, False, True, False]
    assert heads[0] != heads[1] and not verify(path).contains(5, heads[0])


def test_a_figure_that_no_line_can_hold_is_not_charged(path):
    with Ledger.open(path, PLAN, HEADER) as ledger:
        with pytest.raises(ValueError, match="not JSON compliant"):
            ledger.charge(2, EVENT, 1.5, float("nan"), 2.0)
        assert ledger.count == 3
    assert len(verify(path).releases) == 3


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_ledger_in_memory_behaves_like_a_file(where, tmp_path):
    make = {
        "file": lambda: Ledger.open(tmp_path / "l", PLAN, HEADER, 2),
        "memory": lambda: Ledger.open(None, PLAN, HEADER, 2),
    }
    with make[where]() as ledger:
        heads = [ledger.head]
        assert (ledger.count, ledger.remaining, ledger.plan_hash) == (0, 2, PLAN)
        for _ in range(2):
            charge(ledger)
            heads.append(ledger.head)
        assert len(set(heads)) == 3
        assert [r["hash"] for r in ledger.releases] == heads[1:]
        assert all(ledger.contains(n, head) for n, head in enumerate(heads))
        assert not ledger.contains(1, heads[2])
        assert not ledger.contains(3, heads[2])
        assert not ledger.contains(-1, heads[2])
        with pytest.raises(
            BudgetExhausted, match="the plan allows 2 releases and 2 are charged in the ledger"
        ):
            charge(ledger)
        assert ledger.count == 2
    with pytest.raises(LedgerError, match="takes no further release: it is closed"):
        charge(ledger)


def test_a_charge_beyond_the_plan_writes_no_byte(path):
    before = path.read_bytes()
    with (
        Ledger.open(path, PLAN, HEADER, max_releases=3) as ledger,
        pytest.raises(BudgetExhausted, match="nothing was rel"),
    ):
        charge(ledger)
    assert path.read_bytes() == before


def test_a_charge_is_synced_before_it_returns(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    with Ledger.open(tmp_path / "l", PLAN) as ledger:
        monkeypatch.setattr(
            os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or fsync(fd)
        )
        charge(ledger)
        assert synced == [(tmp_path / "l").stat().st_size]
        assert len(verify(tmp_path / "l").releases) == 1


def test_a_ledger_is_synced_when_it_is_opened_again(path, monkeypatch):
    """Its last line may have been written by a process that was killed before the sync.

    Without it a checkpoint written from then on outlasts a power cut and its ledger does not.
    """
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or fsync(fd))
    with Ledger.open(path, PLAN, HEADER) as ledger:
        assert ledger.count == 3
        assert path.stat().st_size in synced


def test_reopening_continues_the_chain(path):
    with Ledger.open(path, PLAN, HEADER) as ledger:
        assert ledger.count == 3
        old = ledger.head
        assert charge(ledger, 2) == 4
        assert ledger.contains(3, old)
    state = verify(path)
    assert len(state.releases) == 4
    assert state.releases[3]["prev"] == old


def test_a_crash_at_any_byte_of_the_last_line(path, caplog):
    content = path.read_bytes()
    start = content[:-1].rfind(b"\n") + 1
    for end in [start + 1, start + 2, *range(start + 5, len(content) - 1, 29), len(content) - 2]:
        caplog.clear()
        path.write_bytes(content[:end])
        with Ledger.open(path, PLAN, HEADER) as ledger:
            assert ledger.count == 2
            assert charge(ledger, 9) == 3
        assert len(verify(path).releases) == 3
        assert "was cut short by a crash and is removed: its release never left" in caplog.text


def test_a_line_that_lacks_only_its_newline_still_counts(path, caplog):
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with Ledger.open(path, PLAN, HEADER) as ledger:
        assert ledger.count == 3
    assert path.read_bytes() == content
    assert not caplog.records


def test_a_crash_in_the_header_begins_anew(path):
    content = path.read_bytes()
    for end in (0, 1, 10, 50):
        path.write_bytes(content[:end])
        with Ledger.open(path, PLAN, HEADER) as ledger:
            assert ledger.count == 0
        assert verify(path).releases == []


def test_a_zeroed_end_after_a_power_cut_is_removed(path):
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 100)
    with Ledger.open(path, PLAN, HEADER) as ledger:
        assert ledger.count == 3
    assert path.read_bytes() == content


def test_another_file_is_left_alone(tmp_path):
    path = tmp_path / "thesis.txt"
    for content, message in (
        (b"my only copy", "this is not a ledger"),
        (b"two\nlines\n", "line 1 .* is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=message):
            Ledger.open(path, PLAN)
        assert path.read_bytes() == content


@given(st.data())
def test_a_changed_byte_is_noticed(path, data):
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(changed)
        with pytest.raises(LedgerError, match=r"line \d of the ledger"):
            verify(path)
        with pytest.raises(LedgerError, match="line"):
            Ledger.open(path, PLAN, HEADER)
        assert path.read_bytes() == changed
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [lines[0], lines[2], lines[3]], "line 2 .* does not follow line 1"),
        (
            lambda lines: [lines[0], lines[2], lines[1], lines[3]],
            "line 2 .* does not follow line 1",
        ),
        (lambda lines: [*lines[:3], lines[2], lines[3]], "line 4 .* does not follow line 3"),
        (lambda lines: lines[1:], "line 1 .* is not a header"),
        (lambda lines: [lines[0], b"{}\n", *lines[1:]], "line 2 .* is damaged"),
        (lambda lines: [lines[0], b"[1]\n", *lines[1:]], "line 2 .* is damaged"),
        (lambda lines: [lines[0], b"\n", *lines[1:]], "line 2 .* is damaged"),
        (
            lambda lines: [lines[0], lines[1].replace(b'"step":0', b'"step":5'), *lines[2:]],
            "line 2 .* its hash does not",
        ),
        (
            lambda lines: [lines[0], lines[1].replace(b":", b": ", 1), *lines[2:]],
            "line 2 .* its hash does not fit",
        ),
    ],
)
def test_tampering_names_the_line(path, edit, message):
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))
    for use in (verify, lambda p: Ledger.open(p, PLAN, HEADER)):
        with pytest.raises(LedgerError, match=message):
            use(path)


def test_lines_cut_off_at_the_end_are_noticed_by_a_checkpoint(path):
    head = verify(path).heads[3]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with Ledger.open(path, PLAN, HEADER) as ledger:
        assert not ledger.contains(3, head)
        charge(ledger, 7)
        assert not ledger.contains(3, head)


def test_another_plan_or_mode_is_refused(path):
    with pytest.raises(
        LedgerError, match=f"belongs to the plan {PLAN[:12]}, this run to {'b' * 12};"
    ):
        Ledger.open(path, "b" * 64, HEADER)
    with pytest.raises(LedgerError, match="was begun with rng='secure', this run has 'repeatable'"):
        Ledger.open(path, PLAN, HEADER | {"rng": "repeatable"})
    with pytest.raises(LedgerError, match="was begun with certified=True, this run has False"):
        Ledger.open(path, PLAN, HEADER | {"certified": False})


def test_a_header_may_say_more_but_not_lie(tmp_path):
    with Ledger.open(tmp_path / "l", PLAN, {"plan": {"sigma": 1.0, "shape": (1, 2)}}) as ledger:
        assert ledger.header["plan"]["sigma"] == 1.0
    with Ledger.open(tmp_path / "l", PLAN, {"plan": {"other": 2}}) as ledger:
        assert ledger.count == 0
    with pytest.raises(ValueError, match=r"may not set \['plan_hash'\]"):
        Ledger.open(None, PLAN, {"plan_hash": "x"})


def test_two_writers_are_kept_apart(path):
    with (
        Ledger.open(path, PLAN, HEADER),
        pytest.raises(LedgerError, match="is being written by another run"),
    ):
        Ledger.open(path, PLAN, HEADER)
    Ledger.open(path, PLAN, HEADER).close()


def _hold_ledger(path, close_first):
    """A child is forked while a ledger is open, and lives on; what it closes is not its parent's to
    lose.
    """
    ledger = Ledger.open(path, PLAN, HEADER)
    told, tells = os.pipe()
    waits, go = os.pipe()
    child = os.fork()
    if child == 0:
        if close_first:
            ledger.close()
        os.write(tells, b"x")
        os.close(go)
        os.read(waits, 1)
        os._exit(0)
    os.read(told, 1)
    try:
        if close_first:
            with pytest.raises(LedgerError, match="is being written by another run"):
                Ledger.open(path, PLAN, HEADER)
        charge(ledger)
        ledger.close()
        Ledger.open(path, PLAN, HEADER).close()
    finally:
        os.close(go)
        os.waitpid(child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.parametrize("close_first", [False, True], ids=["holds it", "closes it"])
def test_a_forked_process_neither_keeps_a_closed_ledger_locked_nor_unlocks_an_open_one(
    path, close_first
):
    done = forked.call(_hold_ledger, path, close_first, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_failed_opening_gives_the_lock_back(path):
    for _ in range(2):
        with pytest.raises(LedgerError, match="belongs to the plan"):
            Ledger.open(path, "b" * 64)
    Ledger.open(path, PLAN, HEADER).close()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (
        tmp_path / "file" / "ledger.jsonl",
        tmp_path / "missing" / "ledger.jsonl",
        tmp_path,
    ):
        with pytest.raises(
            LedgerError, match="cannot be written .* nothing may be released: choose a folder"
        ):
            Ledger.open(place, PLAN)
    with pytest.raises(LedgerError, match="does not exist"):
        verify(tmp_path / "missing")
    with pytest.raises(LedgerError, match="is empty"):
        verify(tmp_path / "file")


def test_a_full_disk_stops_the_release_and_leaves_a_good_ledger(path, monkeypatch):
    before = path.read_bytes()
    write = os.write
    with Ledger.open(path, PLAN, HEADER) as ledger:

        def half(descriptor, data):
            if len(data) < 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[: len(data) - 50])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(LedgerError, match="No space left on device.*nothing was released"):
            charge(ledger)
        assert ledger.count == 3
        assert path.read_bytes() == before
        monkeypatch.setattr(os, "write", write)
        assert charge(ledger) == 4
    assert len(verify(path).releases) == 4


def test_a_line_that_cannot_be_taken_back_ends_the_ledger(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with Ledger.open(path, PLAN, HEADER) as ledger, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(LedgerError, match="Input/output error"):
            charge(ledger)
        patch.undo()
        with pytest.raises(
            LedgerError, match="takes no further release: an earlier line could not be written"
        ):
            charge(ledger)


def test_a_charge_that_ctrl_c_interrupts_behind_its_line_is_resumed(path, monkeypatch):
    append = Ledger._append

    def interrupt(ledger, line):
        append(ledger, line)
        raise KeyboardInterrupt

    with Ledger.open(path, PLAN, HEADER) as ledger:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Ledger, "_append", interrupt)
            charge(ledger)
        with pytest.raises(LedgerError, match="no further release: a charge was interrupted"):
            charge(ledger)
    with Ledger.open(path, PLAN, HEADER) as ledger:
        assert charge(ledger) == 5
    assert len(verify(path).releases) == 5


def test_a_ledger_keeps_the_limit_that_it_was_begun_with(tmp_path):
    for name, first, then in (("a", 3, None), ("b", None, 3), ("c", 3, 4)):
        with Ledger.open(tmp_path / name, PLAN, {"steps": first}, first):
            pass
        with pytest.raises(LedgerError, match="was begun for .* releases, this run is") as error:
            Ledger.open(tmp_path / name, PLAN, {"steps": then}, then)
        assert f"for {then or 'unlimited'};" in str(error.value)
        Ledger.open(tmp_path / name, PLAN, {"steps": first}, first).close()
    Ledger.open(tmp_path / "old", PLAN).close()
    Ledger.open(tmp_path / "old", PLAN, {"steps": 3}, 3).close()
