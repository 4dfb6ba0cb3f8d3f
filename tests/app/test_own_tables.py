"""Tables of a user: schema, encoding against a plain loop, splits, and mistakes in a file."""

import hashlib
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.text import hashed_texts
from dpkfc.app.owndata.cells import MISSING
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.files import encode_table
from dpkfc.app.owndata.proposals import empty_schema
from dpkfc.app.owndata.recipes import input_columns
from dpkfc.app.owndata.records import TEST_SHARE, UNKNOWN, Records, _places, split_records
from dpkfc.app.owndata.schema import Schema, check_schema, read_schema
from dpkfc.app.owndata.schema_file import schema_toml
from dpkfc.app.owndata.schema_noise import SchemaNoise
from dpkfc.app.owndata.sources import own_source
from dpkfc.app.owndata.tables import read_table
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.recipes.catalogue import recipe_of, run_config
from dpkfc.app.toml import ConfigError
from dpkfc.features import AdditiveFeatures
from tests.app.own_files import HEADER, SCHEMA, own_config, patients, write_patients, write_rows


def _loop(schema, rows):
    """Encode rows by hand, one value at a time."""
    features = []
    for row in rows:
        values = dict(zip(HEADER, map(str, row), strict=True))
        out = []
        try:
            age = float(values["age"])
        except ValueError:
            age = math.nan
        if math.isnan(age):
            out += [0.0, 1.0]
        else:
            out += [(min(max(age, 20.0), 80.0) - 20.0) / 60.0 * 2 - 1, 0.0]
        sex = values["sex"]
        hot = [float(sex == "female"), float(sex == "male")]
        out += [*hot, float(sex not in ("female", "male", *MISSING)), float(sex in MISSING)]
        job = [0.0] * 5
        if values["job"] in MISSING:
            job[4] = 1.0
        else:
            digest = hashlib.blake2b(
                values["job"].encode(), digest_size=8, key=b"dpkfc categories 1"
            ).digest()
            job[int.from_bytes(digest, "big") % 4] = 1.0
        out += job
        out += {"yes": [1.0, 0.0], "no": [-1.0, 0.0]}.get(values["smoker"], [0.0, 1.0])
        out += [*hashed_texts([values["note"]], 16)[0].tolist(), 0.0]
        features.append(out)
    return torch.tensor(features)


def test_encoding_equals_a_plain_loop(tmp_path):
    path, schema_path = write_patients(tmp_path)
    schema = read_schema(schema_path)
    records = encode_table(path, schema)
    torch.testing.assert_close(records.inputs, _loop(schema, patients()))
    assert records.labels.tolist() == [int(row[-1] == "yes") for row in patients()]
    assert records.figures["outside of bounds", "age"] == 1 / 200
    assert records.figures["missing", "age"] == 1 / 200
    assert records.figures["not of the column's kind", "age"] == 1 / 200
    assert records.figures["of no known category", "sex"] == 50 / 200


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_typed_files_give_what_csv_gives(tmp_path, suffix):
    path, schema_path = write_patients(tmp_path)
    schema = read_schema(schema_path)
    columns = dict(zip(HEADER, map(list, zip(*patients(), strict=True)), strict=True))
    columns["age"] = [age if isinstance(age, int) else None for age in columns["age"]]
    typed = tmp_path / f"patients{suffix}"
    write = pa.parquet.write_table if suffix == ".parquet" else pa.feather.write_feather
    write(pa.table(columns), typed)
    assert torch.equal(encode_table(typed, schema).inputs, encode_table(path, schema).inputs)
    text = empty_schema(typed, "outcome", "", None)
    assert re.search(r'\[columns.age\]\nkind = "number"', text)


def test_texts_that_only_look_like_numbers_stay_apart():
    column = Column(kind="category", categories=("1", "01", "1.5", "a.0", ".0", "1.", "1.0.0"))
    places = column.encode(list(column.categories)).features.argmax(1).tolist()
    assert places == list(range(7))
    with pytest.raises(ConfigError, match="different values"):
        check_schema(Schema(classes=("1", "1.0")), "s.toml")


