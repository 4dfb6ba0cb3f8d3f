"""From a file to a model by questions: what is proposed, asked, refused and written."""

import io

import pytest

from dpkfc.app.owndata.questions import propose, read_column, read_target
from dpkfc.app.owndata.schema import read_schema
from dpkfc.app.toml import ConfigError
from tests.app.own_files import patients, write_patients, write_rows
from tests.command_line import call

ANSWERS = ["no|yes", "", "number 20 80", "category female|male", "", "flag", "text"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "people.csv", patients(400))
    return tmp_path


def _answer(path, lines):
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_answers_of_a_file_lead_to_schema_model_scores_and_commands(place):
    answers = _answer(place / "answers.txt", [*ANSWERS, "yes"])
    called = call("try", "people.csv", "--target", "outcome", "--answers", answers, "--out", "run")
    assert called.exit_code == 0, called.output
    schema = read_schema(place / "people.toml")
    assert schema.classes == ("no", "yes") and schema.columns["age"].bounds == (20, 80)
    assert schema.columns["patient_id"].kind == "ignore"
    assert schema.columns["job"].buckets == 32
    for text in ("estimated time", "ε by PLD", "AUROC", "constant guess"):
        assert text in called.output
    assert "dpkfc schema people.csv --target outcome --out people.toml" in called.output
    assert "dpkfc evaluate run" in called.output
    (line,) = [line for line in called.output.splitlines() if line.startswith("  dpkfc train")]
    again = line.replace("--out run", "--out again").split()[1:]
    assert call(*again, "--dry-run").exit_code == 0


def test_answers_of_a_terminal_are_asked_again(place, monkeypatch):
    lines = ["maybe", *ANSWERS[:2], "number 80", "nothing", *ANSWERS[2:], "no"]
    stdin = io.StringIO("\n".join(lines) + "\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    called = call("try", "people.csv", "--target", "outcome")
    assert called.exit_code == 0, called.output
    assert "nothing was trained" in called.output and not (place / "runs").exists()
    assert "begins with no kind" in called.output and (place / "people.toml").is_file()


def test_a_file_of_a_spreadsheet_with_commas_in_numbers_is_asked_for_its_signs(place):
    rows = [f"{20 + i};1,{60 + i};{1 + i:02}.02.2020;{i % 2}" for i in range(28)]
    (place / "visits.csv").write_text("\n".join(["age;height;admitted;ill", *rows]) + "\n")
    date = "date 2015-01-01 2024-12-31 %d.%m.%Y"
    lines = ["0|1", "number 0 110", "number 1 2.2", date, "", "no"]
    words = ["try", "visits.csv", "--target", "ill", "--answers"]
    wrong = call(*words, _answer(place / "wrong.txt", [*lines[:4], ";"]))
    assert wrong.exit_code == 2 and "decimal must be '.' or ','" in wrong.output
    lines.insert(2, "?")
    called = call(*words, _answer(place / "answers.txt", lines))
    assert called.exit_code == 0, called.output
    assert "copy from here: 1.6 to 1.87" in called.output
    schema = read_schema(place / "visits.toml")
    assert (schema.delimiter, schema.decimal) == (";", ",")
    assert schema.thousands == ""
    (place / "visits.toml").unlink()
    called = call(*words, _answer(place / "answers.txt", [*lines[:5], ", .", "no"]))
    assert called.exit_code == 0, called.output
    assert read_schema(place / "visits.toml").thousands == "."
    assert schema.columns["admitted"].format == "%d.%m.%Y"


def test_values_are_shown_when_asked_and_marked(place):
    answers = _answer(place / "answers.txt", ["?", "no|yes", "", "?"])
    called = call("try", "people.csv", "--target", "outcome", "--answers", answers)
    assert called.exit_code == 2 and "the answers end before 'age" in called.output
    shown = [line for line in called.output.splitlines() if line.startswith("PRIVATE, for you")]
    assert len(shown) == 2 and shown[0].endswith("no|yes")
    assert shown[1].endswith("20 to 120, and 1 other texts")
    assert not (place / "people.toml").exists()
    quiet = call("try", "people.csv", "--target", "outcome", "--answers", _answer(answers, []))
    assert "nurse" not in quiet.output and "PRIVATE" not in quiet.output


def test_without_a_terminal_there_is_one_line_with_the_way_out(place):
    called = call("try", "people.csv", "--target", "outcome")
    assert called.exit_code == 2 and len(called.stderr.splitlines()) == 1
    assert "--schema FILE --yes" in called.stderr and len(called.stderr) <= 168
    path, schema = write_patients(place)
    words = ["--schema", schema, "--out", "run", "--yes"]
    write_rows(path, patients(400))
    assert call("try", path, *words).exit_code == 0


def test_a_schema_that_exists_is_kept(place):
    (place / "people.toml").write_text("mine", "utf-8")
    answers = _answer(place / "answers.txt", [*ANSWERS, "yes"])
    called = call("try", "people.csv", "--target", "outcome", "--answers", answers)
    assert called.exit_code == 2 and "give --schema people.toml" in called.output
    assert (place / "people.toml").read_text("utf-8") == "mine"


@pytest.mark.parametrize(
    "answer, message",
    [
        ("", "begins with no kind"),
        ("numbers 0 1", "begins with no kind"),
        ("number a b", "are not numbers"),
        ("category many", "is not a whole number"),
        ("flag 3", "stands alone"),
        ("unit all", "is not a whole number"),
    ],
)
def test_answers_of_another_form(answer, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read_column(answer)
    assert len(str(raised.value)) <= 160


@pytest.mark.parametrize("answer", ["", "yes", "no yes", "0 60 90"])
def test_a_target_has_classes_or_bounds(answer):
    with pytest.raises(ConfigError, match="neither classes"):
        read_target(answer)
    assert read_target("no | yes") == (("no", "yes"), ()) and read_target("0 60") == ((), (0, 60))


def test_proposals_come_from_names_and_stored_types():
    names = ["patient_id", "note", "admitted", "HoursPerWeek", "workclass", "age"]
    assert [propose(name, "") for name in names] == [
        "ignore",
        "text",
        "date",
        "number",
        "category 32",
        "number",
    ]
    assert propose("workclass", "number") == "number" and propose("x", "date") == "date"
