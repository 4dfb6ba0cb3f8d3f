"""What the text of a cell means, names of columns, and how a CSV file may be written."""

import pytest

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.cells import (
    NumberForm,
    canonical,
    id_name,
    is_known_encoding,
    read_number,
    spell_words,
)
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.headers import look_like_names, read_header
from dpkfc.app.owndata.names import is_identifier
from dpkfc.app.owndata.proposals import empty_schema
from dpkfc.app.owndata.schema import Schema, check_schema, read_schema
from dpkfc.app.owndata.tables import read_table
from dpkfc.app.toml import ConfigError


@pytest.mark.parametrize(
    "keys, text, number",
    [
        ({}, " 1.5 ", 1.5),
        ({}, "1e3", 1000),
        ({}, "−5", -5),
        ({}, "1_000", None),
        ({}, "١٢", None),
        ({}, "1,299.50", None),
        ({}, "0x10", None),
        ({}, "nan", None),
        ({"decimal": ","}, "3,5", 3.5),
        ({"decimal": ","}, "1.234", None),
        ({"decimal": ",", "thousands": "."}, "1.234", 1234),
        ({"decimal": ",", "thousands": "."}, "-1.234.567,5", -1234567.5),
        ({"decimal": ",", "thousands": "."}, "1.23", None),
        ({"decimal": ",", "thousands": "."}, "1234.567", None),
        ({"thousands": ","}, "1,299.50", 1299.5),
        ({"thousands": ","}, "1,29", None),
        ({"thousands": " "}, "1 299", 1299),
        ({"thousands": " "}, "1\u202f299\u00a0000", 1299000),
        ({"thousands": "'"}, "1'299.50", 1299.5),
        ({"thousands": "'"}, "1’299", 1299),
        ({"signs": True}, "> 89", 89),
        ({"signs": True}, "<=0.5", 0.5),
        ({"signs": True}, "≥7", 7),
        ({}, ">89", None),
        ({"measured_in": "mg"}, "5 mg", 5),
        ({"measured_in": "mg"}, "5mg", 5),
        ({"measured_in": "mg"}, "5", 5),
        ({"measured_in": "mg"}, "5 g", None),
        ({"signs": True, "measured_in": "%", "decimal": ","}, "< 2,5 %", 2.5),
        ({"measured_in": "\u00b5g"}, "5 \u03bcg", 5),
        ({"measured_in": "$"}, "$ 5", 5),
        ({"measured_in": "$", "thousands": ","}, "-$1,299.50", -1299.5),
        ({"measured_in": "€", "decimal": ","}, "(€ 2,5)", -2.5),
        ({"measured_in": "€", "decimal": ","}, "(2,5) €", -2.5),
        ({"measured_in": "€", "decimal": ","}, "1,5- €", -1.5),
        ({}, "(12.5)", -12.5),
        ({}, "( 12.5 )", -12.5),
        ({}, "12-", -12),
        ({"measured_in": "$"}, "1" + " " * 100_000 + "2", None),
        ({}, "(-12)", None),
        ({}, "(12", None),
        ({"missing": ("", "-9", "999")}, "999.00", None),
    ],
)
def test_numbers_as_people_write_them(keys, text, number):
    column = Column(kind="number", bounds=(0, 1), **keys)
    column.check("a", "s.toml")
    assert column.meaning(text) == (None if number is None else (number,))


def test_two_numbers_of_one_cell():
    column = Column(kind="pair", bounds=(60, 260, 30, 130))
    encoded = column.encode(["120/80", " 260 / 130 ", "120", "a/80", "300/30", "1/2/3"])
    rows = [[-0.4, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1], [1, -1, 0], [0, 0, 1]]
    assert (
        encoded.features.ravel() == pytest.approx(sum(rows, []))
        and encoded.is_unexpected.sum() == 1
    )


ODD = ["-" * 5000, "(" * 5000 + "1" + ")" * 5000, "1" + " " * 50000 + "g"]


@pytest.mark.parametrize("text", ODD, ids=["dashes", "parentheses", "blanks"])
def test_no_cell_however_odd_ends_or_delays_a_run(text):
    assert read_number(text, NumberForm(measured_in="mg")) is None


