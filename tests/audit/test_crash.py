"""The ledger covers every release of a process that was killed, and resuming gives what a run left
alone gives.

Also here: full disks, damaged ledgers of a run, files that vanish, clocks that jump, and two
processes in one run folder.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from dpkfc.app import training_loop
from dpkfc.app.metrics import Metrics
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.run_folder import RunFolder, RunFolderError
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import resume, run
from dpkfc.checkpoint import CheckpointError, read
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError
from tests import forked
from tests.app.accounting import remember_accounting
from tests.audit.crash_driver import drive
from tests.audit.sizes import FULL, size

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills forked processes")

DEFAULT = "DP-KFC, Adam, average"
KILLS = size(
    {DEFAULT: 10},
    {
        DEFAULT: 60,
        "DP-SGD": 80,
        "DiSK": 40,
        "secure noise": 60,
        "dpkfc train": 40,
        "dpkfc train, secure noise": 20,
    },
)
MUTANTS = size({"late": 3}, {"late": 20, "forgetful": 10})
CAPS = size([8000], [100, 200, 300, 3000, 6500, 7000, 7900, 8000, 8100])
TWO = size([DEFAULT], [DEFAULT, "dpkfc train, secure noise"])


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """One process of the driver for all tests of this file: it forks, which this one, with its
    threads, had better not.
    """
    root = tmp_path_factory.mktemp("crash")
    asked = {"folder": str(root / "runs"), "seed": 7, "default": DEFAULT}
    asked |= {"subjects": KILLS, "mutants": MUTANTS, "caps": CAPS, "two": TWO}
    done = forked.call(drive, asked, root / "report.json", timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((root / "report.json").read_text("utf-8"))


@pytest.mark.parametrize("subject", KILLS)
def test_killed_at_any_moment_and_resumed(driven, subject, evidence):
    found = driven["subjects"][subject]
    assert found["problems"] == []
    assert (
        found["undercounted"],
        found["unreadable"],
        found["mismatched"],
        found["repeated_noise"],
    ) == (0, 0, 0, 0)
    assert found["kills"] >= KILLS[subject] and 0 <= found["overcharged"] <= found["kills"]
    assert found["by_time"] and len(found["places"]) > 3
    figures = (
        "kills",
        "by_time",
        "power_cuts",
        "finished",
        "releases",
        "undercounted",
        "overcharged",
        "mismatched",
        "seconds",
    )
    evidence(
        "crash", subject, places=len(found["places"]), **{name: found[name] for name in figures}
    )


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_driver_notices_what_it_is_there_for(driven, mutant, evidence):
    """An accountant that is saved with the checkpoint; a resumed run that forgets the optimizer's
    state.
    """
    found = driven["mutants"][mutant]
    assert found["undercounted"] > 0 if mutant == "late" else found["mismatched"] > 0
    figures = {name: found[name] for name in ("kills", "undercounted", "mismatched")}
    evidence("crash", f"planted: {mutant}", **figures)


@pytest.mark.parametrize("cap", CAPS)
def test_a_full_disk_stops_a_run_before_the_release(driven, cap, evidence):
    """No file may grow beyond `cap` bytes: the header, the first checkpoint, or a line of the
    ledger does not fit.
    """
    found = next(run for run in driven["full"] if run["cap"] == cap)
    assert found["status"] == 1 and found["made"] == found["charged"]
    last = found["error"].strip().splitlines()[-1]
    assert last.startswith(
        ("dpkfc.privacy.ledger_lines.LedgerError: ", "dpkfc.checkpoint.CheckpointError: ")
    ), last
    assert "File too large" in last and ("ledger.jsonl" in last or "checkpoint" in last)
    assert found["again"] == 0 and found["same"], (
        "with room again the run goes on to the same weights"
    )
    evidence(
        "crash",
        f"full disk at {cap} bytes",
        charged=found["charged"],
        made=found["made"],
        resumed=found["same"],
    )


@pytest.mark.parametrize("number", range(len(TWO)))
def test_a_second_process_in_a_run_folder_is_refused(driven, number, evidence):
    found = driven["two"][number]
    last = found["error"].strip().splitlines()[-1]
    assert found["second"] == 1 and last.endswith(
        "ledger.jsonl is being written by another run; let it end, or close() it"
    )
    assert found["kept"], "the second changed nothing"
    assert found["third"] == 0, "the lock dies with its process"
    evidence("crash", f"two processes: {TWO[number]}", refused=True, resumed_after=True)


# -- a run folder that was damaged -----------------------------------------------------------------

QUICK = {
    "recipe": "digits",
    "method": "dp-sgd",
    "steps": 6,
    "expected_batch_size": 24,
    "accountant": "rdp",
    "epsilon": 0.5,
    "probe_size": 16,
    "evaluate_every": 2,
    "test_mode": True,
}

pytestmark = [pytestmark, pytest.mark.filterwarnings("ignore:epsilon is not a guarantee")]


_Blank = SimpleNamespace(to_json=dict)


class Stopped(BaseException):
    """The process ends here."""


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """Accounting once; figures in the long run alone."""

    with remember_accounting(), pytest.MonkeyPatch.context() as patched:
        if not FULL:
            patched.setattr("dpkfc.app.results._measure_figures", lambda *_: _Blank)
        yield


def _run_until(folder, release, **changed):
    """A run that dies after a release; its last checkpoint is that of an even number before."""
    row = training_loop._row

    def dies(record, epsilon):
        if record.release == release:
            raise Stopped
        return row(record, epsilon)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(training_loop, "_row", dies)
        run(run_config({**QUICK, "out": str(folder), **changed}))
    return folder


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """A run of six steps that died after its third release; its checkpoint was written after the
    second.
    """
    return _run_until(tmp_path_factory.mktemp("runs") / "run", 3)


@pytest.fixture
def folder(broken_off, tmp_path):
    shutil.copytree(broken_off, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Weights after every number of steps of a run left alone."""
    passed = []
    step = training_loop.Session.step

    def step_and_note(self, *args):
        record = step(self, *args)
        passed.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        return record

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training_loop.Session, "step", step_and_note)
        run(run_config({**QUICK, "out": str(tmp_path_factory.mktemp("alone") / "run")}))
    return passed


