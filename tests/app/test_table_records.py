"""Records of a table: how many a file holds, and that none of them reaches another one."""

import csv
import gzip
import random
import re
import uuid
from collections import Counter
from dataclasses import replace
from datetime import datetime, time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.csv_lines import split_line
from dpkfc.app.owndata.decoding import list_texts
from dpkfc.app.owndata.files import encode_table, encode_texts
from dpkfc.app.owndata.headers import read_header
from dpkfc.app.owndata.schema import Schema, TextForm, check_schema
from dpkfc.app.owndata.stored import stored_texts
from dpkfc.app.owndata.tables import read_table
from dpkfc.app.toml import ConfigError

SCHEMA = check_schema(
    Schema(
        target="y",
        classes=("0", "1"),
        unit="who",
        columns={
            "a": Column(kind="number", bounds=(0, 10)),
            "b": Column(kind="category", buckets=8),
            "note": Column(kind="text", buckets=16),
        },
    ),
    "schema",
)
HEADER = ["a", "b", "note", "who", "y"]


def _count_records(records):
    units = records.units or [""] * len(records)
    rows = zip(records.inputs[:].tolist(), records.labels.tolist(), units, strict=True)
    return Counter((tuple(inputs), label, unit) for inputs, label, unit in rows)


def _changes(before, after):
    """Return how many records are gone and how many are new."""
    one, other = _count_records(before), _count_records(after)
    return (one - other).total(), (other - one).total()


def _write(path, rows, delimiter, end, encoding):
    text = end.join([delimiter.join(HEADER), *rows]) + end
    path.write_bytes(text.encode(encoding, "surrogateescape"))
    return path


def _rows(delimiter, kind):
    draw = random.Random(0)
    rows = []
    for number in range(30):
        note = {
            "plain": f"note {number}",
            "quoted": f'"said ""{number}""{delimiter} then"',
            "inches": '27"',
            "lines": f'"two\n""{number}"" lines{delimiter}\n"',
            "blanks": f' "{number}{delimiter} 2" ',
        }[kind if number % 3 else "plain"]
        cells = [f"{draw.random():.3f}", draw.choice("xyz"), note, f"p{number // 2}", number % 2]
        rows.append(delimiter.join(map(str, cells)))
    return rows


_HOSTILE = [
    '1,x,"open,me,1',
    '"1,x,n,me,1',
    '1,x,n,me,"1',
    '1,x,n,me,"',
    '"',
    '""',
    '"""',
    '"""",',
    "'",
    '1,x,"two\nlines",me,1',
    '1,x,"\n2,y,m,p1,0\n2,y,m,p1,0\n",me,1',
    '1,x,"' + "1,x,n,me,1\n" * 500 + '",me,1',
    '1,x,"' + "w " * 70_000 + '",me,1',
    "1,x," + "w" * 200_000 + ",me,1",
    "1,x,a\0b,me,1",
    "1,x,n,\0,1",
    "1,x,a\udcff,me,1",
    "1,x,a\rb,me,1",
    "1,x,n,me,1\r\r",
    "1,x,a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i,me,1",
    "\ufeff1,x,n,me,1",
    "1,x",
    "1,x,n,me,1,,,2",
    "   ",
    ",,,,",
    '1,x,\\",me,1',
    '1,x,a"b",me,1',
    '1,x,"a"b,me,1',
    "9" * 5000 + ",x,n,me,1",
    "a,b,note,who,y",
    "sep=;",
]