@pytest.mark.parametrize(
    "form, bounds, text, share",
    [
        ("", ("2020-01-01", "2020-01-11"), "2020-01-06", 0),
        ("", ("2020-01-01", "2020-01-11"), "2020-01-06T00:00:00.123456789+00:00", 0),
        ("", ("2020-01-01", "2020-01-11"), "2020-01-06 00:00:00 UTC", 0),
        ("", ("2020-01-01", "2020-01-11"), "06.01.2020", None),
        ("", ("2020-01-01", "2020-01-11"), "2020-01-06 01:00:00,000+01", 0),
        ("", ("2020-01-01", "2020-01-11"), "2020-01-06-01", None),
        ("%d.%m.%Y", ("01.01.2020", "2020-01-11"), "6.1.2020", 0),
        ("%d.%m.%Y", ("01.01.2020", "11.01.2020"), "30.02.2020", None),
        ("%d.%m.%Y", ("01.01.2020", "11.01.2020"), "٠٦.٠١.٢٠٢٠", None),
        ("%d.%m.%Y", ("01.01.2020", "11.01.2020"), "31.12.9999", 1),
        ("%d.%m.%Y", ("01.01.2020", "11.01.2020"), "2020-01-06", 0),
        ("%d.%m.%y", ("1940-05-01", "1950-05-01"), "01.05.45", 0),
        ("%d.%m.%y", ("1940-05-01", "2019-05-01"), "01.05.19", 1),
        ("%d.%m.%y", ("2015-05-01", "2019-05-01"), "02.05.19", 1),
        ("%d.%m.%y", ("1890-03-01", "1940-05-01"), "29.02.00", None),
        ("%m%d%Y", ("01012020", "01232020"), "1122020", 0),
        ("%Y%m%d", ("20200101", "20200111"), "2020106", None),
        ("%H%M", ("0000", "0300"), "130", 0),
        ("%H:%M", ("00:00", "12:00"), "06:00", 0),
        ("%H:%M", ("00:00", "12:00"), "25:00", None),
    ],
)
def test_dates_and_times(form, bounds, text, share):
    column = Column(kind="date", bounds=bounds, format=form)
    column.check("a", "s.toml")
    expected = [0, 1] if share is None else [share, 0]
    assert column.encode([text]).features[0] == pytest.approx(expected, abs=1e-5)