def test_one_more_record_moves_no_other_record():
    inputs = torch.arange(400.0).view(-1, 1).floor_divide(2)  # every record twice
    contents = [row.numpy().tobytes() for row in inputs]

    def train_of(rows, units):
        records = Records(
            inputs=inputs[rows],
            labels=torch.zeros(len(rows), dtype=torch.int64),
            names=[str(row) for row in rows],
            contents=[contents[row] for row in rows],
            units=[f"u{row // 4}" for row in rows] if units else (),
        )
        data = split_records(records, 30, 0, "rows")
        assert data.validation is not None and (units or len(data.validation[1]) == 30)
        assert not units or data.size == len({row // 2 for row in data.train[0].flatten().tolist()})
        return sorted(data.train[0].flatten().tolist())

    everything = train_of(list(range(400)), False)
    assert 250 < len(everything) < 330
    for gone in range(0, 400, 7):
        fewer = train_of([row for row in range(400) if row != gone], False)
        assert len(everything) - len(fewer) in (0, 1)
        left = list(everything)
        for value in fewer:
            left.remove(value)
        assert len(left) <= 1
    for unit in range(0, 100, 9):
        fewer = train_of([row for row in range(400) if row // 4 != unit], True)
        whole = train_of(list(range(400)), True)
        left = list(whole)
        for value in fewer:
            left.remove(value)
        assert len(set(left)) <= 2  # the two values of one unit


@pytest.mark.parametrize("nobody", ["", "NA", " nan"])
def test_one_more_row_without_a_person_moves_no_other_row(tmp_path, nobody):
    schema = Schema(
        target="y",
        classes=("0", "1"),
        unit="who",
        columns={"a": Column(kind="number", bounds=(0, 1000))},
    )

    def train_of(rows):
        path = tmp_path / "t.csv"
        path.write_text("a,y,who\n" + "\n".join(rows) + "\n", "utf-8")
        data = split_records(encode_table(path, schema), 0, 0, "t")
        assert data.size == len(data.train[1])  # each row is a unit of its own
        return Counter(data.train[0][:][:, 0].tolist())

    rows = [f"{row // 2},0,{nobody}" for row in range(200)]
    before, after = train_of(rows), train_of([f"999,0,{nobody}", *rows])
    assert not before - after and (after - before).total() <= 1


def test_rows_of_a_person_stay_together(tmp_path):
    path, schema_path = write_patients(tmp_path)
    schema_path.write_text(SCHEMA.replace('kind = "ignore"', 'kind = "unit"'), "utf-8")
    config = own_config(path, schema_path)
    recipe = recipe_of(config)
    assert (recipe.unit, recipe.max_records_per_unit) == ("patient_id", 4)
    data = recipe.data(config)
    assert data.units is not None and len(data.units) == len(data.train[1])
    assert data.size == len(data.train[1]) // 2


def test_the_schema_that_is_kept_says_the_same(tmp_path):
    _, schema_path = write_patients(tmp_path)
    schema = read_schema(schema_path)
    again = tmp_path / "again.toml"
    again.write_text(schema_toml(schema, "title"), "utf-8")
    assert read_schema(again) == schema


def test_an_empty_schema_shows_no_row_and_asks_for_kinds(tmp_path):
    path, _ = write_patients(tmp_path)
    text = empty_schema(path, "outcome", "", None)
    only_header = write_rows(tmp_path / "header.csv", [])
    assert text == empty_schema(only_header, "outcome", "", None)
    assert 'of a date, with format = "%d.%m.%Y"' in text
    assert 'kind = "ignore"' in text and "[columns.outcome]" not in text
    unfilled = tmp_path / "unfilled.toml"
    unfilled.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="column 'age' has kind ''"):
        read_schema(unfilled)
    semicolons = tmp_path / "semicolons.csv"
    semicolons.write_text("age;sex,or gender;y\n1;a;b\n", "utf-8")
    text = empty_schema(semicolons, "y", "", None)
    assert 'delimiter = ";"' in text and '[columns."sex,or gender"]' in text
    tabs = tmp_path / "tabs.tsv"
    tabs.write_text("age\ty\n1\ta\n", "utf-8")
    # A terminal shows a tab itself as blanks.
    assert 'delimiter = "\\t"' in empty_schema(tabs, "y", "", None)


def test_comments_above_the_header_are_to_be_removed(tmp_path):
    path = tmp_path / "scans.tsv"
    path.write_text("# exported by a scanner\nage\ty\n1\ta\n", "utf-8")
    with pytest.raises(DatasetError, match="has one column; remove lines above it"):
        empty_schema(path, "y")


def test_a_first_line_that_may_be_a_record_is_not_shown(tmp_path):
    path = tmp_path / "hive.txt"
    path.write_text("anna\x01diabetes\x01sick\n", "utf-8")
    with pytest.raises(DatasetError) as caught:
        empty_schema(path, "y")
    assert "anna" not in str(caught.value) and "diabetes" not in str(caught.value)


def test_a_delimiter_that_is_not_known_is_given(tmp_path):
    path = tmp_path / "odd.txt"
    path.write_text("age^y\n1^a\n", "utf-8")
    with pytest.raises(DatasetError, match=r"has one column; .* --delimiter '\^'"):
        empty_schema(path, "y")
    assert 'delimiter = "^"' in empty_schema(path, "y", delimiter="^")
    for given in ({"text": "note"}, {"sheet": "one"}, {"label_file": path}):
        with pytest.raises(ConfigError, match="does not apply to .*odd.txt; leave it out"):
            empty_schema(path, "y", **given)


@pytest.mark.parametrize("section", ["[images]\nsize = 16", "[text]\nbuckets = 512"])
def test_a_section_for_other_data_is_refused(tmp_path, section):
    data, schema = write_patients(tmp_path)[:2]
    schema.write_text(f"{schema.read_text('utf-8')}\n{section}\n", "utf-8")
    name = section.splitlines()[0]
    with pytest.raises(ConfigError, match=re.escape(f"has {name}, and the data are of kind table")):
        own_source({"data": str(data), "schema": str(schema)})


def test_the_probe_looks_like_the_schema(tmp_path):
    schema = read_schema(write_patients(tmp_path)[1])
    noise = SchemaNoise(tuple(schema.features.items()))
    rows, _ = noise.sample(500, torch.Generator().manual_seed(0))
    assert rows.shape == (500, schema.width)
    assert torch.equal(rows[:, 2:5].sum(1) + rows[:, 5], torch.ones(500))
    assert noise == SchemaNoise(tuple(schema.features.items()))


@pytest.mark.parametrize(
    "before, after, message",
    [
        ('kind = "ignore"', 'kind = "number"\nbounds = [0, 9]', "looks like an identifier"),
        ("bounds = [20, 80]", "", "column 'age' needs bounds"),
        ('kind = "flag"', 'kind = "date"\nbounds = ["1.2.2024"]', "or by format = '%d.%m.%Y'"),
        ("bounds = [20, 80]", "bounds = [80, 20]", "column 'age' needs bounds"),
        ("bounds = [20, 80]", 'bounds = ["a", 2]', "column 'age' needs bounds"),
        ("bounds = [20, 80]", "bounds = [[1], 2]", "bounds must be a list of numbers, or of dates"),
        ("bounds = [20, 80]", "bounds = [true, 80]", "bounds must be a list of numbers, or"),
        ("bounds = [20, 80]", f"bounds = [0, {10**400}]", "bounds must be a list of numbers, or"),
        ("buckets = 4\n", "", r"column 'job' needs categories = \[...\] or buckets"),
        ('kind = "text"\nbuckets = 16', 'kind = "category"', "'note' needs .* or kind = 'text'"),
        ("buckets = 16", "buckets = 15", "power of two"),
        ("buckets = 16", f"buckets = {2**30}", "buckets must be 1 to 1,048,576"),
        ('kind = "flag"', 'kind = "flags"', "kind 'flags'; choose number"),
        ('kind = "flag"', 'kind = "date"\nformat = "dd.mm.yyyy"', "format 'dd.mm.yyyy' is not one"),
        ('kind = "flag"', 'kind = "date"\nformat = "%Y-%Q"', "format '%Y-%Q' is not one of dates"),
        ('kind = "flag"', 'kinds = "flag"', "unknown key 'kinds'; did you mean 'kind'"),
        ('classes = ["no", "yes"]', 'classes = ["no"]', "two or more different"),
        ('classes = ["no", "yes"]', "", "classes is empty"),
        ("[columns.note]", "[columns.outcome]", "'outcome' is the target"),
        ('target = "outcome"', 'target = "outcome"\nunit = "outcome"', "is unit and target"),
    ],
)
def test_a_wrong_schema_is_one_clear_error(tmp_path, before, after, message):
    path, schema_path = write_patients(tmp_path)
    assert before in SCHEMA
    schema_path.write_text(SCHEMA.replace(before, after, 1), "utf-8")
    with pytest.raises(ConfigError, match=message):
        recipe_of(own_config(path, schema_path))


def test_an_identifier_may_be_declared_harmless(tmp_path):
    Column(kind="category", buckets=8, identifier=False).check("product_name", "x")
    with pytest.raises(ConfigError, match="identifier"):
        Column(kind="category", buckets=8).check("product_name", "x")


def test_without_a_schema_the_error_is_the_command(tmp_path):
    path, _ = write_patients(tmp_path)
    with pytest.raises(ConfigError, match=r"dpkfc schema \S+ --target outcome > schema.toml"):
        recipe_of(run_config({"data": str(path), "target": "outcome"}))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("bad.csv", b"", "is empty"),
        ("bad.csv", b"\n", "no header"),
        ("bad.csv", b"age,outcome\n", "has no column 'sex'"),
        ("bad.csv", ",".join(HEADER).encode() + b"\n", "a header and no rows"),
        ("bad.csv", b"age,age\n1,2\n", "two columns are named 'age'"),
        ("bad.csv", b"\xff\xfe\x00", "not UTF-8 text; save the file as UTF-8"),
        ("bad.csv", b"PAR1", "has no column"),
        ("bad.csv", b"age;sex\n1;male\n", "no column 'job'; known: age, sex; check the first line"),
        ("bad.parquet", b"PAR1 and no more", "is not a parquet file"),
        ("none.csv", None, "does not exist"),
        ("none.parquet", None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, content, message):
    schema = read_schema(write_patients(tmp_path)[1])
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        encode_table(path, schema)
    assert name in str(caught.value) and len(str(caught.value)) < 160 + len(str(path))


@pytest.mark.parametrize(
    "row",
    [
        b"1,2,3",
        b'1,50,male,cook,yes,"open,no',
        b'1,50,male,cook,yes,"open"quote,no',
        b"1,50,male,cook,yes,M\xfcller,no",
        b"1,50,male,cook,yes,a comma, too,no",
        b"1,50,male,cook,yes,pain,no,,x",
        b'1,50,male,cook,yes,"a",b"\x80",no',
    ],
)
def test_a_row_without_a_form_counts_as_one_without_values(tmp_path, row):
    path, schema_path = write_patients(tmp_path)
    schema = read_schema(schema_path)
    whole = encode_table(path, schema)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([header, *lines[:9], row + b"\n", *lines[9:]]))
    records = encode_table(path, schema)
    others = [place for place in range(201) if place != 9]
    assert len(records) == 201 and records.labels[9] == UNKNOWN
    assert records.inputs[9].count_nonzero() == len(schema.features)  # indicators alone
    assert torch.equal(records.inputs[others], whole.inputs)
    assert torch.equal(records.labels[others], whole.labels)
    assert records.figures["unreadable", "rows"] == 1 / 201


def test_a_target_outside_of_the_header_is_named(tmp_path):
    path, schema_path = write_patients(tmp_path)
    with pytest.raises(DatasetError, match="no column 'income'"):
        empty_schema(path, "income", "", None)
    schema = replace(read_schema(schema_path), target="income")
    with pytest.raises(DatasetError, match="no column 'income'"):
        encode_table(path, schema)


def test_rows_without_a_known_class_count_and_have_no_loss(tmp_path):
    path, schema_path = write_patients(tmp_path)
    rows = patients()
    rows[7][-1], rows[8][-1] = "perhaps", ""
    write_rows(path, rows)
    records = encode_table(path, read_schema(schema_path))
    known = records.select_labelled()
    assert len(known) == 198 and "8" not in known.names
    data = split_records(records, 20, 0, "rows")
    assert data.validation is not None
    assert data.size + len(data.test[1]) + len(data.validation[1]) == 200
    assert np.isclose(data.figures["without a known target", "records"], 0.01)
    units = replace(records, units=[f"{row // 2}\0" for row in range(200)])
    assert split_records(units, 0, 0, "rows").size == len(train_units(units))


def train_units(records):
    return {unit for unit in records.units if _places([unit.encode()], 0, b"test")[0] >= TEST_SHARE}


def test_rows_that_end_with_a_delimiter_are_read_where_the_schema_says_so(tmp_path):
    path, schema_path = write_patients(tmp_path)
    schema = read_schema(schema_path)
    whole = encode_table(path, schema)
    header, *lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([header, *(line + "," for line in lines)]), "utf-8")
    # They might also begin with a name that the header lacks.
    assert read_table(path, ["age"], schema).unreadable == 200
    records = encode_table(path, replace(schema, row_ends=True))
    assert torch.equal(records.inputs, whole.inputs) and list(records.contents) == list(
        whole.contents
    )


def test_a_log_scale_counts_factors_and_is_linear_around_zero():
    column = Column(kind="number", bounds=(1.0, 10_000.0), scale="log")
    found = column.encode(["1", "100", "10000", "", "0.001"]).features
    np.testing.assert_allclose(found[:, 0], [-1, 0, 1, 0, -1], atol=1e-6)
    assert found[3, 1] == 1.0
    amounts = Column(kind="number", bounds=(0.0, 100_000.0), scale="log")
    zero, small, large = amounts.encode(["0", "50", "50000"]).features[:, 0]
    assert zero == -1.0 and -1 < small < -0.8 and 0.7 < large < 1


def test_a_target_on_a_log_scale_is_given_back_in_its_unit():
    number = target_of(Schema(target="price", target_bounds=(1.0, 100.0), target_scale="log"))
    labels, _ = number.encode(["1", "10", "100", ""])
    np.testing.assert_allclose(labels[:3], [-1, 0, 1], atol=1e-6)
    assert number.answer(torch.from_numpy(labels[:3, None]))["price"] == ["1", "10", "100"]

    class Known(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1))

        def forward(self, rows):
            return rows + self.bias

    # It says 10 where 100 is true, and 1 where 1 is true.
    examples = torch.tensor([[0.0], [-1.0]]), torch.tensor([1.0, -1.0])
    judged = number.task.judge(Known(), examples)
    assert number.task.derive_figures(judged.accuracy, judged.loss) == pytest.approx(
        {"mean absolute error": 45.0, "root mean squared error": (8100 / 2) ** 0.5}, rel=1e-5
    )


def test_the_longest_row_of_a_schema_has_norm_one():
    schema = Schema(
        columns={
            "age": Column(kind="number", bounds=(0.0, 1.0)),
            "pressure": Column(kind="pair", bounds=(0.0, 1.0, 0.0, 1.0)),
            "job": Column(kind="category", categories=("a", "b")),
            "smoker": Column(kind="flag"),
            "note": Column(kind="text", buckets=16),
        }
    )
    columns = input_columns(schema)
    assert sum(column.values + 1 for column in columns) == schema.width
    rows, _ = SchemaNoise(tuple(schema.features.items())).sample(
        2000, torch.Generator().manual_seed(0)
    )
    lengths = AdditiveFeatures(columns)(rows).norm(dim=1)
    assert 0.8 < float(lengths.max()) <= 1.0
