"""Read the ledger of a run: one JSON object a line, each with the hash of the line before it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DAMAGE = OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError
# What tells apart releases beside the steps.
EXTRA = ("purpose", "noise_multiplier", "stddev", "sensitivity")
_FORMAT = 1
# The end of every line, and a line of a release around what repeats from line to line. The first
# one after a resumption has a random mark.
_END = re.compile(rb',"hash":"([0-9a-f]{64})"\}\n')
_MARK = rb'(?:"resumed":"[0-9a-f]{32}",)?'
_RELEASE = re.compile(rb'\{"release":(\d+),"step":\d+,' + _MARK + rb'(.*),"prev":"([0-9a-f]{64})"')


class Mismatch(Exception):
    """Something that contradicts the ledger, in one sentence."""


class Unchecked(Exception):
    """Something that cannot be checked, and why."""


@dataclass
class Ledger:
    """A ledger whose chain holds; one that was not read has no heads.

    Attributes:
        header: the first line.
        heads: hash of every line; `heads[n]` is the head after n releases.
        kinds: what was released, each kind once, with its number.
    """

    header: dict[str, Any] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    kinds: list[tuple[dict[str, Any], int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return the number of releases."""
        return len(self.heads) - 1

    def contains(self, count: Any, head: Any) -> bool:
        """Return whether the ledger had this head after `count` releases."""
        return type(count) is int and 0 <= count <= self.count and self.heads[count] == head

    @property
    def steps(self) -> list[tuple[dict[str, Any], int]]:
        """Return the kinds of the steps of training."""
        return [(body, n) for body, n in self.kinds if not body.get("purpose")]

    @property
    def extra(self) -> dict[tuple[Any, ...], list[tuple[dict[str, Any], int]]]:
        """Return the events of releases beside the steps, each with its number, by kind."""
        found: dict[tuple[Any, ...], list[tuple[dict[str, Any], int]]] = {}
        for body, number in self.kinds:
            if body.get("purpose"):
                kind = tuple(body[name] for name in EXTRA)
                found.setdefault(kind, []).append((body["event"], number))
        return found

    @property
    def groups(self) -> int:
        """Return the number of groups of units that took turns, 1 where all units were drawn from.

        With correlated noise a unit takes part in at most one of so many consecutive steps.
        """
        stated = self.header.get("groups", 1)
        return stated if type(stated) is int and stated > 1 else 1

    def charges(self) -> list[tuple[dict[str, Any], int]]:
        """Return the events of all releases, and how often each counts for one unit."""
        groups = self.groups if len(self.steps) == 1 else 1
        return [(x["event"], n if x.get("purpose") else -(-n // groups)) for x, n in self.kinds]


def read_ledger(path: Path) -> Ledger:
    """Read a ledger; raise `Mismatch` where a line was changed, left out or put elsewhere."""
    bodies, numbers = dict[bytes, dict[str, Any]](), Counter[bytes]()
    with path.open("rb") as file:
        content, head = _split(file.readline(), 1)
        header = json.loads(content + b"}")
        if header.get("format") != _FORMAT or not isinstance(header.get("plan_hash"), str):
            raise Unchecked(f"line 1 is not the beginning of a ledger of format {_FORMAT}")
        ledger = Ledger(header, [head])
        for number, raw in enumerate(file, start=2):
            content, head = _split(raw, number)
            body = _follow(content, number, ledger.heads[-1])
            if body not in bodies:
                bodies[body] = _read_body(body, number)
            numbers[body] += 1
            ledger.heads.append(head)
    ledger.kinds = [(bodies[body], number) for body, number in numbers.items()]
    return ledger


def _split(raw: bytes, number: int) -> tuple[bytes, str]:
    """Return a line without its hash, and the hash, which must be that of the line."""
    match = _END.fullmatch(raw, max(0, len(raw) - 76))
    if match is None:
        raise Mismatch(f"line {number} is damaged or cut short")
    content, head = raw[: match.start()], match[1].decode()
    if hashlib.sha256(content + b"}").hexdigest() != head:
        raise Mismatch(f"line {number} was changed: its hash does not fit")
    return content, head


def _follow(content: bytes, number: int, earlier: str) -> bytes:
    """Return what a line releases; it must follow the one before it."""
    match = _RELEASE.fullmatch(content)
    if match is None or int(match[1]) != number - 1 or match[3].decode() != earlier:
        text = f"line {number} does not follow line {number - 1}"
        raise Mismatch(f"{text}: lines were cut out, renumbered or put in another order")
    return match[2]


def _read_body(body: bytes, number: int) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(b"{" + body + b"}")
        event, noise = content["event"], content["noise_multiplier"]
        while "event" in event:
            event = event["event"]
        # Several events have no noise of their own.
        found = {"event": event.get("noise_multiplier", noise)}
        found["standard deviation"] = content["stddev"] / content["sensitivity"]
        for name, figure in found.items():
            if not (noise >= 0 and math.isclose(figure, noise)):
                text = f"line {number} has noise of {noise:.6g} times the sensitivity"
                raise Mismatch(f"{text}, and its {name} {figure:.6g}")
    except DAMAGE as error:
        raise Mismatch(f"line {number} does not say what was released") from error
    return content