def test_bounds_of_dates_are_kept_as_toml_writes_them(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[columns.a]\nkind = "date"\nbounds = [2020-01-01, 2021-01-01]\n', "utf-8")
    assert read_schema(path).columns["a"].bounds == ("2020-01-01", "2021-01-01")


@pytest.mark.parametrize("numeric", [False, True])
def test_codes_are_texts_unless_a_schema_says_numbers(numeric):
    codes = ("250", "250.0", "250.00", "2.5e2", "0250")
    column = Column(kind="category", categories=("250",), numeric=numeric)
    places = column.encode(codes).features.argmax(1).tolist()
    assert places == ([0] * 5 if numeric else [0, 1, 1, 1, 1])
    long = Column(kind="category", buckets=1024, numeric=True)
    assert long.meaning("12345678901234567891") != long.meaning("12345678901234567892")


def test_codes_with_thousands_are_the_numbers_that_they_say():
    form = {"decimal": ",", "thousands": "."}
    column = Column(kind="category", categories=("1.234",), numeric=True, **form)
    places = column.encode(["1234", "1.234,0", "1,234"]).features.argmax(1).tolist()
    assert places == [0, 0, 1]


def test_a_letter_and_its_accent_are_one_sign_however_they_are_stored():
    column = Column(kind="category", categories=("caf\u00e9",))
    assert column.encode(["cafe\u0301"]).features.tolist() == [[1, 0, 0]]
    assert canonical("Mu\u0308ller") == "M\u00fcller"
    words = Column(kind="text", buckets=64)
    assert (
        words.encode(["Mu\u0308ller"]).features.tolist()
        == words.encode(["m\u00fcller"]).features.tolist()
    )


def test_a_no_break_space_is_a_blank_in_categories_classes_and_ids():
    column = Column(kind="category", categories=("New York", "Ulm"))
    texts = ["New\u00a0York\u00a0", "\u3000New\u202fYork", "Ulm\u200b", "\ufeffUlm"]
    assert column.encode(texts).features.argmax(1).tolist() == [0, 0, 1, 1]
    assert canonical("not\u2009known") == "not known" and id_name("P\u00a07") == "P 7"
    assert column.encode(["New  York"]).features.argmax(1).tolist() == [2]


@pytest.mark.parametrize("name", ["Age", "age ", "A\u00a0G\u00a0E"])
def test_a_column_in_other_letters_or_blanks_is_suggested(tmp_path, name):
    path = tmp_path / "t.csv"
    path.write_text("AGE,y\n1,0\n", "utf-8")
    with pytest.raises(DatasetError, match="has no column .*; did you mean 'AGE'"):
        read_table(path, [name], Schema())
    path.write_text("\u00a0New\u00a0York\u00a0,y\n1,0\n", "utf-8")
    with pytest.raises(DatasetError, match=r"did you mean 'New\\xa0York'"):
        read_table(path, ["New York"], Schema())


def test_words_of_every_script_are_words():
    words = Column(kind="text", buckets=1 << 14)
    counts = {
        "Übelkeit": 1,
        "боль в груди": 3,
        "don’t": 1,
        "дон't": 1,
        "हिन्दी": 1,
        "胸痛": 2,
        "—": 0,
    }
    found = words.encode(list(counts)).features[:, :-1]
    assert (found != 0).sum(axis=1).tolist() == list(counts.values())
    assert words.meaning("naïve") and spell_words("pain at night") == "pain at night"


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"kind": "category", "categories": ("a", " a")}, "category ' a' stands twice"),
        (
            {"kind": "category", "categories": ("1", "1.0"), "numeric": True},
            "category '1.0' stands twice",
        ),
        ({"kind": "date", "bounds": (0.0, 1.0)}, "earliest, latest"),
        ({"kind": "date", "bounds": ("2021-01-01", "2020-01-01")}, "earliest, latest"),
        ({"kind": "pair", "bounds": (0, 1)}, r"\[least, greatest, least, greatest\]"),
        ({"kind": "flag", "measured_in": "mg"}, "measured_in is for kind = 'number'"),
        ({"kind": "number", "bounds": (0, 1), "format": "%Y"}, "format is for kind = 'date'"),
        ({"kind": "number", "bounds": (0, 1), "thousands": "_"}, "thousands must be"),
        ({"kind": "number", "bounds": (0, 1), "thousands": "."}, "not thousands"),
        ({"kind": "number", "bounds": (0, 1), "scale": "logg"}, "scale must be 'log'"),
        ({"kind": "flag", "scale": "log"}, "scale is for kind = 'number'"),
        ({"kind": "number", "bounds": (0, 1), "buckets": 8}, "buckets is for kind = 'category'"),
        ({"kind": "flag", "categories": ("a",)}, "categories is for kind = 'category'"),
        ({"kind": "category", "categories": ("a",), "bounds": (0, 1)}, "bounds is for kind"),
    ],
)
def test_a_wrong_column_is_one_clear_error(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_schema(Schema(columns={"a": Column(**keys)}), "s.toml")


@pytest.mark.parametrize(
    "keys, message",
    [
        ("header = false", "header = false and names"),
        ('names = ["a"]', "header = false and names"),
        ('header = false\nnames = ["a", "a"]', "two equal names"),
        ('encoding = "utf-7"', "encoding 'utf-7' is not known; choose utf-8, cp1252"),
        ('encoding = "klingon"', "encoding 'klingon' is not known"),
        ('thousands = ";"', "thousands must be"),
        ('decimal = ","\nthousands = ","', "decimal must be"),
        ('delimiter = ";;"', "delimiter must be one character, such as ';', got"),
        ("delimiter = '\"'", "delimiter must be one character"),
        ('delimiter = "\\n"', "delimiter must be one character"),
        ("max_records = 2", "max_records counts records of a unit; name it"),
    ],
)
def test_wrong_keys_of_a_csv_file_are_one_clear_error(tmp_path, keys, message):
    (tmp_path / "s.toml").write_text(keys, "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_schema(tmp_path / "s.toml")


def _texts(path, content, name, schema=None):
    path.write_bytes(content)
    return read_table(path, [name], schema or Schema()).columns[name].texts


@pytest.mark.parametrize(
    "file, content, keys, texts",
    [
        ("t.csv", b" a ,b\n1, 2\n", {}, ["1"]),
        ("t.csv", b"\xef\xbb\xbfa,b\r\n1,2\r\n", {}, ["1"]),
        ("t.csv", b"sep=;\na;b\n1;2\n", {}, ["1"]),
        ("t.csv", b'"x, y";a\n1;2\n', {}, ["2"]),
        ("t.csv", b",a,a b\n1,2,3\n", {}, ["2"]),
        ("t.csv", b"x,x,a\n1,2,3\n", {}, ["3"]),
        ("t.csv", b'x,"wrapped\nheading",a\n1,2,3\n', {}, ["3"]),
        ("t.csv", "x,a\nä,Müller\n".encode("cp1252"), {"encoding": "cp1252"}, ["Müller"]),
        ("t.csv", "größe,a\n1,ß\n".encode("utf-16"), {"encoding": "utf-16"}, ["ß"]),
        ("t.csv", "größe,a\n1,ß\n".encode("utf-16"), {}, ["ß"]),
        ("t.csv", b"2019,a\n1,2\n", {}, ["2"]),
        ("t.tsv", b"a\tb;c\n1\t2\n", {}, ["1"]),
        ("t.txt", b"b|a\n1|2\n", {}, ["2"]),
        ("t.data", b" 6  148\n 1   85\n", {"delimiter": " ", "header": False}, ["148", "85"]),
    ],
)
def test_dialects_are_read(tmp_path, file, content, keys, texts):
    if keys.get("header") is False:
        keys = {**keys, "names": ("b", "a")}
    assert _texts(tmp_path / file, content, "a", Schema(**keys)) == texts


def test_a_wrapped_heading_is_a_name_on_one_line(tmp_path):
    assert _texts(tmp_path / "t.csv", b'"blood\r\n pressure",a\n1,2\n', "blood pressure") == ["1"]


@pytest.mark.parametrize(
    "content, name, message",
    [
        (b"x,x,a\n1,2,3\n", "x", "two columns are named 'x'; rename one"),
        (b"a,,\n1,2,3\n", "", "has no column ''; known: a;"),
        (b"a,b,c\n1,2,3\n", "d", "has no column 'd'; known: a, b, c;"),
        (b"age,y\n1,2\n", "agee", r"has no column 'agee'; did you mean 'age'\?$"),
        (b'a,b,"c\n1,2,3\n4,5,6"\n', "a", "a quote that does not close"),
        ("größe,a\n1,2\n".encode("cp1252"), "a", "set encoding in the schema, such as 'cp1252'"),
        ("a,b\n".encode("utf-16-le"), "a", "set encoding in the schema"),
    ],
)
def test_a_header_that_cannot_be_used_is_named(tmp_path, content, name, message):
    with pytest.raises(DatasetError, match=message) as caught:
        _texts(tmp_path / "t.csv", content, name)
    assert "4" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "iso8859-15"])