def _lines(edit):
    def damage(path):
        path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))

    return damage


def _flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def _write_ledger_of_another_plan(path):
    path.unlink()
    with Ledger.open(path, "f" * 64, {"certified": False, "rng": "repeatable"}):
        pass


DAMAGE = {
    "a line left out": (_lines(lambda x: [*x[:2], *x[3:]]), "does not follow line 2"),
    "a bit flipped": (_flip_bit, r"line \d of the ledger"),
    "another plan": (_write_ledger_of_another_plan, "belongs to the plan f"),
    "cut off before the checkpoint": (_lines(lambda x: x[:2]), "does not contain the 2 releases"),
    "deleted": (Path.unlink, "a checkpoint and no ledger.*put ledger.jsonl back"),
    "empty": (_lines(lambda _: []), "holds a checkpoint and no ledger"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be written"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is not an ordinary file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_stops_a_resume_before_a_release(folder, damage):
    ledger = folder / "ledger.jsonl"
    spoil, message = DAMAGE[damage]
    spoil(ledger)
    before = ledger.read_bytes() if ledger.is_file() else b""
    with pytest.raises((LedgerError, CheckpointError, ConfigError), match=message) as raised:
        resume(folder)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)
    after = ledger.read_bytes() if ledger.is_file() else b""
    assert before == after


def test_a_torn_last_line_costs_nothing_but_its_own_release(folder, expected):
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-25])
    result = resume(folder)
    assert result.steps == 6 and len(verify(ledger).releases) == 6
    _, meta = read(folder / "checkpoint")
    assert meta["step"] == 6, "the third release was torn off: it never left"
    _assert_same(load_file(folder / "model.safetensors"), expected[5])


def test_a_charged_release_that_was_not_kept_is_not_made_again(folder, expected):
    resume(folder)
    _, meta = read(folder / "checkpoint")
    assert meta["step"] == 5
    _assert_same(load_file(folder / "model.safetensors"), expected[4])
    assert [row["step"] for row in verify(folder / "ledger.jsonl").releases] == [0, 1, 2, 2, 3, 4]


def _assert_same(found, wanted):
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in found)


# -- files that change while a run goes on ---------------------------------------------------------


def _delete(path):
    path.unlink()


def _replace_by_copy(path):
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


def _empty(path):
    path.write_bytes(b"")


def _append_line(path):
    with path.open("ab") as file:
        file.write(b"{}\n")


@pytest.mark.parametrize("change", [_delete, _replace_by_copy, _empty, _append_line])
def test_a_ledger_that_changes_under_a_run_ends_it(tmp_path, change):
    from tests.privacy.test_ledger import PLAN, charge

    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, PLAN) as ledger:
        charge(ledger)
        change(path)
        for _ in range(2):
            with pytest.raises(
                LedgerError,
                match=r"ledger\.jsonl takes no further release: its file was (deleted|changed)",
            ):
                charge(ledger)
        assert ledger.count == 1


def test_a_run_that_died_between_two_renames_is_resumed(folder):
    (folder / "checkpoint").rename(folder / "checkpoint.old")
    assert resume(folder).steps == 6


def test_two_runs_that_begin_in_one_folder(tmp_path):
    first, second = RunFolder.create(tmp_path / "run"), RunFolder.create(tmp_path / "run")
    first.begin("seed = 1\n")
    with pytest.raises(RunFolderError, match="another run has started in"):
        second.begin("seed = 2\n")
    assert first.config.read_text() == "seed = 1\n"


def test_the_card_of_a_run_that_died_after_its_last_release_judges_what_is_delivered(
    tmp_path,
):
    """Killed between the last checkpoint and the metrics beside it: the accuracy on the card is
    that of the delivered weights.
    """
    write, alone = Metrics.write, tmp_path / "alone"
    run(run_config({**QUICK, "out": str(alone)}))

    def dies(self, path):
        if self.rows[-1].step == 6:
            raise Stopped
        write(self, path)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Metrics, "write", dies)
        run(run_config({**QUICK, "out": str(tmp_path / "run")}))
    resume(tmp_path / "run")
    cards = [
        json.loads((folder / "privacy_card.json").read_text("utf-8"))["results"]
        for folder in (alone, tmp_path / "run")
    ]
    assert cards[0] == cards[1]
    assert pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()[-1]["step"] == 6
