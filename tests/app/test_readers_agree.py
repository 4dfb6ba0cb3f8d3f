"""Files are read by columns, and mean what a careful reader of single cells finds in them."""

import os
import pickle
import stat
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc.app import train as training
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata import csv_blocks, rows
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.file_rows import FileRows
from dpkfc.app.owndata.files import Share, encode_table, encode_texts
from dpkfc.app.owndata.proposals import empty_schema
from dpkfc.app.owndata.recipes import KEPT
from dpkfc.app.owndata.records import split_records
from dpkfc.app.owndata.schema import Schema, TextForm, check_schema, read_schema
from dpkfc.app.owndata.tables import read_table
from dpkfc.app.recipes.catalogue import configure
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.toml import ConfigError
from tests.app.careful import read_carefully

_PIECES = [
    *('"', '""', ",", ",,", ",,,", "\t", " ", "a", "12", "3.5", "\r", "\n", "\r\n", "\n\n", "\0"),
    *("é", "\ufeff", "\u2028", "\x0b", "\x85", "\udcff", '"x"', '"a,b"', ', "q" ,', "'", "\\"),
    *("x,y,z\n", '"1","2","3"\n', '1,"",3\n', '"a, b",c,"d"\r\n', "1,2,3,\n", "1,2,3,4\n", "1,2\n"),
]