def test_a_file_in_unicode_is_not_read_as_another_encoding(tmp_path, encoding):
    path, schema = tmp_path / "t.csv", Schema(encoding=encoding)
    with pytest.raises(DatasetError, match="its header is UTF-8 and not .* encoding = 'utf-8'"):
        _texts(path, "größe,a\n1,ß\n".encode(), "a", schema)
    for mark in ("utf-8-sig", "utf-16"):
        with pytest.raises(DatasetError, match="the mark of Unicode, so it is not"):
            _texts(path, "b,a\n1,ß\n".encode(mark), "a", schema)
    # A record decides nothing.
    assert _texts(path, "b,a\n1,ß\n".encode(), "a", schema)
    assert _texts(path, "größe,a\n1,ß\n".encode(encoding), "a", schema) == ["ß"]


@pytest.mark.parametrize(
    "line",
    [
        "63.0,1.0,145,0",
        "M,17.99,10.38",
        "2548.82,f,0,1,yes",
        "Smith,1980-05-01,yes",
        "male,yes,no",
        "p,x,s,n,p,p,p,n,n,n,p,n,p",
        "Private, 77516, Bachelors",
        "?,a,b",
        "<0.5,Smith",
        "Smith,1-Jan-80",
        "Smith,2020-01-02T03:04",
        "img_001.png,cat",
        "smith@example.org,cat",
        "123e4567-e89b-12d3-a456-426614174000,cat",
    ],
)
def test_a_first_record_is_no_header_and_is_not_repeated(tmp_path, line):
    path = tmp_path / "t.csv"
    path.write_text(f"{line}\n{line}\n", "utf-8")
    assert not look_like_names(line.split(","))
    last = line.split(",")[-1]
    for call in (
        lambda: empty_schema(path, "outcome", "", None),
        lambda: empty_schema(path, last, "", None),
        lambda: read_table(path, ["outcome"], Schema()),
    ):
        with pytest.raises(
            DatasetError, match="does not look like names.*header = false"
        ) as caught:
            call()
        assert line.split(",")[0] not in str(caught.value).replace(str(tmp_path), "")


def test_names_of_a_common_header_are_names():
    for line in (
        "id,age,sex,target",
        "y,x1,x2",
        "Sepal Length (cm),0x1,pixel 3",
        ",a,b",
        "eid,31-0.0",
    ):
        assert look_like_names(line.split(","))


