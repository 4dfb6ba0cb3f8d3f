"""Damaged and invented inputs, and the rule for what may come of one: it is taken, or refused in
one line that names the file.

The mutations are drawn from a seed, so a run can be repeated. Nothing here knows what an input
means; what does is in the tests.
"""

import base64
import json
import os
import pickle
import random
import re
import signal
import time
from contextlib import contextmanager

import torch

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.run_folder import RunFolderError
from dpkfc.app.toml import ConfigError
from dpkfc.checkpoint import CheckpointError
from dpkfc.privacy.budget import BudgetError
from dpkfc.privacy.calibration import CalibrationError
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.report.written_card import CardError

OWN = (
    BudgetError,
    CheckpointError,
    LedgerError,
    CardError,
    ConfigError,
    DatasetError,
    RunFolderError,
    CalibrationError,
    ValueError,
)
LIMIT_S = 60

NUMBERS = [
    *"0 -0 1 -1 2 255 256 65535 2147483648 4294967295".split(),
    *"9223372036854775807 -9223372036854775809 1e308 1e-308 1e999 -1e999".split(),
    *"0.1 1.5 NaN Infinity nan inf 1_0 0x10".split(),
    "9" * 400,
    "9" * 5000,
]
BITS = [
    b"\0",
    b"\xff",
    b"\n",
    b"\r",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\xc3\x28",
    b"\xed\xa0\x80",
]
ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1.5,
    -0.5,
    2**31,
    2**63,
    -(2**63),
    10**30,
    10**400,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "adam",
    "\ud800",
    "a\nb",
    "\0",
    "x" * 5000,
    "../..",
    "9" * 400,
    [],
    {},
    [[]],
    [None],
    {"": 0},
    {"type": "x"},
    [1, 2, 3],
    ["a", "b"],
    {"a": {"b": {"c": []}}},
]


def nested(depth, inside=None):
    """Lists inside lists."""
    for _ in range(depth):
        inside = [inside]
    return inside


class Mutator:
    """Changes of real inputs, drawn from a seed."""

    def __init__(self, seeds, seed=0):
        self.seeds, self.rng = list(seeds), random.Random(seed)

    def bytes(self):
        """One of the seeds with a few changes."""
        data = self.rng.choice(self.seeds)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3, 8))):
            data = self.rng.choice(_CHANGES)(self, data)
        return data

    def draw(self, count):
        return (self.bytes() for _ in range(count))

    def span(self, data):
        start = self.rng.randrange(len(data) + 1)
        return start, min(len(data), start + self.rng.choice((1, 1, 2, 4, 16, 64, 512)))

    def json(self, value):
        """A value of JSON with one part changed."""
        if isinstance(value, (dict, list)) and value and self.rng.random() < 0.85:
            items = dict(value) if isinstance(value, dict) else list(value)
            key = self.rng.choice(list(items) if isinstance(items, dict) else range(len(items)))
            act = self.rng.random()
            if act < 0.08:
                del items[key]
            elif act < 0.12 and isinstance(items, dict):
                items[self.rng.choice(("", "x", key.upper(), key + " "))] = items.pop(key)
            elif act < 0.16 and isinstance(items, list):
                items.insert(key, items[key])
            elif act < 0.3:
                items[key] = self.odd()
            else:
                items[key] = self.json(items[key])
            return items
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and self.rng.random() < 0.4
        ):
            return self.rng.choice((value + 1, -value, value * 10**6, str(value), 0.5, [value]))
        return self.odd()

    def odd(self):
        return (
            nested(self.rng.choice((3, 300, 3000)))
            if self.rng.random() < 0.02
            else self.rng.choice(ODD)
        )


def _flip(m, data):
    if not data:
        return b"\1"
    place = m.rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << m.rng.randrange(8)]) + data[place + 1 :]


def _set(m, data):
    place = m.rng.randrange(len(data) + 1)
    return data[:place] + m.rng.choice(BITS) + data[place + 1 :]


def _insert(m, data):
    place = m.rng.randrange(len(data) + 1)
    what = m.rng.choice(
        (
            m.rng.choice(BITS),
            m.rng.randbytes(m.rng.choice((1, 4, 40))),
            m.rng.choice((b"[", b'{"a":')) * 4000,
        )
    )
    return data[:place] + what + data[place:]


def _delete(m, data):
    start, end = m.span(data)
    return data[:start] + data[end:]


