"""Tables of Parquet and Feather as texts: the type of a column decides how its values are written.

No value decides it, so a text depends on its own record alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.parquet as pa_parquet

from dpkfc.app.datasets.errors import DatasetError, damaged_error
from dpkfc.app.owndata.cells import number_text
from dpkfc.app.owndata.decoding import Texts

# Records that are written as texts at once.
_ROWS = 1 << 16


def list_parts(folder: Path) -> dict[Path, dict[str, str | None]]:
    """Return the Parquet files below a folder, sorted, each with what its folders say (`day=3`).

    Files and folders whose names begin with a point or an underscore are left out.
    """
    parts = {}
    for path in sorted(folder.rglob("*.parquet")):
        inner = path.relative_to(folder).parts
        if any(name.startswith((".", "_")) for name in inner) or not path.is_file():
            continue
        values: dict[str, str | None] = {}
        for name in inner[:-1]:
            key, equals, value = name.partition("=")
            if equals:
                is_missing = value == _HIVE_NULL
                values[unquote(key)] = None if is_missing else unquote(value)
        parts[path] = values
    return parts


_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def read_schema(path: Path, file: IO[bytes]) -> pa.Schema:
    """Return names and types of the columns of an open file.

    Raises:
        DatasetError: the file is damaged.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return _open_parquet(file).schema_arrow
        return _open_arrow(file).schema
    except (pa.ArrowException, OSError):
        raise damaged_error(path, f"is not a {path.suffix[1:]} file") from None


def read_batches(
    path: Path, file: IO[bytes], names: Sequence[str], unit: str
) -> Iterator[tuple[dict[str, Texts], int]]:
    """Yield columns as texts, and the number of their records, a part of an open file at a time.

    Args:
        path: of the file.
        file: open.
        names: of columns that it has.
        unit: the column of ids, whose bytes always have a text.

    Raises:
        DatasetError: a type that cannot be read, or a damaged file.
    """
    try:
        for batch in _batches(path, file, names):
            columns = {}
            for name in names:
                column = batch.column(name)
                is_id = name == unit
                _check_type(path, name, column.type, is_id)
                decode = id_of_bytes if is_id else text_of_bytes
                columns[name] = stored_texts(column, decode)
            yield columns, batch.num_rows
    except (pa.ArrowException, OSError):
        raise damaged_error(path, f"is not a whole {path.suffix[1:]} file") from None


def _open_parquet(file: IO[bytes]) -> pa_parquet.ParquetFile:
    # As nanoseconds, times of type INT96 before 1677 or after 2262 would become others.
    return pa_parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")


def _open_arrow(file: IO[bytes], names: Sequence[str] | None = None) -> Any:
    """Return a reader of an Arrow file, or of a stream, as datasets of Hugging Face are."""
    file.seek(0)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    open_it = pa.ipc.open_file if is_file else pa.ipc.open_stream
    if names is None:
        return open_it(file)
    whole = open_it(file).schema
    file.seek(0)
    places = [whole.get_field_index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=places, use_threads=False)
    return open_it(file, options=options)


