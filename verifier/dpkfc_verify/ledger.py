"""Read the ledger of a run: one JSON object a line, each with the hash of the line before it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
_FORMAT = 1
# The end of every line, and a line of a release around what repeats from line to line.
_END = re.compile(rb',"hash":"([0-9a-f]{64})"\}\n')
_RELEASE = re.compile(rb'\{"release":(\d+),"step":\d+,(.*),"prev":"([0-9a-f]{64})"')


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
        bodies: what was released, without repetitions.
        places: index into `bodies` of each release.
    """

    header: dict[str, Any] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return the number of releases."""
        return len(self.places)

    def contains(self, count: Any, head: Any) -> bool:
        """Return whether the ledger had this head after `count` releases."""
        return type(count) is int and 0 <= count < len(self.heads) and self.heads[count] == head

    def releases(self, count: int | None = None) -> list[tuple[dict[str, Any], int]]:
        """Return the kinds of the first releases, by default of all, each with its number."""
        return [(self.bodies[i], n) for i, n in Counter(self.places[:count]).items()]

    @property
    def groups(self) -> int:
        """Return the number of groups of units that took turns, 1 where all units were drawn from.

        With correlated noise a unit takes part in at most one of so many consecutive steps.
        """
        stated = self.header.get("groups", 1)
        return stated if type(stated) is int and stated > 1 else 1

    def charges(self, count: int | None = None) -> list[tuple[dict[str, Any], int]]:
        """Return the events of the first releases, by default of all, and how often each counts."""
        kinds = self.releases(count)
        are_alike = sum(not body.get("purpose") for body, _ in kinds) == 1
        groups = self.groups if are_alike else 1
        return [(body["event"], n if body.get("purpose") else -(-n // groups)) for body, n in kinds]


def read_ledger(path: Path) -> Ledger:
    """Read a ledger; raise `Mismatch` where a line was changed, left out or put elsewhere."""
    ledger, known = Ledger(), dict[bytes, int]()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            content, head = _split(raw, number)
            if number == 1:
                ledger.header = _read_header(content)
            else:
                body = _follow(content, number, ledger.heads[-1])
                if body not in known:
                    known[body] = len(ledger.bodies)
                    ledger.bodies.append(_read_body(body, number))
                ledger.places.append(known[body])
            ledger.heads.append(head)
    if not ledger.heads:
        raise Mismatch("line 1 is damaged or cut short")
    return ledger


def _follow(content: bytes, number: int, earlier: str) -> bytes:
    """Return what a line releases; it must follow the one before it."""
    match = _RELEASE.fullmatch(content)
    if match is None:
        raise Mismatch(f"line {number} is not a release")
    if int(match[1]) != number - 1 or match[3].decode() != earlier:
        raise Mismatch(
            f"line {number} does not follow line {number - 1}: lines were cut out, "
            "renumbered or put in another order"
        )
    return match[2]


def _split(raw: bytes, number: int) -> tuple[bytes, str]:
    """Return a line without its hash, and the hash, which must be that of the line."""
    match = _END.fullmatch(raw, max(0, len(raw) - 76))
    if match is None:
        raise Mismatch(f"line {number} is damaged or cut short")
    content, head = raw[: match.start()], match[1].decode()
    if hashlib.sha256(content + b"}").hexdigest() != head:
        raise Mismatch(f"line {number} was changed: its hash does not fit")
    return content, head


def _read_header(content: bytes) -> dict[str, Any]:
    header = read_json(content + b"}")
    if header.get("format") != _FORMAT or not isinstance(header.get("plan_hash"), str):
        raise Unchecked(f"line 1 is not the beginning of a ledger of format {_FORMAT}")
    return header


def _read_body(body: bytes, number: int) -> dict[str, Any]:
    try:
        content = read_json(b"{" + body + b"}")
        noise, scale = float(content["noise_multiplier"]), float(content["sensitivity"])
        stated = {"event": _find_noise(content["event"])}
        stated["standard deviation"] = float(content["stddev"]) / scale
    except (*DAMAGE, ZeroDivisionError) as error:
        raise Mismatch(f"line {number} does not say what was released") from error
    for name, found in stated.items():
        if found is not None and not (noise >= 0 and math.isclose(found, noise, rel_tol=1e-9)):
            raise Mismatch(
                f"line {number} has noise of {noise:.6g} times the sensitivity, and its {name} "
                f"{found:.6g}"
            )
    return content


def _find_noise(event: Mapping[str, Any]) -> float | None:
    """Return the noise multiplier of an event of one release, None if it has several."""
    if "noise_multiplier" in event:
        return float(event["noise_multiplier"])
    return _find_noise(event["event"]) if "event" in event else None


def read_json(text: bytes | str) -> dict[str, Any]:
    """Return a JSON object, in which no name may occur twice; ValueError if it is not one."""

    def unite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    content = json.loads(text, object_pairs_hook=unite)
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content