@pytest.mark.quick("commas-*", "*-quoted")
@pytest.mark.parametrize("kind", ["plain", "quoted", "inches", "lines", "blanks"])
@pytest.mark.parametrize(
    "delimiter, end, encoding, packed",
    [
        (",", "\n", "utf-8", False),
        (";", "\r\n", "utf-8", True),
        ("\t", "\n", "cp1252", False),
        ("|", "\n", "utf-16", False),
        (",", "\r", "shift_jis", False),
    ],
    ids=["commas", "semicolons", "tabs", "bars", "carriage returns"],
)
def test_a_record_of_a_csv_file_reaches_no_other(tmp_path, kind, delimiter, end, encoding, packed):
    rows = _rows(delimiter, kind)
    schema = replace(SCHEMA, delimiter=delimiter, encoding=encoding)
    path = tmp_path / "t.csv"

    def read(rows):
        _write(path, [row.replace("\n", end) for row in rows], delimiter, end, encoding)
        if not packed:
            return encode_table(path, schema)
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(path.read_bytes())
        return encode_table(Path(f"{path}.gz"), schema)

    plain = read(rows)
    assert len(plain) == 30
    for hostile in _HOSTILE:
        row = hostile.replace(",", delimiter)
        if end == "\r" and "\r" in row:
            continue  # two lines
        try:
            row.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            continue
        for place in (0, 15, 30):
            gone, new = _changes(plain, read([*rows[:place], row, *rows[place:]]))
            assert gone == 0 and new <= 1, (hostile[:40], place)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_that_is_not_text_leaves_other_rows_alone(tmp_path, encoding):
    # As of two exports, one behind the other.
    rows = [f"\ufeff1,x,n,p{number},1" for number in range(3)]
    schema = replace(SCHEMA, encoding=encoding)
    before = encode_table(_write(tmp_path / "t.csv", rows, ",", "\n", encoding), schema)
    rows.append("1,x,\udcff,me,1")
    after = encode_table(_write(tmp_path / "t.csv", rows, ",", "\n", encoding), schema)
    assert _changes(before, after) == (0, 1)


def test_quotes_decide_where_a_schema_lets_them(tmp_path):
    rows = ['1,x,"open,me,1', '7,y,27",p0,0', "2,z,n,p1,1"]
    path = _write(tmp_path / "t.csv", rows, ",", "\n", "utf-8")
    assert len(encode_table(path, SCHEMA)) == 3
    assert len(encode_table(path, replace(SCHEMA, lines_in_cells=True))) == 2


@pytest.mark.parametrize(
    "line, cells",
    [
        ('a,"b,c",d', ["a", "b,c", "d"]),
        ('a, "b, c" ,d', ["a", "b, c", "d"]),
        ('a,"b""c",', ["a", 'b"c', ""]),
        ('a,b"c",""', ["a", 'b"c"', ""]),
        (' a , b "c"', [" a ", ' b "c"']),
    ],
)
def test_cells_of_a_line(line, cells):
    assert split_line(line, ",") == (cells, "whole")
    assert split_line(line.replace(",", "\t"), "\t")[0] == [x.replace(",", "\t") for x in cells]


def test_blanks_between_cells_count_as_one():
    assert split_line("  6   148\t72 ", " ") == (["6", "148", "72"], "whole")
    assert split_line('6 "a b"  72', " ") == (["6", "a b", "72"], "whole")


PEOPLE = [uuid.UUID(int=number) for number in range(9, 16)]
BYTES = [person.bytes for person in PEOPLE]
WHOLE = [7, 2**53 - 1, 10**10, 10**15, 8, 9, 10]


