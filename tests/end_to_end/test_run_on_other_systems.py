"""Do without what Windows lacks; see `tests.without_unix`."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpkfc.privacy.budget import Budget, BudgetError
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.ledger_lines import LedgerError

HARNESS = Path(__file__).parents[1] / "without_unix.py"
# A run that is stopped after two steps, while it holds its ledger; then what a user does next.
WORK = """
import os, signal, sys
from dpkfc.app import train
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.cli import main
from dpkfc.session import Session

settings = dict(recipe="digits", steps=4, expected_batch_size=24, accountant="rdp", epsilon=0.5)
settings |= dict(probe_size=16, every=2, out="run", budget="ward.toml")

def dpkfc(*words):
    try:
        main([*words])
    except SystemExit as end:
        assert not end.code, words

def stop(session, batch, *rest, **options):
    report = step(session, batch, *rest, **options)
    if session.steps_done == 2:
        print("holding", flush=True)
        sys.stdin.readline()
        signal.raise_signal(signal.SIGINT)
    return report

dpkfc("budget", "ward.toml", "--epsilon", "1", "--delta", "1e-4")
step, Session.step = Session.step, stop
assert train.run(run_config(settings)).interrupted
Session.step = step
dpkfc("train", "--resume", "run", "--quiet")
dpkfc("ledger", "verify", "run")
dpkfc("total", "run")
dpkfc("budget", "ward.toml")
"""
# Another process that wants the same files.
RIVAL = """
import sys

sys.modules["fcntl"] = None
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError

verify("run/ledger.jsonl")
try:
    Ledger.open("run/ledger.jsonl", "x")
except LedgerError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for open files")
def test_a_run_its_budget_and_its_resumption_do_without_unix(tmp_path):
    """Another process may read the ledger and may not write it, whether or not it has `fcntl`."""
    scripts = {"work.py": WORK, "rival.py": RIVAL}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text, "utf-8")
    options = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE}
    work = subprocess.Popen(
        [sys.executable, HARNESS, "work.py"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
    assert work.stdout is not None
    seen = ""
    while "holding" not in seen and (line := work.stdout.readline()):
        seen += line
    rival = subprocess.run([sys.executable, "rival.py"], check=False, **options)
    rest, errors = work.communicate("\n", timeout=300)
    assert work.returncode == 0, errors
    assert "is being written by another run" in rival.stdout
    assert "chain" in rest and "left" in rest
    assert Budget(tmp_path / "ward.toml").charges[0].released == 4


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_refused_in_one_line(tmp_path, monkeypatch, number):
    """Some network disks have none; a ledger that was there stays as it is."""
    fcntl = pytest.importorskip("fcntl")
    Budget(tmp_path / "b.toml", epsilon=1.0, delta=1e-5)
    with Ledger.open(tmp_path / "l.jsonl", "plan"):
        pass
    before = (tmp_path / "l.jsonl").read_bytes()

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LedgerError, match="cannot be locked .*another disk") as no:
        Ledger.open("l.jsonl", "plan")
    assert len(str(no.value)) <= 160 and (tmp_path / "l.jsonl").read_bytes() == before
    with pytest.raises(BudgetError, match="cannot be locked .*another disk"):
        Budget("new.toml", epsilon=1.0, delta=1e-5)


def test_a_lock_file_that_stayed_behind_holds_nothing(tmp_path):
    """Nor does a process that was killed."""
    script = (
        "import os, sys; from dpkfc.privacy.ledger import Ledger;"
        " Ledger.open(sys.argv[1], 'plan'); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "ledger.jsonl"
    subprocess.run([sys.executable, "-c", script, path], check=False)
    assert (tmp_path / "ledger.jsonl.lock").exists()
    with Ledger.open(path, "plan") as ledger:
        assert ledger.count == 0


def test_links_to_one_ledger_share_its_lock(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "ledger.jsonl")
    with (
        Ledger.open(tmp_path / "ledger.jsonl", "plan"),
        pytest.raises(LedgerError, match="another run"),
    ):
        Ledger.open(tmp_path / "link.jsonl", "plan")
