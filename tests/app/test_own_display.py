"""What a terminal shows of own data: the public schema, and shares for the owner's eyes."""

import io

import pytest
from rich.console import Console

from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.display import (
    MARK,
    describe_columns,
    print_shares,
    schema_table,
)
from dpkfc.app.owndata.image_files import ABSENT
from dpkfc.app.owndata.images import encode_folder
from dpkfc.app.owndata.schema import ImageForm, Schema
from dpkfc.app.owndata.targets import target_of
from tests.app.own_files import write_images


def print_to_text(thing=None, width=80, **figures_of):
    """Return what a console of some width shows of a table, or of shares."""
    file = io.StringIO()
    console = Console(file=file, width=width)
    if thing is not None:
        console.print(thing)
    else:
        print_shares(console, figures_of["figures"])
    return file.getvalue()


def test_two_thousand_columns_are_a_few_short_lines():
    names = [f"a column of a long and very descriptive name, {number}" for number in range(2000)]
    columns = {name: Column(kind="number", bounds=(0.0, 110.0)) for name in names}
    schema = Schema(target="y", classes=("no", "yes"), columns=columns)
    text = print_to_text(schema_table(describe_columns(schema, "own-table")))
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) <= 80
    assert "0 to 110" in text and "│ 55 " in text and "1,971 more columns" in text
    # Those that are shown are the worst.
    figures = {("missing", name): 0.01 * (number > 1989) for number, name in enumerate(names)}
    figures |= {("outside of bounds", name): float(name in names[40:50]) for name in names}
    lines = print_to_text(figures=figures, width=200).splitlines()
    assert sum("1.0%" in line for line in lines) == 10 and len(lines) < 45
    assert sum("│ 100.0%" in line for line in lines) == 10 and "1,970 more" in str(lines)
    (warning,) = (line for line in lines if line.startswith(f"{MARK}: "))
    assert "and 5 more" in warning and max(map(len, lines)) < 600


@pytest.mark.parametrize("share, is_named", [(0.4, False), (0.6, True)])
def test_bounds_that_most_values_lie_outside_of_are_named(share, is_named):
    lines = print_to_text(figures={("outside of bounds", "age"): share, ("missing", "age"): share})
    assert ("most values are clamped in age (60.0%)" in lines) == is_named
    assert "missing in" not in lines


@pytest.mark.parametrize("share, is_named", [(0.05, False), (0.2, True)])
def test_text_that_is_not_of_its_columns_kind_is_named(share, is_named):
    lines = print_to_text(figures={("not of the column's kind", "born"): share}, width=200)
    assert ("many values are unread in born (20.0%): compare kind" in lines) == is_named


def test_letters_with_line_breaks_lead_to_the_key_that_reads_them():
    assert "lines_in_cells" in print_to_text(figures={("unreadable", "rows"): 0.6}, width=200)


def test_every_kind_of_column_has_an_example_of_the_schema():
    columns = {
        "age": Column(kind="number", bounds=(0.0, 1.0)),
        "dose": Column(kind="number", bounds=(0.0, 5.0), decimal=",", measured_in="mg"),
        "pressure": Column(kind="pair", bounds=(60.0, 260.0, 30.0, 160.0)),
        "born": Column(kind="date", bounds=("01.01.1900", "01.01.2026"), decimal=","),
        "lab": Column(kind="number"),
        # Bounds are for numbers, so these say nothing.
        "sex": Column(kind="category", categories=("female", "male"), bounds=(0.0,)),
        "ward": Column(kind="category", buckets=8),
        "smoker": Column(kind="flag"),
        "note": Column(kind="text", buckets=256),
        "id": Column(kind="unit"),
    }
    schema = Schema(target="days", target_bounds=(0.0, 60.0), unit="id", columns=columns)
    assert describe_columns(schema, "own-table") == (
        ("days (target)", "number", "0 to 60", "30"),
        ("age", "number", "0 to 1", "0.5"),
        ("dose", "number", "0 to 5", "2,5 mg"),
        ("pressure", "pair", "60 to 260; 30 to 160", "160/95"),
        ("born", "date", "01.01.1900 to 01.01.2026", "01.01.1900"),
        ("lab", "number", "found by a private release", ""),
        ("sex", "category", "female, male", "female"),
        ("ward", "category", "8 buckets", "any text"),
        ("smoker", "flag", "", "yes"),
        ("note", "text", "256 buckets", "pain at night"),
        ("id", "unit", "", ""),
    )


@pytest.mark.parametrize(
    "value, near",
    [("<=50K.", True), (" <=50k", True), ("≤50K", False), ("other", False)],
)
def test_labels_that_are_nearly_a_class_are_counted(value, near):
    target = target_of(Schema(classes=("<=50K", ">50K")))
    labels, counts = target.encode([value, None, ">50K", "<=50K"])
    assert labels.tolist()[1:] == [-1, 1, 0]
    assert list(counts.values()) == ([1] if near else [])


def test_a_file_of_one_class_alone_is_named():
    target = target_of(Schema(classes=("no", "yes")))
    _, counts = target.encode(["no", None, "no", "?"])
    assert list(counts.values()) == [2]
    assert target.encode([None, "?"])[1] == {}
    shares = {what: count / 4 for what, count in counts.items()}
    assert "a model of them knows no other class" in print_to_text(figures=shares)


def test_another_column_of_a_label_file_that_names_files_is_found(tmp_path):
    folder = write_images(tmp_path / "pets", 8)
    table = tmp_path / "labels.csv"
    names = sorted(path.relative_to(folder).with_suffix("") for path in folder.rglob("*.*"))
    rows = [f"L{row},{name},{name.parts[0]}" for row, name in enumerate(names)]
    table.write_text("lesion,image,animal\n" + "\n".join(rows) + "\n", "utf-8")
    schema = Schema(target="animal", classes=("cat", "dog"), images=ImageForm(size=8))
    figures = encode_folder(folder, schema, table).figures
    assert figures["rows whose file is named by", "image"] == 1.0
    text = print_to_text(figures=figures)
    assert "no such file: files 100.0%" in text and "set file under [images]" in text
    text = print_to_text(figures={**figures, ("without a known target", "records"): 1.0})
    assert "without a known target or a readable file: records 100.0%" in text
    schema = Schema(target="animal", classes=("cat", "dog"), images=ImageForm(file="image"))
    assert encode_folder(folder, schema, table).is_known.all()


def test_an_image_named_with_a_suffix_in_other_letters_is_read(tmp_path):
    folder = write_images(tmp_path / "pets", 4)
    files = [path for path in folder.rglob("*.*") if path.is_file()]
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in files]
    table = tmp_path / "labels.csv"
    table.write_text("image,animal\n" + "\n".join(rows) + "\n", "utf-8")
    for path in files:
        path.rename(path.with_suffix(path.suffix.upper()))
    schema = Schema(target="animal", classes=("cat", "dog"), images=ImageForm(size=8))
    records = encode_folder(folder, schema, table)
    assert records.is_known.all() and ABSENT not in {what for what, _ in records.figures}