def test_a_code_for_a_missing_number_is_a_person_among_ids(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("who,a,y\n999,1,0\n999,2,1\nNA,3,0\nNA,4,1\n")
    stated = Schema(
        target="y",
        classes=("0", "1"),
        unit="who",
        missing=("NA", "999"),
        columns={"a": Column(kind="number", bounds=(0, 10))},
    )
    assert len(set(encode_table(path, check_schema(stated, "schema")).units)) == 3
    own = {**stated.columns, "who": Column(kind="unit", missing=("999",))}
    units = encode_table(path, check_schema(replace(stated, columns=own), "schema")).units
    assert units[2:] == ["unit NA", "unit NA"] and len(set(units)) == 3


def test_a_person_is_one_unit_however_a_program_writes_the_id(tmp_path):
    path = tmp_path / "t.csv"
    person = PEOPLE[4]
    same = [str(person), str(person).upper(), f"{{{person}}}", person.hex]
    names = ["Mu\u0308ller", "M\u00fcller", "M\u00fc\u200cll\u00ader\u200e", "M\u00fclle\uff52"]
    path.write_text("who,a,y\n" + "".join(f"{name},1,0\n" for name in [*same, *names]), "utf-8")
    units = encode_table(path, replace(SCHEMA, columns={"a": SCHEMA.columns["a"]})).units
    assert units == [f"unit {person}"] * 4 + ["unit M\u00fcller"] * 4


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_a_space_or_end_of_line_around_a_stored_id_is_no_other_person(tmp_path, kind):
    ids = ["p1", "p1\r", "\u00a0p1", "p1\n", "p2", "p2\t"]
    stored = pa.array([name.encode() for name in ids]).cast(kind)
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"who": stored, "a": [1] * 6, "y": [0, 1] * 3}), path)
    units = encode_table(path, replace(SCHEMA, columns={"a": SCHEMA.columns["a"]})).units
    assert units == ["unit p1"] * 4 + ["unit p2"] * 2


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(BYTES, pa.binary(16)),
        pa.array(BYTES),
        pa.array([b"\xff%d" % number for number in range(7)]),
        pa.array([b"\xff%d" % number for number in range(7)]).dictionary_encode(),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array(BYTES, pa.binary(16))),
        pa.array(list(map(str, PEOPLE))).dictionary_encode(),
        pa.array(WHOLE),
        pa.array(list(map(float, WHOLE))),
        pa.array(list(map(float, WHOLE))).dictionary_encode(),
        pa.array([2**64 - 1 - number for number in range(7)], pa.uint64()),
        pa.array(list(map(Decimal, WHOLE)), pa.decimal128(30, 0)),
        pa.array([Decimal(number * 100) for number in range(1, 8)], pa.decimal128(10, -2)),
        pa.array([f"{number}.0" for number in WHOLE]),
        pa.array(list(range(7)), pa.date32()),
    ],
    ids=lambda ids: str(ids.type),
)
@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_a_person_is_one_unit_however_ids_are_stored(tmp_path, ids, suffix):
    rows = [number % 7 for number in range(70)]
    table = pa.table({"who": ids.take(pa.array(rows)), "a": rows, "y": [x % 2 for x in rows]})
    path = tmp_path / f"t.{suffix}"
    write = pa.parquet.write_table if suffix == "parquet" else pa.feather.write_feather
    if suffix == "parquet" and pa.types.is_decimal(ids.type) and ids.type.scale < 0:
        pytest.skip("Parquet has no such type")
    write(table, path)
    schema = replace(SCHEMA, columns={"a": SCHEMA.columns["a"]})
    assert len(set(encode_table(path, schema).units)) == 7
    if isinstance(ids.type, pa.UuidType):
        assert set(encode_table(path, schema).units) == {f"unit {person}" for person in PEOPLE}
    if pa.types.is_integer(ids.type) or pa.types.is_floating(ids.type):
        texts = [f"unit {value}" for value in ids.cast(pa.decimal128(38, 0)).to_pylist()]
        assert set(encode_table(path, schema).units) == set(texts)


@pytest.mark.parametrize(
    "values",
    [
        [Decimal(number) for number in range(7)] + [Decimal("1.25")],
        [datetime(2000, 1, 1 + day) for day in range(7)] + [datetime(2000, 1, 1, 0, 0, 0, 5)],
        [time(hour) for hour in range(7)] + [time(0, 0, 0, 5)],
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_the_finest_value_of_a_column_changes_no_other(values):
    exact = pa.array(values)
    coarse = pa.array(values[:-1])
    if not pa.types.is_decimal(exact.type):
        coarse = coarse.cast({"time64[us]": pa.time32("s")}.get(str(exact.type), pa.timestamp("s")))
    assert coarse.type != exact.type
    texts = stored_texts(exact)
    assert texts[:-1] == stored_texts(coarse)
    assert len(set(texts)) == 8


@pytest.mark.parametrize("is_old", [False, True])
def test_a_far_date_is_read_as_it_was_written(tmp_path, is_old):
    days = [datetime(1500, 1, 1), datetime(2024, 7, 1, 12), datetime(9999, 12, 31)]
    table = pa.table({"who": days, "a": [1, 2, 3], "y": [0, 1, 0]})
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(table, path, use_deprecated_int96_timestamps=is_old)
    units = encode_table(path, replace(SCHEMA, columns={"a": SCHEMA.columns["a"]})).units
    assert [unit.split()[1] for unit in units] == ["1500-01-01", "2024-07-01", "9999-12-31"]


@pytest.mark.parametrize(
    "ids",
    [
        pa.nulls(3),
        pa.array([[1]] * 3),
        pa.array([{"a": 1}] * 3),
        pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval()),
    ],
    ids=lambda x: str(x.type),
)
def test_ids_without_a_text_are_refused_by_their_type(tmp_path, ids):
    table = pa.table({"who": ids, "a": [1, 2, 3], "y": [0, 1, 0]})
    pa.feather.write_feather(table, tmp_path / "t.feather")
    schema = replace(SCHEMA, columns={"a": SCHEMA.columns["a"]})
    with pytest.raises(DatasetError, match="column 'who' has the type .*store it as text"):
        encode_table(tmp_path / "t.feather", schema)


def test_a_person_in_json_is_one_unit(tmp_path):
    forms = ["7", "7.0", '"7"', '" 7 "', "7e0"]
    forms += ['{"a": 1, "b": [2]}', '{"b":[2],"a":1}']
    lines = [f'{{"text": "t", "y": 0, "who": {form}}}' for form in forms]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([*lines, *lines]), "utf-8")
    units = encode_texts(path, SCHEMA).units
    assert len(set(units)) == 2 and len(set(units[:5])) == 1


