"""`dpkfc train` under torchrun: one run on several processes, with one folder, one ledger and one
budget.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet
from safetensors.torch import load_file
from torch.distributed import TCPStore

from dpkfc.app import processes
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.examples import ExampleSet
from dpkfc.app.metrics import Metrics
from dpkfc.app.owndata.files import Share, encode_table
from dpkfc.app.owndata.records import split_records
from dpkfc.app.owndata.schema import read_schema
from dpkfc.app.owndata.targets import Number
from dpkfc.app.recipes.objective import CLASSIFICATION
from dpkfc.privacy.ledger import verify
from dpkfc.privacy.ledger_lines import LedgerError
from tests.app.finished import read_card
from tests.command_line import call
from tests.distributed.cases import Case
from tests.distributed.group import run, start
from tests.quick import make_figures_blank
from tests.test_session import loss_fn, net, session

SETTINGS = [
    *(
        "--recipe",
        "digits",
        "--epsilon",
        "3",
        "--accountant",
        "rdp",
        "--steps",
        "4",
        "--expected-batch-size",
        "24",
    ),
    *("--probe-size", "8", "--every", "2", "--evaluate-every", "2", "--test-mode"),
]

pytestmark = pytest.mark.usefixtures("blank_figures")


def command(rank, folder, port, arguments):
    """One of two processes as torchrun starts it."""
    torch.set_num_threads(1)
    make_figures_blank(pytest.MonkeyPatch())
    os.chdir(folder)
    os.environ.update(
        TORCHELASTIC_RUN_ID="one", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    result = call(*arguments)
    return {"code": result.exit_code, "out": result.output, "err": result.stderr}


def run_two(folder, *arguments, work=command):
    """Run a command on two processes.

    As torchrun does, this process keeps the store in which they find each other. So nobody else
    can listen at its port before the first one does, and it outlives whichever ends first.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return run(work, 2, store.port, *arguments, folder=folder)


def _run(folder, *arguments):
    return run_two(folder, ["train", *arguments])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert call("train", *SETTINGS, "--out", str(folder)).exit_code == 0
    return load_file(folder / "model.safetensors")


def _assert_close(folder, alone):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == alone.keys()
    for name in alone:
        torch.testing.assert_close(found[name], alone[name], rtol=1e-3, atol=1e-5)
    assert [release["step"] for release in verify(folder / "ledger.jsonl").releases] == [0, 1, 2, 3]


