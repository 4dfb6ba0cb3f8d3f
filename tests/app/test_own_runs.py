"""From own data to a run folder, predictions, evaluations and exports, and mistakes on the way."""

import csv
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpkfc.app.audit_folder import audit_folder
from dpkfc.app.html.page import write_page
from dpkfc.app.owndata.predictions import load_run
from dpkfc.app.owndata.tasks import Task, load_task, task_examples
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import recipe_of, run_config
from dpkfc.app.recipes.objective import cross_entropy, evaluate, score_model
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import read_settings, run
from dpkfc.privacy.ledger import verify
from tests.app.finished import call_flat, flags, refuse
from tests.app.own_files import (
    HEADER,
    QUICK,
    SCHEMA,
    own_config,
    patients,
    write_images,
    write_patients,
    write_rows,
)
from tests.audit.quick import make_audit_quick
from tests.command_line import call


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run on a table, and the table."""
    folder = tmp_path_factory.mktemp("own")
    path, schema = write_patients(folder)
    result = run(own_config(path, schema, folder / "run"))
    assert result.steps == 2 and result.figures["missing", "age"] == 1 / 200
    schema.unlink()  # from here on the run folder has its own
    return folder / "run", path


def test_a_run_keeps_the_schema_and_no_row(finished):
    folder, _ = finished
    text = (folder / "schema.toml").read_text("utf-8")
    assert "cook" not in text and "pain" not in text and 'kind = "flag"' in text
    card = (folder / "privacy_card.md").read_text("utf-8")
    assert "patients.csv" in card and "2 category" in card
    assert read_settings_of(folder).run.recipe == "own-table"


def read_settings_of(folder):
    from dpkfc.app.run_folder import RunFolder

    return read_settings(RunFolder.locate(folder))


def test_predictions_of_a_file_without_the_target(finished, tmp_path):
    folder, path = finished
    rows = patients()[:5]
    new = write_rows(
        tmp_path / "new.csv", [["x", *row[:-1]] for row in rows], ["ward", *HEADER[:-1]]
    )
    code, text = call_flat("predict", folder, "--data", new, "--out", tmp_path / "p.csv")
    assert code == 0, text
    with (tmp_path / "p.csv").open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [row["record"] for row in read] == ["1", "2", "3", "4", "5"]
    model = load_run(folder)
    expected = model.model(model.recipe.read(new).inputs).softmax(1)
    for row, scores in zip(read, expected.tolist(), strict=True):
        assert float(row["p(no)"]) == pytest.approx(scores[0], abs=1e-6)
        assert row["class"] == ("no" if scores[0] >= scores[1] else "yes")


def test_predictions_need_no_training_data(finished, tmp_path, monkeypatch):
    """A run folder is carried to another machine, under a name with a blank."""
    folder, path = finished
    carried = shutil.copytree(folder, tmp_path / "my run")
    settings = carried / "config.toml"
    settings.write_text(settings.read_text("utf-8").replace(str(path), "gone.csv"), "utf-8")
    monkeypatch.chdir(tmp_path)
    assert call("predict", "my run", "--data", path).exit_code == 0
    assert call("export", "my run", "--format", "safetensors").exit_code == 0
    (carried / "model.safetensors").unlink()
    assert "--resume 'my run'" in refuse("predict", "my run", "--data", path)
    assert "schema 'my data.csv'" in refuse("train", "--data", shutil.copy(path, "my data.csv"))


def test_a_batch_larger_than_all_persons_is_refused_in_units(tmp_path):
    path, schema = write_patients(tmp_path)
    schema.write_text(SCHEMA.replace('kind = "ignore"', 'kind = "unit"'), "utf-8")
    words = ["--schema", schema, "--expected-batch-size", 300, "--epsilon", 1, "--quiet"]
    said = refuse("train", "--data", path, *words, "--out", tmp_path / "large")
    assert "expected_batch_size = 300 is more than the" in said and "units; choose" in said


def test_predictions_and_exports_replace_no_other_file(finished, tmp_path, monkeypatch):
    folder, path = finished
    monkeypatch.chdir(path.parent)
    predict, export = ("predict", folder, "--data", path.name), ("export", folder, "--format")
    shutil.copy(path, tmp_path / "last_year.csv")
    for words, out in (
        (predict, path),
        (predict, tmp_path / "last_year.csv"),
        ((*export, "torch"), folder / "ledger.jsonl"),
        ((*export, "safetensors"), tmp_path / "last_year.csv"),
        ((*export, "registry"), path),
    ):
        content = out.read_bytes()
        code, text = call_flat(*words, "--out", out)
        assert code == 2 and "exists and would be lost; choose another name" in text
        assert out.read_bytes() == content
    for _ in range(2):
        assert call(*predict, "--out", tmp_path / "again.csv").exit_code == 0


def test_predictions_are_csv(finished, tmp_path):
    folder, path = finished
    for name in ("p.parquet", "p.xlsx", "model.safetensors"):
        assert "give --out FILE.csv" in refuse(
            "predict", folder, "--data", path, "--out", tmp_path / name
        )
    assert not list(tmp_path.glob("p.*"))


def test_a_file_without_a_column_of_the_schema_is_one_error(finished, tmp_path):
    folder, _ = finished
    new = write_rows(tmp_path / "new.csv", [row[1:2] for row in patients()[:5]], ["age"])
    code, text = call_flat("predict", folder, "--data", new)
    assert code == 2 and "new.csv: has no column 'sex'; known: age" in text
    wide = [f"laboratory_value_{number}" for number in range(300)]
    said = refuse("predict", folder, "--data", write_rows(tmp_path / "wide.csv", [wide], wide))
    assert "has no column 'age'; known: lab" in said and len(said.split(": ", 2)[2]) <= 160
    assert not Path("predictions.csv").exists()


def test_evaluation_is_marked_private_unless_the_file_is_public(finished):
    folder, path = finished
    code, text = call_flat("evaluate", folder, "--data", path)
    assert code == 0 and "PRIVATE: ε does not protect" in text and "200 records" in text
    code, text = call_flat("evaluate", folder, "--data", path, "--public")
    assert code == 0 and "PRIVATE" not in text
    code, text = call_flat("evaluate", folder)
    assert code == 0 and "PRIVATE" in text


def test_exports(finished, tmp_path):
    folder, _ = finished
    for form in ("torch", "safetensors"):
        code, text = call_flat("export", folder, "--format", form)
        assert code == 0, text
    trained = load_run(folder)
    _, columns = text.split("numbers of a row: ")
    widths = [int(number) for number in re.findall(r" (\d+)[,;]", columns)]
    assert sum(widths) == trained.recipe.input_shape[0] and "the last of a column is 1" in columns
    program = torch.export.load(folder / "export" / "model.pt2").module()
    inputs = torch.randn(5, trained.recipe.input_shape[0])
    torch.testing.assert_close(program(inputs), trained.model(inputs))
    weights = load_file(folder / "export" / "model.safetensors")
    assert torch.equal(weights["1.weight"], trained.model.state_dict()["1.weight"])
    code, text = call_flat("export", folder, "--format", "pickle")
    assert code == 2 and "choose torch | safetensors | onnx" in text


def test_other_weights_than_the_released_ones_are_refused(finished, tmp_path):
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x * 2 for name, x in tensors.items()}, folder / "model.safetensors")
    for command in ("export", "evaluate", "predict"):
        more = ("--data", str(finished[1])) if command == "predict" else ()
        code, text = call_flat(command, folder, *more)
        assert code == 2 and "does not hold the weights" in text


def test_onnx_without_its_packages_is_one_error(finished):
    if _is_installed("onnxscript"):
        pytest.skip("onnxscript is installed")
    code, text = call_flat("export", finished[0], "--format", "onnx")
    assert code == 2 and "pip install onnx onnxscript" in text


def _is_installed(name):
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_the_run_is_examined_and_reported(finished, tmp_path):
    folder, _ = finished
    code, text = call_flat("doctor", folder)
    assert code == 0 and "patients.csv" in text
    contents = write_page([folder], tmp_path / "report.html")
    assert len(contents.runs) == 1 and not contents.broken
    assert contents.runs[0].task == "patients.csv"


def test_a_run_that_was_cut_off_goes_on_without_the_first_schema(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / "figures.json").unlink()
    moved, other = tmp_path / "moved.csv", tmp_path / "other.csv"
    shutil.copy(finished[1], moved)
    other.write_text(finished[1].read_text("utf-8").replace("nurse", "nun", 1), "utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for place, message in ((other, "holds other data"), (tmp_path / "gone.csv", "does not exist")):
        code, text = call_flat("train", "--resume", folder, "--data", place)
        assert code == 2 and message in text and "\n" not in text.strip()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    # As if the file itself had been changed.
    settings = folder / "config.toml"
    settings.write_text(settings.read_text("utf-8").replace(str(finished[1]), str(other)), "utf-8")
    code, text = call_flat("train", "--resume", folder)
    assert code == 2 and "other.csv holds other data" in text and "\n" not in text.strip()
    code, text = call_flat("train", "--resume", folder, "--data", moved, "--quiet")
    assert code == 0 and read_settings_of(folder).data.data == str(moved), text
    assert (folder / "figures.json").is_file()


@pytest.mark.slow
def test_people_are_the_unit(tmp_path, monkeypatch):
    make_audit_quick(monkeypatch)
    path, schema = write_patients(tmp_path)
    schema.write_text(SCHEMA.replace('kind = "ignore"', 'kind = "unit"'), "utf-8")
    result = run(own_config(path, schema, tmp_path / "run"))
    header = verify(result.folder / "ledger.jsonl").header
    assert header["unit"].startswith("one patient_id") and header["dataset_size"] < 100
    verdict = audit_folder(result.folder, ["step"], runs=12)
    assert verdict.step is not None and verdict.ledger is not None and verdict.ledger.passed
    with pytest.raises(ValueError, match="protects one patient_id"):
        audit_folder(result.folder, ["one-run"], canaries=20)
    smoke = prepare(own_config(path, schema, smoke=True))
    assert smoke.data.units is not None and len(smoke.data.units) == len(smoke.data.train[1])


def test_a_row_without_a_class_does_not_decide_about_a_run(tmp_path):
    """The number of rows is public, so a batch of all rows is accepted or refused by it alone."""
    path, schema = write_patients(tmp_path)
    rows = patients()
    for row in rows[::3]:
        row[-1] = "perhaps"
    write_rows(path, rows)
    prepared = prepare(own_config(path, schema))
    assert prepared.plan.dataset_size + len(prepared.data.test[1]) == 200
    assert run(own_config(path, schema, tmp_path / "run")).steps == 2
    code, text = call_flat("evaluate", tmp_path / "run")
    assert code == 0 and "without a known target left out" in text


def test_rows_without_a_form_do_not_decide_about_a_run(tmp_path):
    """A file whose every row is broken is trained on, as is one with a row more that is whole."""
    path, schema = write_patients(tmp_path)
    header = ",".join(HEADER)
    path.write_text("\n".join([header, *["broken"] * 200]), "utf-8")
    result = run(own_config(path, schema, tmp_path / "run"))
    assert result.steps == 2 and result.figures["unreadable", "rows"] == 1


def test_a_label_outside_of_the_classes_has_no_loss():
    model = torch.nn.Linear(3, 2)
    inputs = torch.randn(4, 3)
    labels = torch.tensor([1, 7, -1, -100])
    losses = cross_entropy(model, (inputs, labels))
    plain = torch.nn.functional.cross_entropy(model(inputs[:1]), labels[:1]).item()
    assert losses.tolist() == [pytest.approx(plain), 0, 0, 0]
    losses[1:].sum().backward()
    assert not model.weight.grad.any()
    judged = evaluate(model, (inputs, labels))
    assert judged.loss == pytest.approx(plain) and judged.accuracy in (0, 1)
    assert score_model(model, (inputs, labels)).examples == 1
    assert math.isnan(evaluate(model, (inputs, labels - 9)).accuracy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_outputs_of_every_floating_point_type_are_scored(dtype):
    outputs, labels = torch.randn(9, 3).to(dtype), torch.arange(9) % 3
    expected = score_model(torch.nn.Identity(), (outputs.double(), labels))
    assert score_model(torch.nn.Identity(), (outputs, labels)) == expected


TASK = """\
import torch
from dpkfc.app.owndata.tasks import Task