def test_a_text_depends_on_no_other_record(tmp_path):
    schema = replace(SCHEMA, unit="", columns={"a": Column(kind="category", buckets=64)})
    for top in (10**3, 10**10, 10**15, 2**53 - 1):
        codes = [top - number for number in range(20)]
        found = []
        for values in (pa.array(codes), pa.array([*map(float, codes), None])):
            table = pa.table({"a": values, "y": ["0"] * len(values)})
            pa.parquet.write_table(table, tmp_path / "t.parquet")
            found.append(encode_table(tmp_path / "t.parquet", schema))
        assert _changes(*found) == (0, 1)


def test_one_value_that_is_no_text_costs_as_much_as_others(tmp_path):
    schema = replace(SCHEMA, unit="", columns={"a": Column(kind="category", buckets=64)})
    for value in (b"\xff", b"x"):
        table = pa.table({"a": [b"x"] * 20_000 + [value], "y": ["0"] * 20_001})
        pa.parquet.write_table(table, tmp_path / "t.parquet")
        records = encode_table(tmp_path / "t.parquet", schema)
        assert records.inputs[-1, -1] == (value == b"\xff") and records.inputs[:-1, -1].sum() == 0


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        '{"text"',
        "[" * 5000,
        '{"text": ' + "[" * 5000,
        '{"text": "t", "y": 1e999, "who": 1e999}',
        '{"text": {"a": NaN}, "y": [0], "who": -Infinity}',
        '{"text": "a\\ud800", "y": true, "who": "\\ud800"}',
        '{"text": "' + "w " * 100_000 + '", "y": 1, "who": 7}',
        '{"text": "a\u2028b\x85c\x0cd", "y": 1, "who": 7}',
        '{"text": "t", "y": 1' + "0" * 5000 + "}",
        '{"who": 1.' + "0" * 5000 + "1}",
        '\ufeff{"text": "t", "y": 1}',
        "\udcff",
        "\0",
        "null",
        '{"text": "t", "text": "u", "y": 0}',
    ],
    ids=range(16),
)
def test_a_line_of_json_reaches_no_other(tmp_path, line):
    path = tmp_path / "t.jsonl"
    lines = [f'{{"text": "w{x} v", "y": {x % 2}, "who": {x // 2}}}' for x in range(20)]

    def read(lines):
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        return encode_texts(path, SCHEMA)

    plain = read(lines)
    for place in (0, 10, 20):
        gone, new = _changes(plain, read([*lines[:place], line, *lines[place:]]))
        assert gone == 0 and new <= 1


def test_nested_keys_and_decimal_signs_of_stored_numbers(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"doc": {"body": "w"}, "m": {"y": 0.5}}\n{"doc.body": "w", "m": 1}\n', "utf-8")
    schema = Schema(
        target="m.y", target_bounds=(0, 1), decimal=",", text=TextForm(key="doc.body", buckets=8)
    )
    records = encode_texts(path, schema)
    assert torch.equal(records.inputs[0], records.inputs[1]) and records.inputs[:].any()
    assert records.labels[0] == 0 and records.labels[1].isnan()
    column = Column(kind="number", bounds=(0, 1))
    schema = check_schema(replace(schema, target="y", columns={"a": column}), "s")
    for values in ([0.5, 1.0], ["0,5", "1"]):
        pa.parquet.write_table(pa.table({"a": values, "y": values}), tmp_path / "t.parquet")
        records = encode_table(tmp_path / "t.parquet", schema)
        assert records.inputs.tolist() == [[0, 0], [1, 0]] and records.labels.tolist() == [0, 1]


