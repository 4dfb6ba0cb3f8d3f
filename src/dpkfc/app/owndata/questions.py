"""Questions about a table whose answers are its public schema.

Proposals come from names and stored types; values are shown to the owner alone, and when asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from dpkfc.app.owndata.cells import PLAIN, NumberForm, read_number
from dpkfc.app.owndata.columns import Column
from dpkfc.app.owndata.display import MARK
from dpkfc.app.owndata.headers import Header, read_header
from dpkfc.app.owndata.kinds import KINDS
from dpkfc.app.owndata.names import is_free_text, is_identifier, words_of_name
from dpkfc.app.owndata.schema import Schema, check_schema
from dpkfc.app.owndata.tables import read_table
from dpkfc.app.toml import ConfigError
from dpkfc.terminal import print_line

T = TypeVar("T")
SHOW = "?"
_MOST_VALUES = 20
_BUCKETS = 32
_NUMBERS = frozenset(
    "age amount balance bmi cost count days dose duration gain height hours income length limit"
    " loss months number price rate ratio salary score size temperature weeks weight width years"
    " area perimeter depth carat pressure total charges tenure".split()
)
_DATES = frozenset("admitted birthday born date day discharged time timestamp".split())
INTRODUCTION = """\
A schema says what is public of each column. Answer from what you know without the file:
  number LEAST GREATEST     number alone: bounds are found for a part of ε
  category ONE|TWO|THREE    category 32: hashed to so many buckets
  date EARLIEST LATEST      as 2015-01-01; then, as %d.%m.%Y, how the file writes dates otherwise
  flag, text, ignore
  unit MOST                 ε protects what shares its value, with at most so many records a step
Enter takes the proposal, and ? shows values of the file to you alone."""


@dataclass(frozen=True)
class Answers:
    """Answers of a person, or of a file with one line for each question.

    Attributes:
        lines: of a file; None asks at the terminal.
    """

    lines: Iterator[str] | None = None

    @classmethod
    def choose(cls, path: Path | None) -> Answers:
        """Return the answers of a file, or of the terminal.

        Raises:
            ConfigError: the file cannot be read, or a terminal is missing.
        """
        if path is not None:
            try:
                return cls(iter(path.read_text("utf-8").splitlines()))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--answers {path} cannot be read ({error})") from None
        if not sys.stdin.isatty():
            raise ConfigError(
                "dpkfc try asks questions and needs a terminal: give --schema FILE --yes, or"
                " --answers FILE with a line for each question"
            )
        return cls()

    def ask(
        self,
        question: str,
        read: Callable[[str], T],
        proposal: str = "",
        show: Callable[[], str] | None = None,
    ) -> T:
        """Ask until an answer can be read; an answer of a file must be right at once.

        Args:
            question: for the person.
            read: maps an answer to its meaning, or raises `ConfigError`.
            proposal: what an empty answer means.
            show: what `?` shows; None where there is nothing to show.
        """
        text = f"{question} [{proposal}]: " if proposal else f"{question}: "
        while True:
            answer = self._next(text).strip() or proposal
            if answer == SHOW and show is not None:
                print_line(show())
                continue
            try:
                return read(answer)
            except ConfigError as error:
                if self.lines is not None:
                    raise
                print_line(str(error))

    def _next(self, text: str) -> str:
        if self.lines is None:
            try:
                return input(text)
            except EOFError:
                raise ConfigError("the questions were not answered; nothing was trained") from None
        answer = next(self.lines, None)
        if answer is None:
            raise ConfigError(
                f"the answers end before {text[:60]!r}; give a line for each question"
            )
        print_line(f"{text}{answer}")
        return answer


def ask_schema(data: Path, target: str, answers: Answers) -> Schema:
    """Ask for what a schema of a table needs, and return it checked.

    Args:
        data: the table; only its header is read, unless the person asks for values.
        target: column that is learned.
        answers: of the person.

    Raises:
        ConfigError: a wrong answer of a file, or answers that do not go together.
        DatasetError: the file cannot be read, or has no such column.
    """
    header = read_header(data)
    header.check(data, [target])
    print_line(INTRODUCTION)
    classes, bounds = answers.ask(
        f"{target}, which is learned: all classes as no|yes, or two bounds of a number as 0 60",
        read_target,
        show=partial(show_values, data, header, target),
    )
    columns = {}
    most = 0
    for name, stored in header.usable.items():
        if name == target:
            continue
        column, records = answers.ask(
            name,
            _reader(name),
            propose(name, stored),
            show=partial(show_values, data, header, name),
        )
        columns[name] = column
        most = records or most
    has_numbers = bounds or any(column.kind == "number" for column in columns.values())
    decimal, thousands = Schema.decimal, Schema.thousands
    if has_numbers and header.delimiter == ";":
        # Spreadsheets write semicolons where a comma is the decimal sign.
        question = (
            "decimal sign of the file, ',' or '.', and behind it a sign of thousands as in , ."
        )
        decimal, thousands = answers.ask(question, read_decimal, ",")
    schema = Schema(
        target=target,
        classes=classes,
        target_bounds=bounds,
        encoding=header.encoding,
        delimiter="" if header.delimiter == "," else header.delimiter,
        decimal=decimal,
        thousands=thousands,
        columns=columns,
        max_records=most or Schema.max_records,
    )
    return check_schema(schema, "the answers", may_be_open=True)


def propose(name: str, stored: str) -> str:
    """Return a proposal from the name of a column and its stored type."""
    words = words_of_name(name)
    if is_identifier(name):
        return "ignore"
    if stored in ("number", "flag"):
        return stored
    if is_free_text(name):
        return "text"
    if stored == "date" or words & _DATES:
        return "date"
    return "number" if words & _NUMBERS else f"category {_BUCKETS}"


def read_target(answer: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return classes, or the bounds of a number.

    Raises:
        ConfigError: neither.
    """
    if "|" in answer:
        return _names(answer), ()
    bounds = [read_number(word, PLAIN) for word in answer.split()]
    if len(bounds) != 2 or None in bounds:
        raise ConfigError(
            f"{answer!r:.40} is neither classes, as no|yes, nor two bounds of a number, as 0 60"
        )
    return (), _numbers(answer)