def make():
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Task(
        model=lambda: torch.nn.Linear(6, 2),
        train=(x[:150], y[:150]),
        test=torch.utils.data.TensorDataset(x[150:], y[150:]),
        metrics=lambda model, batch: {
            "share": float((model(batch[0]).argmax(1) == batch[1]).float().mean())
        },
        score="share",
        classes=("left", "right"),
    )

def fails():
    return 1 / 0

def wrong():
    return 3

def number():
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, 0].clone()
    y[190] = float("nan")

    def squared(model, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square()

    def share(model, batch):
        return {"share": 1 - float(squared(model, batch).mean())}

    model = lambda: torch.nn.Linear(6, 1)
    parts = {"train": (x[:150], y[:150]), "test": (x[150:], y[150:])}
    return Task(model=model, **parts, loss=squared, metrics=share)

def units():
    from dataclasses import replace
    units = [row // 3 for row in range(150)]
    return replace(make(), unit="patient", units=units, max_records_per_unit=2)

def no_model():
    from dataclasses import replace
    return replace(make(), model=lambda: torch.zeros(2).view(3))

def no_loss():
    from dataclasses import replace
    return replace(make(), loss=lambda model, batch: model(batch[0].T).mean(1))

def no_figure():
    from dataclasses import replace
    return replace(make(), metrics=lambda model, batch: {"share": batch[2]})
"""


@pytest.fixture
def task_module(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(TASK, "utf-8")
    (tmp_path / "my_broken_task.py").write_text("x = 1\nraise KeyError('no such table')\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_task.cache_clear()
    yield
    sys.modules.pop("my_task", None)
    load_task.cache_clear()


@pytest.mark.usefixtures("task_module")
def test_a_task_trains_and_is_evaluated(tmp_path):
    out = tmp_path / "run"
    result = run(run_config({**QUICK, "task": "my_task:make", "out": str(out)}))
    assert result.score == "share" and 0 <= result.accuracy <= 1
    code, text = call_flat("evaluate", out)
    assert code == 0 and text.startswith("share ")
    code, text = call_flat("export", out)
    assert code == 0, text
    code, text = call_flat("predict", out, "--data", "x.csv")
    assert code == 2 and "has no form for other files" in text
    code, text = call_flat("doctor", "--task", "my_task:make")
    assert code == 0 and "Linear" in text
    assert prepare(run_config({**QUICK, "task": "my_task:units"})).plan.dataset_size == 50


@pytest.mark.parametrize(
    "units, part",
    [
        ([None, "a"] * 10, "some records have no unit"),
        (list(range(19)), "19 units for 20"),
    ],
)
def test_a_task_with_units_that_protect_nobody_is_refused(units, part):
    examples = torch.zeros(20, 2), torch.zeros(20, dtype=torch.long)
    task = Task(
        model=lambda: torch.nn.Linear(2, 2),
        train=examples,
        test=examples,
        units=units,
        max_records_per_unit=2,
    )
    with pytest.raises(ConfigError, match=part):
        task_examples(task, "my_task:make")


@pytest.mark.parametrize(
    "train", [None, (), [], iter("ab"), torch.tensor(1), [torch.tensor(1)] * 2, {0: "a"}]
)
def test_a_task_with_other_examples_is_refused_in_one_line(train):
    examples = torch.zeros(20, 2), torch.zeros(20, dtype=torch.long)
    task = Task(model=lambda: torch.nn.Linear(2, 2), train=train, test=examples)
    with pytest.raises(ConfigError, match=r"my_task:make: train .* or a dataset of pairs"):
        task_examples(task, "my_task:make")


@pytest.mark.slow
def test_a_default_batch_for_many_examples_stands_for_all_of_a_few(tmp_path):
    write_images(tmp_path / "images")
    chosen = {"data": str(tmp_path / "images"), "delta": 1e-3, "noise_multiplier": 1.0}
    prepared = prepare(run_config(chosen))
    assert prepared.plan.expected_batch_size == prepared.data.size < 256
    with pytest.raises(
        ConfigError, match=r"expected_batch_size = 300 is more than the \d+ examples"
    ):
        prepare(run_config({**chosen, "expected_batch_size": 300}))


def test_images_with_a_table_of_labels_are_evaluated_with_one(tmp_path):
    folder = write_images(tmp_path / "pets")
    table, schema = tmp_path / "labels.csv", tmp_path / "pets.toml"
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    lines = [f"{name},{'a' if row % 3 else 'b'}" for row, name in enumerate(names)]
    table.write_text("file,kind\n" + "\n".join(lines), "utf-8")
    schema.write_text('target = "kind"\nclasses = ["a", "b"]\n[images]\nsize = 8\n', "utf-8")
    out = tmp_path / "run"
    assert run(own_config(folder, schema, out, label_file=str(table))).steps == 2
    code, text = call_flat("evaluate", out, "--data", folder)
    assert code == 2 and "no record has a known target" in text and "--label-file" in text
    few = tmp_path / "few.csv"
    few.write_text("file,kind\n" + "\n".join([*lines[:9], "none.png,a"]), "utf-8")
    code, text = call_flat("evaluate", out, "--data", folder, "--label-file", few)
    assert code == 0 and "9 records" in text and re.search("b . 3 .", text)
    assert call_flat("evaluate", out, "--label-file", few) == (code, text)


@pytest.mark.usefixtures("task_module")
@pytest.mark.parametrize(
    "task, message",
    [
        ("my_task:fails", r"my_task:fails raised ZeroDivisionError \(line 19 of my_task.py"),
        ("my_task:wrong", "returned int; it must return a dpkfc.app.owndata.tasks.Task"),
        ("my_task:makes", "has no function 'makes'; did you mean 'make'"),
        ("my_broken_task:make", r"raised KeyError \(line 2 of"),
        ("no_such_module:make", "cannot be imported"),
        ("my_task", "is not module:function"),
    ],
)
def test_an_error_in_a_task_is_one_line(task, message):
    with pytest.raises(ConfigError, match=message) as caught:
        recipe_of(run_config({"task": task}))
    # The text of the user's own error may show a record.
    assert "\n" not in str(caught.value) and "no such table" not in str(caught.value)


@pytest.mark.usefixtures("task_module")
@pytest.mark.parametrize(
    "name, message",
    [
        ("no_model", r"my_task:no_model: model raised RuntimeError \(line 46 of my_task.py\)"),
        ("no_loss", r"cannot be multiplied .* \(line 50 of my_task.py\)"),
        ("no_figure", r"IndexError \(line 54 of my_task.py\)"),
    ],
)
def test_an_error_in_a_part_of_a_task_names_its_line(tmp_path, name, message):
    task = f"my_task:{name}"
    code, text = call_flat("train", "--task", task, *flags(QUICK), "--out", tmp_path / "run")
    assert code == 2 and re.search(message, text), text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--target", "y"], "describe own data; give --data"),
        (["--data", "x.csv", "--task", "a:b"], "leave one out"),
        (["--data", "x.csv", "--recipe", "digits"], "has its own data"),
        (["--data", "nothing"], "does not exist"),
        (
            ["--recipe", "digits", "--device", "cudda"],
            "unknown device 'cudda'; did you mean 'cuda'?",
        ),
        (["--data", "x.csv"], "dpkfc schema x.csv --target NAME"),
        (["--data", "x.csv", "--text", "note"], "text = 'note' does not apply to x.csv; leave it"),
        (["--data", "t.jsonl", "--schema", "t.toml", "--text", "b"], "key is 'note', and --text"),
        (["--data", "t.jsonl", "--schema", "c.toml", "--text", "b"], "leave --text b out"),
        (["--data", "x.csv", "--label-file", "l.csv"], "label_file = 'l.csv' does not apply to"),
        (["--task", "a:b", "--target", "y"], "target = 'y' does not apply to a:b; leave it out"),
        (["--recipe", "own-table"], "made from own data; give --data"),
        ([], "which recipe or data? give --recipe"),
    ],
)
def test_choices_that_do_not_go_together(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    for name in ("x.csv", "l.csv", "t.jsonl"):
        Path(name).touch()
    first = 'target = "y"\nclasses = ["a", "b"]\n'
    Path("t.toml").write_text(f'{first}[text]\nkey = "note"\n', "utf-8")
    Path("c.toml").write_text(f'{first}[columns.note]\nkind = "text"\n', "utf-8")
    code, text = call_flat("train", *words, "--out", tmp_path / "run")
    assert code == 2 and message in text
    assert not (tmp_path / "run").exists()


def test_a_run_without_epsilon_says_which_it_takes():
    command = ["train", "--recipe", "digits", "--steps", "1", "--dry-run"]
    first = "ε = 3 at δ = 1e-05 (the recipe's; give --epsilon: the smaller, the more private)"
    code, text = call_flat(*command)
    assert code == 0 and text.index(first) < text.index("noise multiplier")
    code, text = call_flat(*command, "--epsilon", "3")
    assert code == 0 and "the recipe's" not in text


def test_a_flag_without_effect_is_said_before_anything_is_spent():
    command = ["train", "--recipe", "digits", "--steps", "1", "--method", "dp-adam", "--dry-run"]
    code, text = call_flat(
        *command, "--momentum", "0.5", "--gep-rank", "9", "--filter-kappa", "0.2"
    )
    idle = "without effect here: gep_rank (GEP), filter_kappa (DiSK), momentum (sgd)"
    assert code == 0 and text.index(idle) < text.index("noise multiplier")
    code, text = call_flat(*command, "--filter", "disk", "--filter-kappa", "0.2", "--lr", "0.1")
    assert code == 0 and "without effect" not in text


def test_a_schema_and_settings_that_change_places_are_named(tmp_path):
    path, schema = write_patients(tmp_path)
    code, text = call_flat("train", "--config", schema)
    assert code == 2 and "holds a schema; give it by --schema" in text
    config = tmp_path / "config.toml"
    config.write_text('[run]\nrecipe = "digits"\n', "utf-8")
    code, text = call_flat("train", "--data", path, "--schema", config)
    assert code == 2 and "holds settings of a run; give them by --config" in text


def test_train_says_its_method_and_why(tmp_path):
    path, schema = write_patients(tmp_path)
    budget = tmp_path / "budget.toml"
    assert call_flat("budget", budget, "--epsilon", "9", "--delta", "1e-4")[0] == 0
    own = ["--data", str(path), "--schema", str(schema), "--budget", str(budget)]
    command = ["train", *own, *flags(QUICK), "--out", tmp_path / "r"]
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    code, text = call_flat(*command, "--dry-run")
    assert code == 0 and "estimated memory" in text and "ε by PLD" in text
    assert re.search(r"releases for moments +│ 1, σ = \d+\.\d+; in ε", text)
    assert re.search(r"PRIVATE.*│ age +(│ 0.5% +){3}│ – +│", text, re.DOTALL)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    code, text = call_flat(*command)
    assert code == 0 and "method: dp-moments (the default: the best of" in text
    card = (tmp_path / "r" / "privacy_card.md").read_text("utf-8")
    assert "| uses private data | only by a release that ε covers |" in card
    assert text.index("example of the schema") < text.index("PRIVATE, for you alone")
    assert re.search(r"PRIVATE.*│ age +(│ 0.5% +){3}│ – +│", text, re.DOTALL)


def test_a_dry_run_says_where_a_run_could_not_be_written(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    command = ["train", "--recipe", "digits", "--steps", "1", "--dry-run", "--out"]
    for place, what in (("file", "is a file"), ("file/below/run", "takes no folder")):
        code, text = call_flat(*command, tmp_path / place)
        assert code == 2 and what in text and "noise multiplier" not in text
    assert call_flat(*command, tmp_path / "new" / "run")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dry_run_without_the_resource_module_asks_psutil(tmp_path, monkeypatch):
    memory = SimpleNamespace(peak_wset=3 * 2**30)
    psutil = SimpleNamespace(Process=lambda: SimpleNamespace(memory_info=lambda: memory))
    monkeypatch.setitem(sys.modules, "resource", None)
    for module, said in ((psutil, "estimated memory: 3.00 GiB"), (None, "unknown without psutil")):
        monkeypatch.setitem(sys.modules, "psutil", module)
        code, text = call_flat("train", "--recipe", "digits", "--steps", "1", "--dry-run")
        assert code == 0 and said in text


def test_labels_of_no_class_are_said_before_and_after_a_run(tmp_path):
    path, schema = write_patients(tmp_path)
    schema.write_text(SCHEMA.replace('["no", "yes"]', '["No.", "perhaps"]'), "utf-8")
    own = ["--data", str(path), "--schema", str(schema)]
    code, looked = call_flat("doctor", *own)
    assert code == 0 and "full stop: labels" in looked
    schema.write_text(SCHEMA.replace('["no", "yes"]', '["never", "perhaps"]'), "utf-8")
    code, looked = call_flat("doctor", *own)
    assert code == 0 and "100.0% of the records have no known target" in looked
    run(own_config(path, schema, tmp_path / "run"))
    code, text = call_flat("evaluate", tmp_path / "run")
    assert code == 2 and "no test row has a known label" in text and "0.0000" not in text
