"""Files of Excel, SPSS, Stata and SAS, and folders of Parquet parts: what their readers change."""

import math
from dataclasses import replace
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet
import pytest

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.files import encode_table
from dpkfc.app.owndata.headers import read_header
from dpkfc.app.owndata.proposals import empty_schema, kind_of_data
from dpkfc.app.owndata.schema import Schema, check_schema
from dpkfc.app.owndata.tables import read_table

pandas = pytest.importorskip("pandas")
pyreadstat = pytest.importorskip("pyreadstat")
openpyxl = pytest.importorskip("openpyxl")

FRAME = {
    "id": ["A1  ", "B2", "007"],
    "day": [13_740_000_000.0, math.nan, 0.0],
    "span": [90_000.0, 3_600.0, 0.5],
    "age": [40.0, 999.0, math.nan],
}


def _write(path, **chosen):
    write = {".sav": "write_sav", ".dta": "write_dta", ".xpt": "write_xport"}[path.suffix]
    getattr(pyreadstat, write)(pandas.DataFrame(FRAME), str(path), **chosen)
    return path


def _texts(path, name, schema=None):
    return read_table(path, [name], schema or Schema()).columns[name].texts


def test_spss_keeps_codes_and_long_times(tmp_path):
    path = _write(
        tmp_path / "t.sav",
        variable_format={"day": "DATE11", "span": "TIME8"},
        variable_value_labels={"age": {999.0: "unknown"}},
        missing_ranges={"age": [40]},
    )
    assert _texts(path, "span") == ["90000", "3600", "0.5"]
    assert _texts(path, "age") == [None, "999", None]  # 40 is a missing value of the user
    assert _texts(path, "day")[1:] == [None, "1582-10-14"]
    assert _texts(path, "id") == ["A1", "B2", "007"]
    text = empty_schema(path, "id", "", None)
    assert 'categories = ["999"]' in text and "999 = unknown" in text and 'kind = "date"' in text
    assert read_header(path).kinds["span"] == "number"


@pytest.mark.parametrize(
    "suffix, formats, day",
    [(".dta", {"day": "%td"}, "1960-01-01"), (".xpt", {"day": "DATE9"}, "1960-01-01")],
)
def test_dates_of_stata_and_sas(tmp_path, suffix, formats, day):
    path = _write(tmp_path / f"t{suffix}", variable_format=formats)
    # The first number of days is beyond the last date.
    assert _texts(path, "day") == [None, None, day]
    assert [text and text.strip() for text in _texts(path, "id")] == ["A1", "B2", "007"]


@pytest.mark.parametrize("suffix, shown", [(".dta", "%tm"), (".xpt", "MONYY7"), (".sav", "MOYR8")])
def test_other_formats_are_numbers_or_refused_by_name(tmp_path, suffix, shown):
    path = _write(tmp_path / f"t{suffix}", variable_format={"span": shown})
    assert _texts(path, "span")[0] == "90000"
    dates = Schema(columns={"span": Column(kind="date", bounds=("1990-01-01", "2000-01-01"))})
    with pytest.raises(DatasetError, match=rf"number of format '{shown}', which is not a date"):
        _texts(path, "span", dates)


def test_all_rows_and_zeros_of_a_sas_transport_file(tmp_path):
    path = tmp_path / "t.xpt"
    frame = pandas.DataFrame({"a": ["x", "", ""], "b": [0.0, 1.0, 0.0]})
    pyreadstat.write_xport(frame, str(path))
    table = read_table(path, ["a", "b"], Schema())
    assert table.rows == 3 and table.columns["b"].texts == ["0", "1", "0"]


def test_numbers_with_the_digits_of_a_date_are_read_by_a_format(tmp_path):
    path = tmp_path / "t.dta"
    pandas.DataFrame({"a": [20200106, 20200111], "y": [0, 1]}).to_stata(path, write_index=False)
    column = Column(kind="date", bounds=("2020-01-01", "2020-01-11"), format="%Y%m%d")
    schema = Schema(target="y", classes=("0", "1"), columns={"a": column})
    records = encode_table(path, check_schema(schema, "s"))
    assert records.inputs[:, 0].tolist() == pytest.approx([0, 1])
    bare = replace(schema, columns={"a": replace(column, format="")})
    with pytest.raises(DatasetError, match="is not a date.*or format = '%Y%m%d'"):
        encode_table(path, check_schema(bare, "s"))


def test_ids_that_lose_digits_are_refused_by_their_format(tmp_path):
    path = _write(tmp_path / "t.sav", variable_format={"age": "F20.0"})
    with pytest.raises(DatasetError, match="'age' are numbers of up to 20 digits.*store them as"):
        _texts(path, "age", Schema(unit="age"))