def read_decimal(answer: str) -> tuple[str, str]:
    """Return the sign before the fraction of a number, and the one between groups of digits.

    Raises:
        ConfigError: other signs, or one sign for both.
    """
    decimal, _, thousands = answer.partition(" ")
    thousands = " " if thousands.strip() == "blank" else thousands.strip()
    NumberForm(decimal, thousands).check("the answers")
    return decimal, thousands


def read_column(answer: str) -> tuple[Column, int]:
    """Return a column, and the most records of a unit, 0 for other kinds.

    Raises:
        ConfigError: an answer of another form.
    """
    kind, _, rest = answer.partition(" ")
    rest = rest.strip()
    if kind not in KINDS:
        raise ConfigError(f"{answer!r:.40} begins with no kind; take one of {', '.join(KINDS)}")
    if kind == "unit":
        return Column(kind=kind), _read_whole_number(rest, "unit 4") if rest else 4
    if kind == "category" and "|" not in rest:
        return Column(
            kind=kind, buckets=_read_whole_number(rest, "category 32, or category one|two")
        ), 0
    if kind == "category":
        return Column(kind=kind, categories=_names(rest)), 0
    if KINDS[kind].wanted_bounds:
        if kind == "date":
            first, last, form = [*rest.split(None, 2), "", "", ""][:3]
            return Column(kind=kind, bounds=tuple(filter(None, (first, last))), format=form), 0
        return Column(kind=kind, bounds=_numbers(rest)), 0
    if rest:
        raise ConfigError(f"{kind} stands alone, got {answer!r:.40}")
    return Column(kind=kind), 0


def _reader(name: str) -> Callable[[str], tuple[Column, int]]:
    def read(answer: str) -> tuple[Column, int]:
        column, most = read_column(answer)
        if column.width and is_identifier(name):
            # A person has looked at the name.
            column = replace(column, identifier=False)
        column.check(name, "the answers", may_be_open=True)
        return column, most

    return read


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split("|"))


def _numbers(text: str) -> tuple[float, ...]:
    numbers = [read_number(word, PLAIN) for word in text.split()]
    if None in numbers:
        raise ConfigError(f"{text!r:.40} are not numbers; give bounds as 0 110")
    return tuple(number for number in numbers if number is not None)


def _read_whole_number(text: str, example: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r:.40} is not a whole number; answer as in {example}")
    return int(text)


def show_values(data: Path, header: Header, name: str) -> str:
    """Return what a column holds, for its owner: the least and greatest number, or some texts.

    What is taken from it becomes public by its choice, which ε does not cover.
    """
    schema = Schema(target=name, encoding=header.encoding, delimiter=header.delimiter)
    texts = [text for text in read_table(data, [name], schema).columns[name].texts if text]
    # The decimal sign has not been asked yet: the one by which more texts are numbers.
    forms = PLAIN, replace(PLAIN, decimal=",")
    read = [[read_number(text, form) for text in texts] for form in forms]
    numbers = max([[x for x in found if x is not None] for found in read], key=len)
    if 2 * len(numbers) > len(texts):
        others = f", and {len(texts) - len(numbers)} other texts" * (len(numbers) < len(texts))
        found = f"{min(numbers):g} to {max(numbers):g}{others}"
    else:
        values = sorted(set(texts))
        more = f" and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
        found = "|".join(values[:_MOST_VALUES]) + more
    return f"{MARK}; ε does not cover what you copy from here: {found}"