def test_two_processes_make_the_run_of_one(tmp_path, alone):
    first, second = _run(tmp_path, *SETTINGS, "--out", "run")
    assert (first["code"], second["code"]) == (0, 0), (first, second)
    assert "run folder: run" in first["out"] and "accuracy" in first["out"]
    assert "run folder" not in second["out"] and "accuracy" not in second["out"]
    _assert_close(tmp_path / "run", alone)
    assert {"privacy_card.md", "metrics.parquet", "figures.json"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


TABLE = """target = "ill"
classes = ["0", "1"]
[columns.age]
kind = "number"
bounds = [0, 100]
"""


def _assert_alike(found, expected, rel):
    """JSON has the same names and texts, and numbers up to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = found.values(), expected.values()
    if isinstance(expected, str | int | float | None):
        is_number = isinstance(expected, float)
        assert found == (pytest.approx(expected, rel=rel, abs=1e-7) if is_number else expected)
        return
    for one, other in zip(found, expected, strict=True):
        _assert_alike(one, other, rel)


def _judged(run):
    """What the test rows of a run have said."""
    metrics = Metrics.read(run / "metrics.parquet")
    rows = [(row.accuracy, row.loss) for row in metrics.select_evaluated()]
    scores = json.loads((run / "scores.json").read_text("utf-8"))
    return scores, rows, read_card(run)["results"]["test examples"]


def test_processes_train_a_table_by_parts_like_one_process(tmp_path, monkeypatch):
    """The rows of a file or the files of a folder are divided; moments are released once.

    Each process predicts the test rows of its own part. In the folder the second part has no test
    row.
    """
    monkeypatch.chdir(tmp_path)
    ages = list(range(20, 80))
    table = pa.table({"age": ages, "ill": [str(int(age > 50)) for age in ages]})
    csv.write_csv(table, "t.csv")
    Path("t.toml").write_text(TABLE, "utf-8")
    settings = ["--schema", "t.toml", "--steps", "2", "--batch-size", "0", "--test-mode"]
    assert call("train", "--data", "t.csv", *settings, "--out", "alone").exit_code == 0
    expected = load_file("alone/model.safetensors")
    records = encode_table(Path("t.csv"), read_schema(Path("t.toml")))
    trained = split_records(records, 0, 0, "t").train[0][:][:, 0]
    kept = [round(50 * float(x) + 50) - ages[0] for x in trained[:9]]
    others = [row for row in range(60) if row not in kept]
    Path("parts").mkdir()
    for name, rows in {"0": others[:20], "1": kept, "2": others[20:]}.items():
        parquet.write_table(table.take(rows), f"parts/{name}.parquet")
    for data in ("t.csv", "parts"):
        for one in _run(tmp_path, "--data", data, *settings, "--out", f"{data}-run"):
            assert one["code"] == 0, one
        releases = verify(f"{data}-run/ledger.jsonl").releases
        assert [release.get("purpose") for release in releases] == ["moments", None, None]
        for name, weights in load_file(f"{data}-run/model.safetensors").items():
            assert torch.allclose(weights, expected[name], atol=1e-5), (data, name)
        _assert_alike(_judged(Path(f"{data}-run")), _judged(Path("alone")), rel=1e-4)
    csv.write_csv(table.slice(0, 1), "one.csv")
    refused = _run(tmp_path, "--data", "one.csv", *settings, "--out", "few")
    assert [one["code"] for one in refused] == [2, 2]
    assert "has no row for process 1; start fewer processes" in refused[1]["err"]


def test_a_process_whose_files_are_empty_is_told_so(tmp_path):
    (tmp_path / "t.toml").write_text(TABLE, "utf-8")
    table = pa.table({"age": [30, 60], "ill": ["0", "1"]})
    (tmp_path / "parts").mkdir()
    for name, rows in {"a": table, "b": table[:0]}.items():
        parquet.write_table(rows, tmp_path / "parts" / f"{name}.parquet")
    schema = read_schema(tmp_path / "t.toml")
    assert encode_table(tmp_path / "parts", schema, share=Share(0, 2)).share == ["a.parquet"]
    with pytest.raises(DatasetError, match="no row for this process, .* 'b.parquet'; remove empty"):
        encode_table(tmp_path / "parts", schema, share=Share(1, 2))


class Gathering:
    """The last of some processes, which hands on what all of them send in each round."""

    is_rank0 = True

    def __init__(self, sizes, rounds):
        self.sizes = sizes
        self.rounds = iter(rounds)

    def run_on_all(self, work):
        return work()

    def all_gather(self, size):
        assert size in self.sizes
        return self.sizes

    def gather(self, value, to):
        sent = next(self.rounds)
        sent.append(value)
        return sent


@pytest.mark.parametrize("task", [CLASSIFICATION, Number("n", 0.0, 10.0, ()).task])
def test_outputs_of_parts_are_judged_like_rows_of_one_process(task, monkeypatch):
    """The parts are uneven, one has no test row, and labels are missing."""
    monkeypatch.setattr(processes, "_SENT_ROWS", 250)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(700, 4, generator=generator)
    outputs = 3 if task is CLASSIFICATION else 1
    model = torch.nn.Linear(4, outputs)
    labels = torch.randint(-1, 3, (700,), generator=generator)
    if task is not CLASSIFICATION:
        labels = torch.rand(700, generator=generator)
        labels[5] = float("nan")
    rounds = [[], [], []]
    for part in (slice(0, 600), slice(600, 600), slice(600, 700)):
        held = ExampleSet(train=(rows, labels), test=(rows[part], labels[part]), share=["a"])
        run = SimpleNamespace(model=model, evaluation_examples=held.test, data=held)
        found, examples = processes.gather_judged(run, Gathering([600, 0, 100], rounds))
    assert found is not model and torch.equal(examples[1].nan_to_num(), labels.nan_to_num())
    whole = vars(task.judge(model, (rows, labels)))
    assert vars(task.judge(found, examples)) == pytest.approx(whole, rel=1e-6)
    scores = task.scores(model, (rows, labels)).to_json("abc")
    parts = task.scores(found, examples).to_json("abc")
    _assert_alike(parts, scores, rel=1e-5)


def test_a_restart_must_find_its_run(tmp_path):
    for one in _run(tmp_path, *SETTINGS):
        assert one["code"] == 2 and "name the run folder with --out" in one["err"]
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_first_process_is_that_of_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    for one in _run(tmp_path, *SETTINGS, "--out", "run"):
        assert one["code"] == 2 and "run is not empty" in one["err"]


def test_other_commands_run_on_one_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    result = call("demo")
    assert result.exit_code == 2 and "`dpkfc demo` runs in one process" in result.stderr


def _run_on_two_hosts(rank, folder, port, arguments, swapped):
    """Two hosts without a common disk; once started again, the other one may be the first."""
    processes._PATIENCE = 0.0
    place = folder / f"host-{rank}"
    place.mkdir(exist_ok=True)
    return command(1 - rank if swapped else rank, place, port, arguments)


def test_a_folder_that_not_all_processes_see_is_refused_before_anything_is_spent(tmp_path):
    arguments = ["train", *SETTINGS, "--out", "run"]
    for swapped in (False, True):
        for one in run_two(tmp_path, arguments, swapped, work=_run_on_two_hosts):
            assert one["code"] == 2 and "not every process sees the run in run" in one["err"], one
    assert not list(tmp_path.rglob("ledger.jsonl"))


def _other_setting(rank, folder, port):
    schedule = ["--schedule", "cosine"] * rank
    return command(rank, folder, port, ["train", *SETTINGS, "--out", "run", *schedule])


def test_processes_with_other_settings_are_told_so(tmp_path):
    for one in run_two(tmp_path, work=_other_setting):
        assert one["code"] == 2, one
        assert (
            "rank 1 has another setting schedule than rank 0 ('cosine', not 'constant')"
            in one["err"]
        )
    assert not (tmp_path / "run").exists()


def _ledgers_apart(rank, folder, swapped):
    start(1 - rank if swapped else rank, 2, folder / f"store-{swapped}")
    path = folder / f"ledger-{rank}.jsonl"  # of the host
    try:
        with session(Case().plan(), net(), ledger_path=path, verify=False) as s:
            s.step(next(s.batches()), loss_fn)
            return "stepped"
    except LedgerError as error:
        return str(error)


def test_a_ledger_on_the_disk_of_another_host_is_not_forgotten(tmp_path):
    assert run(_ledgers_apart, 2, False, folder=tmp_path) == ["stepped", "stepped"]
    for text in run(_ledgers_apart, 2, True, folder=tmp_path):
        assert "process 1 finds 1 releases" in text and "disk that all hosts share" in text
    assert (
        len(verify(tmp_path / "ledger-0.jsonl").releases) == 1
        and not verify(tmp_path / "ledger-1.jsonl").releases
    )