@given(
    pieces=st.lists(st.sampled_from(_PIECES), max_size=40),
    heading=st.sampled_from(["a,b,c", '"a","b",c', "a,b,c,"]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    delimiter=st.sampled_from([",", ";", "\t", " ", "é"]),
    encoding=st.sampled_from(["utf-8", "utf-8", "cp1252", "utf-16", "shift_jis"]),
    joins=st.booleans(),
    block=st.sampled_from([40, 61, 1 << 20]),
)
@settings(max_examples=150)
def test_columns_hold_what_a_careful_reader_finds(
    tmp_path_factory,
    pieces,
    heading,
    end,
    delimiter,
    encoding,
    joins,
    block,
):
    path = tmp_path_factory.getbasetemp() / "t.csv"
    text = "\n".join([heading, "".join(pieces)]).replace(",", delimiter)
    if "\r" not in text:
        text = text.replace("\n", end)
    path.write_bytes(text.encode(encoding, "surrogateescape" if encoding == "utf-8" else "ignore"))
    schema = Schema(delimiter=delimiter, encoding=encoding, lines_in_cells=joins)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(csv_blocks, "BLOCK", block)
        try:
            wanted = read_carefully(path, ["a", "c"], schema)
        except DatasetError:
            with pytest.raises(DatasetError):
                read_table(path, ["a", "c"], schema)
            return
        table = read_table(path, ["a", "c"], schema)
    assert {name: cells.texts for name, cells in table.columns.items()} == wanted
    assert table.rows == len(wanted["a"])


_SIGNS = [
    *("1", "-", "+", ".", " ", "e", "00", "nan", "inf", "NA", "", "_", "−", "999", "x", ",", "'"),
    *(
        "mg",
        "<",
        "/",
        "120/80",
        "2020-01-02",
        "02.01.2020",
        "yes",
        "1.0",
        "\u00a0",
        "\x1c",
        "\u0661",
    ),
]
_COLUMNS = [
    Column(kind="number", bounds=(0, 10)),
    Column(kind="number", bounds=(0, 10), missing=("", "-9", "999")),
    Column(kind="number", bounds=(0, 10), decimal=","),
    Column(kind="number", bounds=(0, 10), decimal=",", thousands="."),
    Column(kind="number", bounds=(0, 10), thousands="'", signs=True, measured_in="mg"),
    Column(kind="number"),
    Column(kind="pair", bounds=(0, 200, 0, 200)),
    Column(kind="date", bounds=("2000-01-01", "2030-01-01")),
    Column(kind="date", bounds=("2000-01-01", "2030-01-01"), format="%d.%m.%Y"),
    Column(kind="flag"),
    Column(kind="category", categories=("1", "x")),
    Column(kind="category", categories=("1", "x"), numeric=True),
    Column(kind="text", buckets=8),
]


@given(
    column=st.sampled_from(_COLUMNS),
    texts=st.lists(
        st.one_of(
            st.none(),
            st.floats(-20, 20).map("{:.3f}".format),
            st.lists(st.sampled_from(_SIGNS), max_size=3).map("".join),
        ),
        min_size=1,
    ),
)
@settings(max_examples=300)
def test_a_column_means_what_its_cells_mean(column, texts):
    whole = column.encode(pa.array(texts, pa.string()))
    alone = [column.encode([text]) for text in texts]
    assert np.array_equal(whole.features, np.concatenate([one.features for one in alone]))
    assert whole.is_missing.tolist() == [column.meaning(text) is None for text in texts]
    assert whole.is_unread.tolist() == [bool(one.is_unread[0]) for one in alone]
    assert not (whole.is_unread & ~whole.is_missing).any()
    assert whole.is_unexpected.tolist() == [bool(one.is_unexpected[0]) for one in alone]


# --------------------------------------------------------------------------------------------------

_TOML = """\
target = "y"
classes = ["0", "1"]
[columns.a]
kind = "number"
bounds = [0, 9]
[columns.b]
kind = "category"
buckets = 4
"""


def _write(folder, count=400):
    lines = [f"{row % 10},{'xyz'[row % 3]},{row % 2}" for row in range(count)]
    (folder / "t.csv").write_text("\n".join(["a,b,y", *lines, ""]))
    (folder / "s.toml").write_text(_TOML)
    settings = {"steps": 2, "expected_batch_size": 32, "epsilon": 3.0, "accountant": "rdp"}
    places = {"data": "t.csv", "schema": "s.toml", "out": "run"}
    return {**{name: str(folder / place) for name, place in places.items()}, **settings}


def _run(chosen):
    config, recipe = configure(chosen)
    training.run(config, recipe=recipe)


_opened = []
_hooks = []


def _note_opened(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        _opened.append(arguments[0])


def test_training_opens_data_and_schema_once_and_leaves_no_row(tmp_path):
    chosen = _write(tmp_path)
    if not _hooks:
        sys.addaudithook(_note_opened)
        _hooks.append(True)
    _opened.clear()
    _run(chosen)
    counts = Counter(_opened)
    assert counts[chosen["data"]] == counts[chosen["schema"]] == 1
    assert not (tmp_path / "run" / KEPT).exists()
    _run({**chosen, "keep_encoded": True, "out": str(tmp_path / "kept")})
    kept = tmp_path / "kept" / KEPT
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    config, recipe = configure(chosen)
    data = recipe.data(config)
    whole = torch.cat([data.train[0][:], data.test[0][:]]).numpy()
    assert np.array_equal(np.load(kept, mmap_mode="r"), whole)


@pytest.mark.parametrize("error", [DatasetError, KeyboardInterrupt])
def test_an_end_before_the_first_step_leaves_nothing(tmp_path, monkeypatch, error):
    chosen = {**_write(tmp_path), "keep_encoded": True}
    load = Recipe.data

    def fail(recipe, config, **others):
        load(recipe, config, **others)
        raise error("stop")

    monkeypatch.setattr(Recipe, "data", fail)
    with pytest.raises(error, match="stop"):
        _run(chosen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.toml", "t.csv"]


def test_a_full_disk_and_a_file_that_changes_are_one_line_each(tmp_path, monkeypatch):
    chosen = _write(tmp_path)
    schema = read_schema(Path(chosen["schema"]))
    append = rows.RowFile.append

    def grow(file, encoded):
        append(file, encoded)
        with open(chosen["data"], "a") as other:
            other.write("1,x,0\n")

    monkeypatch.setattr(rows.RowFile, "append", grow)
    with pytest.raises(DatasetError, match="has changed while it was read; begin again"):
        encode_table(Path(chosen["data"]), schema)
    monkeypatch.setattr(rows.RowFile, "append", append)
    if os.path.exists("/dev/full"):
        monkeypatch.setattr(rows.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb", 0))
        with pytest.raises(DatasetError, match="no room for the encoded rows; free some"):
            encode_table(Path(chosen["data"]), schema)


def test_rows_in_a_file_are_split_as_rows_in_memory(tmp_path, monkeypatch):
    chosen = _write(tmp_path)
    monkeypatch.setattr(rows, "_CHUNK", 1000)
    records = encode_table(Path(chosen["data"]), read_schema(Path(chosen["schema"])))
    held = replace(records, file=None, contents=list(records.contents))
    mapped, plain = split_records(records, 20, 1, "t"), split_records(held, 20, 1, "t")
    for split in ("train", "test", "validation"):
        for part, same in zip(getattr(mapped, split), getattr(plain, split), strict=True):
            assert torch.equal(part[:], same)


def test_rows_of_a_file_are_read_as_rows_of_a_tensor(tmp_path):
    numbers = np.arange(60, dtype=np.float32).reshape(20, 3)
    file = rows.RowFile(3, tmp_path)
    file.append(numbers)
    stored, tensor = FileRows(file, range(4, 18)), torch.from_numpy(numbers)[4:18]
    chosen = (
        [3, -1, np.int64(2)],
        torch.tensor([0, 5]),
        slice(2, 9, 3),
        slice(0, 0),
        tensor[:, 0] > 30,
    )
    for some in chosen:
        assert torch.equal(stored[some], tensor[some])
        assert torch.equal(stored.take(some)[:], tensor[some])
    assert torch.equal(stored[-2], tensor[-2])
    assert torch.equal(torch.stack(list(stored)), tensor)
    assert torch.equal(torch.cat(list(stored.split(4))), tensor)
    # A worker process that cannot open the file gets a tensor.
    assert torch.equal(pickle.loads(pickle.dumps(stored)), tensor)
    # What a batch does to its rows does not reach the file.
    stored[:].zero_()
    assert torch.equal(stored[:], tensor)
    # Forked workers read at once, and share the position of the file.
    place = file._file.tell()
    assert len(stored[[9, 1]]) == 2 and file._file.tell() == place
    with pytest.raises(IndexError):
        stored[[14]]
    assert FileRows(rows.RowFile(3, tmp_path), range(0))[:].shape == (0, 3)


# --------------------------------------------------------------------------------------------------


def test_json_lines_are_a_table_where_the_schema_has_columns(tmp_path):
    chosen = _write(tmp_path)
    lines = []
    for line in Path(chosen["data"]).read_text().split()[1:]:
        a, b, y = line.split(",")
        lines.append(f'{{"y": {y}, "b": "{b}", "a": {a}.0}}')
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([*lines, "[1]", ""]))
    schema = read_schema(Path(chosen["schema"]))
    records = encode_table(path, schema)
    assert torch.equal(records.inputs[:-1], encode_table(Path(chosen["data"]), schema).inputs)
    assert records.labels[-1] == -1 and records.figures["unreadable", "rows"] == 1 / 401
    config, recipe = configure({**chosen, "data": str(path)})
    assert config.run.recipe == recipe.name == "own-table"
    assert "[columns.age]" in empty_schema(path, "y", "", None)


def test_a_schema_names_the_columns_of_a_file_without_a_header(tmp_path):
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text("63.0,f,0\n71.5,m,1\n")
    with pytest.raises(DatasetError, match="--target c3 makes one with header = false"):
        empty_schema(path, "outcome", "", None)
    text = empty_schema(path, "c3", "", None)
    assert not any(cell in text for cell in ("63.0", "71.5"))
    text = text.replace("classes = []", 'classes = ["0", "1"]').replace(
        'kind = ""', 'kind = "flag"'
    )
    schema.write_text(text)
    assert encode_table(path, read_schema(schema)).labels.tolist() == [0, 1]


def test_a_sheet_with_years_as_names_or_without_names_is_read(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    rows = [[2023, 2024, "y"], [1, 2, "0"], [2, 1, "1"]]
    column = Column(kind="number", bounds=(0, 2))
    for start, names in ((0, ()), (1, ("2023", "2024", "y"))):
        book = openpyxl.Workbook()
        for row in rows[start:]:
            book.active.append(row)
        book.save(tmp_path / "t.xlsx")
        stated = Schema(target="y", classes=("0", "1"), header=not names, names=names)
        schema = check_schema(replace(stated, columns={"2024": column}), "s")
        records = encode_table(tmp_path / "t.xlsx", schema)
        assert records.labels.tolist() == [0, 1] and records.inputs[:, 0].tolist() == [1, 0]


def test_a_sheet_has_a_name(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["nothing"])
    for row in (["a", "y"], [1, "0"], [2, "1"]):
        (book["two"] if "two" in book.sheetnames else book.create_sheet("two")).append(row)
    book.save(tmp_path / "t.xlsx")
    text = empty_schema(tmp_path / "t.xlsx", "y", "", None, "two")
    assert 'sheet = "two"' in text and "[columns.a]" in text
    schema = Schema(
        target="y", classes=("0", "1"), columns={"a": Column(kind="number", bounds=(0, 2))}
    )
    assert (
        len(encode_table(tmp_path / "t.xlsx", replace(check_schema(schema, "s"), sheet="two"))) == 2
    )
    with pytest.raises(DatasetError, match="has no sheet 'three'; it has Sheet, two"):
        read_table(tmp_path / "t.xlsx", ["a"], replace(schema, sheet="three"))


def test_bounds_of_a_pair_in_pairs_show_the_form(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[columns.p]\nkind = "pair"\nbounds = [[60, 250], [30, 150]]\n')
    with pytest.raises(ConfigError, match=r"of a pair \[least, greatest, least, greatest\]"):
        read_schema(path)


@pytest.mark.parametrize("encoder", ["words", "weighted-words"])
def test_sparse_rows_are_read_as_dense_ones(tmp_path, encoder):
    path = tmp_path / "t.jsonl"
    lines = [f'{{"text": "w{x % 7} v{x % 3} v{x % 3} good", "y": {x % 2}}}' for x in range(60)]
    path.write_text("\n".join([*lines, "{}"]))
    schema = Schema(target="y", classes=("0", "1"), text=TextForm(encoder=encoder, buckets=16))
    inputs = encode_texts(path, schema).inputs
    dense = inputs[:]
    norms = dense.norm(dim=1)
    expected = torch.full((60,), 4.0 if encoder == "weighted-words" else 1.0)
    torch.testing.assert_close(norms[:-1], expected)
    assert norms[-1] == 0 and inputs.shape == dense.shape
    rows = torch.tensor([5, 0, 5])
    assert torch.equal(inputs[rows], dense[rows]) and torch.equal(inputs[3], dense[3])
    assert torch.equal(torch.cat(list(inputs.split(7))), dense)
    assert torch.equal(inputs.take(rows)[:], dense[rows])
    assert torch.equal(torch.stack(list(inputs)), dense)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_every_process_has_a_share_of_as_few_rows_as_processes(tmp_path, world):
    chosen = _write(tmp_path)
    header, *lines = Path(chosen["data"]).read_text("utf-8").splitlines()
    table, schema = tmp_path / "few.csv", read_schema(Path(chosen["schema"]))
    for count in range(world, 13):
        few = [f"{n},{line.split(',', 1)[1]}" for n, line in enumerate(lines[:count])]
        table.write_text("\n".join([header, *few]) + "\n", "utf-8")
        whole = encode_table(table, schema).inputs
        parts = [encode_table(table, schema, share=Share(rank, world)) for rank in range(world)]
        assert all(len(part.inputs) for part in parts)
        joined = torch.cat([part.inputs for part in parts])
        assert sorted(joined.tolist()) == sorted(whole.tolist())
    if world > 1:
        table.write_text(f"{header}\n{lines[0]}\n", "utf-8")
        with pytest.raises(DatasetError, match="has no row for process 1; start fewer processes"):
            encode_table(table, schema, share=Share(1, world))