def _double(m, data):
    start, end = m.span(data)
    return data[:end] + data[start:]


def _cut(m, data):
    return data[: m.rng.randrange(len(data) + 1)]


def _splice(m, data):
    other = m.rng.choice(m.seeds)
    return data[: m.rng.randrange(len(data) + 1)] + other[m.rng.randrange(len(other) + 1) :]


def _lines(m, data):
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    i, j = m.rng.randrange(len(lines)), m.rng.randrange(len(lines))
    match m.rng.randrange(3):
        case 0:
            lines[i], lines[j] = lines[j], lines[i]
        case 1:
            del lines[i]
        case _:
            lines.insert(i, lines[j])
    return b"".join(lines)


def _number(m, data):
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", data[:20_000]))
    if not found:
        return _flip(m, data)
    place = m.rng.choice(found)
    return data[: place.start()] + m.rng.choice(NUMBERS).encode() + data[place.end() :]


def _word(m, data):
    found = list(re.finditer(rb'"[^"\n]*"|\w+', data[:20_000]))
    if not found:
        return _flip(m, data)
    place, other = m.rng.choice(found), m.rng.choice(found)
    what = m.rng.choice((b"true", b"null", b"[]", b"{}", b'""', b"''", b'"\\ud800"', other.group()))
    return data[: place.start()] + what + data[place.end() :]


def _field(m, data):
    """A binary number of two, four or eight bytes that is as small or as large as it can be."""
    width, place = m.rng.choice((2, 4, 8)), m.rng.randrange(len(data) + 1)
    value = m.rng.choice(
        (0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 2 ** (8 * width - 1) - 1)
    )
    return (
        data[:place]
        + value.to_bytes(width, m.rng.choice(("little", "big")))
        + data[place + width :]
    )


_CHANGES = [
    _flip,
    _set,
    _insert,
    _delete,
    _double,
    _cut,
    _splice,
    _lines,
    _number,
    _word,
    _field,
]


class Tally:
    """What came of the inputs of one target."""

    def __init__(self):
        self.taken = self.refused = 0
        self.wrong = {}
        self._started = time.perf_counter()

    @property
    def inputs(self):
        return self.taken + self.refused + sum(count for count, _ in self.wrong.values())

    def attempt(self, act, given, *names):
        """Let the product have one input. A refusal must be one of its own errors, in one line,
        with one of these names in it.
        """
        try:
            with _limit():
                act()
            self.taken += 1
        except Hangs:
            self.note("hangs", given)
        except Exception as error:
            text = str(error)
            if type(error) not in OWN:
                self.note(f"{type(error).__name__}: {text[:60]}", given)
            elif not text.strip() or "\n" in text:
                self.note(f"not one line: {type(error).__name__}: {text[:60]!r}", given)
            elif names and not any(name in text for name in names):
                self.note(f"names no file: {type(error).__name__}: {text[:60]}", given)
            else:
                self.refused += 1

    def read(self, path, contents, act):
        """Let the product read a file with each of these contents, which a refusal names."""
        for content in contents:
            path.write_bytes(content)
            self.attempt(act, content, path.name)

    def note(self, what, given):
        shown = (
            base64.b64encode(given[:1500]).decode()
            if isinstance(given, bytes)
            else repr(given)[:1500]
        )
        count, first = self.wrong.get(what, (0, shown))
        self.wrong[what] = (count + 1, first)

    def check(self, evidence, target, least):
        """Raise unless every input was taken or refused as it should be, some of them refused."""
        assert not self.wrong, json.dumps(self.wrong, indent=1)
        assert self.inputs >= least and self.refused
        evidence(
            "fuzz",
            target,
            inputs=self.inputs,
            taken=self.taken,
            refused=self.refused,
            seconds=self.seconds,
        )

    @property
    def seconds(self):
        return round(time.perf_counter() - self._started, 1)


def no_pickle(monkeypatch):
    """Whoever unpickles anything from here on fails."""

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    refusing = type("Unpickler", (pickle.Unpickler,), {"load": refuse})
    for owner, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle._Unpickler, "load"),
        (torch, "load"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refusing)


class Bomb:
    """Its pickle runs code when it is loaded: it ends the test run."""

    def __reduce__(self):
        return os._exit, (86,)


PICKLE = pickle.dumps(Bomb())


class Hangs(BaseException):
    """An input that takes a minute."""


@contextmanager
def _limit():
    def stop(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