@pytest.mark.parametrize(
    "name, seen",
    [
        ("phone", True),
        ("home_phone", True),
        ("PhoneNumber", True),
        ("street address", True),
        ("PhoneService", False),
        ("has_phone", False),
        ("microphone", False),
        ("account_age", False),
        ("MobilePlan", False),
        ("E-Mail", True),
        ("email2", True),
        ("patient_id", True),
        ("PatientID", True),
        ("patientid", True),
        ("pid", True),
        ("Nachname", True),
        ("ssn", True),
        ("last name", True),
        ("paid", False),
        ("USUBJID", True),
        ("f.eid", True),
        ("SEQN", True),
        ("PATIENT_NUM", True),
        ("ENCOUNTERID", True),
        ("Kunden-Nr", True),
        ("Patient", True),
        ("patient age", False),
        ("Prénom", True),
        ("visit number", False),
        ("case", False),
        ("Fallnummer", True),
        ("Unnamed: 0", True),
        ("__index_level_0__", True),
        ("gender_concept_id", False),
        ("number of members", False),
        ("body mass index", False),
        ("width", False),
        ("age", False),
    ],
)
def test_only_names_of_a_person_are_identifiers(name, seen):
    assert is_identifier(name) is seen


def test_a_template_says_what_it_leaves_out(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,,x,x,phone,PhoneService,y\n", "utf-8")
    text = empty_schema(path, "y", "", None)
    assert "# Left out, since named like a person's: 'id', 'phone'" in text
    assert "To keep one, set its kind and identifier = false" in text
    assert "'x', which stands twice, a column without a name" in text
    assert "[columns.x]" not in text and '[columns.""]' not in text
    assert read_header(path).delimiter == ","


def test_a_template_knows_the_encoding_of_its_header(tmp_path):
    path = tmp_path / "t.csv"
    for encoding in ("cp1252", "utf-16", "utf-8"):
        path.write_bytes("größe;y\n1;2\n".encode(encoding))
        text = empty_schema(path, "y", "", None)
        assert '# thousands = "."' in text
        assert "größe" in text and ('encoding = "cp1252"' in text) == (encoding == "cp1252")


def test_encodings_with_states_are_refused():
    assert all(map(is_known_encoding, ("utf-8", "cp1252", "latin-1", "utf-16", "gb18030")))
    assert not any(map(is_known_encoding, ("utf-7", "hz", "cp500", "rot13", "", "\0")))
    assert not any(map(is_known_encoding, ("unicode_escape", "raw_unicode_escape")))


def test_a_flag_with_two_zeros_is_a_flag():
    assert Column(kind="flag").encode(["1.00", "0.00"]).features[:, 0].tolist() == [1, -1]


DAYS = ("2000-01-01", "2030-01-01")


@pytest.mark.parametrize(
    "column, missing, unread",
    [
        (Column(kind="number", bounds=(0, 9)), ["NA", " ", "?"], ["3,5", "5 mg", "low", "12/8"]),
        (Column(kind="number", missing=("-9", "k.A.")), ["-9", "-9.0", "k.A.", ""], ["NA", "<1"]),
        (Column(kind="number", decimal=",", missing=("-9",)), ["-9,00", None], ["3.5", "n/a"]),
        (Column(kind="pair", bounds=(0, 9, 0, 9)), ["", "NA"], ["120", "120-80"]),
        (Column(kind="pair", bounds=(0, 9, 0, 9), missing=("9/9",)), ["9 / 9", "9.0/9"], ["9"]),
        (Column(kind="date", bounds=DAYS), ["NA"], ["31/12/2001", "May"]),
        (Column(kind="date", bounds=DAYS, missing=DAYS[:1]), ["2000-01-01 00:00:00"], ["2000"]),
        (
            Column(kind="date", format="%d.%m.%Y", bounds=DAYS, missing=("01.01.2000",)),
            ["1.1.2000", "2000-01-01"],
            ["1/1/2000"],
        ),
        (Column(kind="flag"), ["null"], ["maybe", "2"]),
        (Column(kind="category", categories=("a",)), ["NA"], []),
    ],
)
def test_text_that_is_not_of_its_columns_kind_is_told_from_a_missing_value(column, missing, unread):
    encoded = column.encode([*missing, *unread])
    assert encoded.is_missing.all()
    assert encoded.is_unread.tolist() == [False] * len(missing) + [True] * len(unread)


def test_a_listed_category_is_not_a_missing_value():
    column = Column(kind="category", categories=("None ", "mild"))
    assert column.encode(["None", "mild", "NA"]).is_missing.tolist() == [False, False, True]
    assert column.encode(["None"]).features.tolist() == [[1, 0, 0, 0]]