def test_a_table_that_r_wrote_with_names_of_rows_is_never_read_a_column_off(tmp_path):
    path = tmp_path / "r.csv"
    # write.table(d, "r.csv", sep = ",", na = "")
    path.write_text('"age","ward","y"\n"1",30,"a",1\n"2",40,"b",\n"3",,"a",0\n', "utf-8")
    schema = Schema(target="y", classes=("0", "1"), row_names=True)
    read = read_table(path, ["age", "y"], schema).columns
    assert list_texts(read["age"].texts) == ["30", "40", ""]
    assert list_texts(read["y"].texts) == ["1", "", "0"]
    unstated = read_table(path, ["age", "y"], replace(schema, row_names=False))
    assert unstated.unreadable == 3 and list_texts(unstated.columns["age"].texts) == [None] * 3
    # write.table(d, "r.csv", sep = "\t", na = "", quote = FALSE)
    path.write_text("age\tward\ty\n1\t30\ta\t1\n2\t40\tb\t\n", "utf-8")
    assert list_texts(read_table(path, ["age"], schema).columns["age"].texts) == ["30", "40"]
    assert read_table(path, ["age"], replace(schema, row_names=False)).unreadable == 2
    with pytest.raises(ConfigError, match="row_names and row_ends are for a header"):
        check_schema(replace(schema, header=False, names=("age", "y")), "s.toml")


_COPIED = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v", "\\": "\\"}


def _copy(text):
    """Return a text as PostgreSQL's COPY writes it."""
    return "".join("\\" + _COPIED[sign] if sign in _COPIED else sign for sign in text)


def test_what_databases_write_with_backslashes_is_read_as_it_was(tmp_path):
    path = tmp_path / "t.tsv"
    rng = random.Random(0)
    texts = ["".join(rng.choices('a"\\Nn é\t,\n\r\v', k=rng.randrange(6))) for _ in range(600)]
    rows = [texts[place : place + 3] for place in range(0, 600, 3)]
    lines = ["\t".join(map(_copy, row)) for row in rows]
    path.write_bytes("\n".join(["a\tb\tc", *lines, "\\N\t1\t2", ""]).encode())
    schema = Schema(quotes=False, escapes=True)
    table = read_table(path, ["a", "b", "c"], schema)
    columns = [list_texts(table.columns[name].texts) for name in "abc"]
    assert list(map(list, zip(*columns, strict=True))) == [*rows, ["", "1", "2"]]
    # As Python, Spark and MySQL's OUTFILE write quotes in quotes.
    path = tmp_path / "t.csv"
    rows = [["a" + re.sub("[\n\r]", "", text) for text in row] for row in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, doublequote=False, escapechar="\\", quoting=csv.QUOTE_ALL)
        writer.writerows([["a", "b", "c"], *rows])
    table = read_table(path, ["a", "b", "c"], Schema(escapes=True))
    columns = [list_texts(table.columns[name].texts) for name in "abc"]
    assert list(map(list, zip(*columns, strict=True))) == rows and table.unreadable == 0


@pytest.mark.parametrize("quotes", [True, False])
def test_one_line_with_backslashes_reaches_no_other_record(tmp_path, quotes):
    schema = replace(SCHEMA, quotes=quotes, escapes=True, delimiter="\t")
    rng = random.Random(1)

    def read(lines):
        return encode_table(_write(tmp_path / "t.csv", lines, "\t", "\n", "utf-8"), schema)

    lines = [f'{k}\tw\ta\\"b\\\\\tp{k}\t{k % 2}' for k in range(6)]
    for place in (0, 3, 6) * 20:
        line = "\t".join(rng.choices(["1", '"', "\\", '\\"', '"\\"', "\\N", "a"], k=5))
        gone, new = _changes(read(lines), read([*lines[:place], line, *lines[place:]]))
        assert gone == 0 and new <= 1


def test_a_packed_file_with_the_name_of_a_table_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(b"a,y\n1,0\n"))
    with pytest.raises(DatasetError, match="is a packed file or a workbook"):
        read_header(path)