def _batches(path: Path, file: IO[bytes], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    if path.suffix.lower() == ".parquet":
        parquet = _open_parquet(file)
        yield from parquet.iter_batches(_ROWS, columns=list(names), use_threads=False)
        return
    reader = _open_arrow(file, names)
    if isinstance(reader, pa.ipc.RecordBatchStreamReader):
        yield from reader
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _check_type(path: Path, name: str, kind: pa.DataType, is_id: bool) -> None:
    has_no_ids = is_id and pa.types.is_null(kind)
    if has_no_ids or not is_readable(kind):
        other_way = "" if is_id else ", or leave it out"
        raise DatasetError(
            f"{path}: column {name!r} has the type {kind!s:.40}, which is not text or number; store"
            f" it as text{other_way}"
        )


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary, a run or an extension."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def name_kind(kind: pa.DataType) -> str:
    """Return "text", "number", "flag" or "date", as a type says."""
    kind = _plain_type(kind)
    if pa.types.is_boolean(kind):
        return "flag"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        return "date"
    return "number" if _is_one_of(kind, _IS_NUMBER) else "text"


def _is_one_of(kind: pa.DataType, tests: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    return any(test(kind) for test in tests)


_IS_NUMBER = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_duration,
)
_IS_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_IS_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def is_readable(kind: pa.DataType) -> bool:
    """Return whether values of a type have a form as text."""
    plain = _plain_type(kind)
    if name_kind(plain) != "text":
        return True
    return _is_one_of(plain, (*_IS_TEXT, *_IS_BYTES, pa.types.is_null))


def text_of_bytes(value: bytes) -> str | None:
    """Return bytes as text, None where they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def id_of_bytes(value: bytes) -> str:
    """Return the one text of an id: bytes that are not a text are written as digits."""
    text = text_of_bytes(value)
    # Spaces and ends of lines around an id do not belong to it.
    if text is not None and text.strip().isprintable():
        return text
    return value.hex()


def stored_texts(column: pa.Array, decode: Callable[[bytes], str | None] = text_of_bytes) -> Texts:
    """Return a column as texts, each from its own value and the type alone.

    Args:
        column: of a type that can be read.
        decode: returns bytes as text.
    """
    kind = column.type
    if isinstance(kind, pa.UuidType):
        # As programs write them.
        return [value and str(value) for value in column.to_pylist()]
    if isinstance(kind, pa.BaseExtensionType):
        return stored_texts(column.storage, decode)
    if pa.types.is_run_end_encoded(kind):
        return stored_texts(pa_compute.run_end_decode(column), decode)
    if pa.types.is_dictionary(kind):
        known = stored_texts(column.dictionary, decode)
        if isinstance(known, pa.Array):
            return known.take(column.indices)
        codes = column.indices.to_pylist()
        return [None if code is None else known[code] for code in codes]
    if any(is_kind(kind) for is_kind in (*_IS_TEXT, *_IS_BYTES)):
        return _decode(column, decode)
    for is_kind, write in _WRITERS.items():
        if is_kind(kind):
            return write(column)
    return column.cast(pa.string())


def _decode(column: pa.Array, decode: Callable[[bytes], str | None]) -> Texts:
    is_bytes = _is_one_of(column.type, _IS_BYTES)
    values = column if is_bytes else column.cast(pa.large_binary())
    if decode is text_of_bytes:
        try:
            return values.cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowException:
            # Some are not UTF-8.
            pass
    return [None if value is None else decode(value) for value in values.to_pylist()]


def _write_floats(column: pa.Array) -> pa.Array:
    """Return numbers as Python writes them; Arrow's texts differ for a few, which are replaced."""
    texts = column.cast(pa.string())
    # Missing ones, minus zero, and whole numbers from 1e10 on.
    is_odd = pa_compute.match_substring_regex(texts, "e|^nan$|^-0$").fill_null(False)
    odd = texts.filter(is_odd).to_pylist()
    written = [None if text == "nan" else number_text(float(text)) for text in odd]
    return pa_compute.replace_with_mask(texts, is_odd, pa.array(written, pa.string()))


def _write_decimals(column: pa.Array) -> list[str | None]:
    """Return decimal numbers without zeros at the end of their fraction."""
    values = column.to_pylist()
    return [None if value is None else _ZEROS.sub(r"\1", f"{value:f}") for value in values]


# How many zeros end a fraction follows from the finest value of a column where a program chose the
# type.
_ZEROS = re.compile(r"(\.[0-9]*[1-9])0+$|\.0+$")


def _write_moments(column: pa.Array) -> pa.Array:
    """Return ISO texts, with a Z where the type has a zone."""
    zone = ""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        zone = "Z"
        column = column.cast(pa.timestamp(kind.unit))
    exact = column.cast(pa.string())
    texts = pa_compute.replace_substring_regex(exact, _ZEROS.pattern, r"\1")
    return pa_compute.binary_join_element_wise(texts, zone, "")


def _write_durations(column: pa.Array) -> list[str | None]:
    """Return seconds."""
    units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    of_a_second = units[column.type.unit]
    counts = column.cast(pa.int64()).to_pylist()
    return [None if count is None else number_text(count / of_a_second) for count in counts]


_WRITERS: dict[Callable[[pa.DataType], bool], Callable[[pa.Array], Texts]] = {
    pa.types.is_floating: _write_floats,
    pa.types.is_decimal: _write_decimals,
    pa.types.is_timestamp: _write_moments,
    pa.types.is_time: _write_moments,
    pa.types.is_duration: _write_durations,
}