@pytest.mark.parametrize("suffix", [".sav", ".dta", ".xpt"])
def test_one_text_with_wrong_bytes_ends_no_reading(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    frame = pandas.DataFrame({"who": ["Müller", "Mxxxxr", "Mxxxxr"], "a": [1.0, 2.0, 3.0]})
    chosen = {"row_compress": False} if suffix == ".sav" else {}
    write = {".sav": "write_sav", ".dta": "write_dta", ".xpt": "write_xport"}[suffix]
    getattr(pyreadstat, write)(frame, str(path), **chosen)
    content = path.read_bytes()
    if content.count(b"Mxxxxr") != 2:
        pytest.skip("stored in pieces")
    path.write_bytes(content.replace(b"Mxxxxr", b"M\xff\xfexxr"))
    assert _texts(path, "who") == ["Müller", None, None]
    assert _texts(path, "a") == ["1", "2", "3"]
    # A person keeps one id.
    ids = _texts(path, "who", Schema(unit="who"))
    assert ids[0] == "Müller" and ids[1] == ids[2] is not None


def test_cells_of_a_spreadsheet(tmp_path):
    path = tmp_path / "t.xlsx"
    book = openpyxl.Workbook()
    sheet = book.active
    rows = [
        ["id", " a\nb ", "day"],
        ["007", 7, datetime(2026, 1, 2)],
        [7, 1.5, datetime(2026, 1, 2, 3, 4)],
        [7.0, 1e10, timedelta(hours=25)],
        [None, None, None],
        [True, "#N/A", 59],
        ["x", 1, 60, "too many"],
    ]
    for row in rows:
        sheet.append(row)
    sheet["B2"].number_format = "000"
    sheet["C6"].number_format = "yyyy-mm-dd"
    book.save(path)
    schema = Schema(columns={"a b": Column(kind="number", bounds=(0, 1), decimal=",")})
    assert _texts(path, "id") == ["007", "7", "7", "true", None]
    assert _texts(path, "a b", schema) == ["7", "1,5", "10000000000", None, None]
    assert _texts(path, "day") == ["2026-01-02", "2026-01-02 03:04:00", "90000", None, None]
    assert read_table(path, ["id"], schema).figures == {("unreadable", "rows"): 0.2}


def test_a_number_sign_before_a_word_is_no_error_of_a_formula(tmp_path):
    path = tmp_path / "t.xlsx"
    book = openpyxl.Workbook()
    for text in ("bed", "#1", "#ICU", "#N/A", "#DIV/0!", "#NAME?", "#SPILL!"):
        book.active.append([text])
    book.save(path)
    assert _texts(path, "bed") == ["#1", "#ICU", None, None, None, None]


def test_a_spreadsheet_without_a_header_is_refused_and_not_repeated(tmp_path):
    path = tmp_path / "t.xlsx"
    book = openpyxl.Workbook()
    book.active.append(["Smith", 42])
    book.save(path)
    for call in (lambda: empty_schema(path, "y", "", None), lambda: _texts(path, "y")):
        with pytest.raises(DatasetError, match="does not look like names") as caught:
            call()
        assert "Smith" not in str(caught.value) and "42" not in str(caught.value)


@pytest.mark.parametrize("name", ["t.xlsx", "t.sav", "t.dta", "t.sas7bdat", "t.xpt", "t.por"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\3\4 and no more")
    with pytest.raises(DatasetError, match=f"{name}: cannot be read"):
        read_header(tmp_path / name)


def test_a_folder_of_parts_is_a_table(tmp_path):
    for number, values in enumerate([["1", "2"], [3, 4], [5.0, None], []]):
        folder = tmp_path / f"ward=east%20{number}"
        folder.mkdir()
        table = pa.table({"a": values, "y": ["0"] * len(values)})
        pa.parquet.write_table(table, folder / "part-0.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".hidden.parquet").write_text("no part")
    assert kind_of_data(tmp_path) == "own-table"
    assert read_header(tmp_path).names == ["a", "y", "ward"]
    assert _texts(tmp_path, "a") == ["1", "2", "3", "4", "5", None]
    assert _texts(tmp_path, "ward")[2] == "east 1"
    with pytest.raises(DatasetError, match="no column 'b'"):
        _texts(tmp_path, "b")


def test_a_column_stored_as_another_kind_is_refused(tmp_path):
    schema = check_schema(
        Schema(target="y", columns={"a": Column(kind="number", bounds=(0, 1))}), "s"
    )
    for kind in (pa.date32(), pa.time32("s")):
        table = pa.table({"a": pa.array([1], kind), "y": ["0"]})
        pa.parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(DatasetError, match="stored as a date.*set kind = 'date'"):
            encode_table(tmp_path / "t.parquet", schema)


def test_the_first_sheet_that_is_shown_is_read(tmp_path):
    book = openpyxl.Workbook()
    book.active.sheet_state = "hidden"
    book.active.append(["old", "y"])
    for row in (["age", "y"], [30, 1]):
        (book["Data"] if "Data" in book.sheetnames else book.create_sheet("Data")).append(row)
    book.active = 1
    for name in ("t.xlsx", "t.xlsm"):
        book.save(tmp_path / name)
        assert list(read_header(tmp_path / name).names) == ["age", "y"]
    assert read_header(tmp_path / "t.xlsx", Schema(sheet="Sheet")).names[0] == "old"
    book["Data"].sheet_state = "hidden"
    chart = pytest.importorskip("openpyxl.chart").BarChart()
    book.create_chartsheet("Chart").add_chart(chart)
    book.active = 2
    book.save(tmp_path / "t.xlsx")
    assert read_header(tmp_path / "t.xlsx").names[0] == "old"


def test_an_arrow_stream_is_a_table(tmp_path):
    table = pa.table({"age": [30, 40], "other": [1, 2], "y": ["0", "1"]})
    with pa.ipc.new_stream(tmp_path / "t.arrow", table.schema) as stream:
        stream.write_table(table, 1)
    read = read_table(tmp_path / "t.arrow", ["y", "age"], Schema()).columns
    assert read["age"].texts == ["30", "40"] and read["y"].texts == ["0", "1"]


def test_columns_of_lists_and_structures_are_left_out_of_a_new_schema(tmp_path):
    table = pa.table({"age": [30], "visits": [[1, 2]], "doc": [{"a": 1}], "y": ["0"]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "ward=3").mkdir()
    pa.parquet.write_table(table, tmp_path / "ward=3" / "t.parquet")
    for data, names in ((tmp_path / "t.parquet", ["age"]), (tmp_path, ["age"])):
        schema = empty_schema(data, "y")
        assert "'visits' for its type, 'doc' for its type" in schema
        assert [line for line in schema.splitlines() if line.startswith("[col")] == [
            f"[columns.{name}]" for name in names
        ]
