"""Write and read the lines of a ledger: JSON objects, each hashed with the hash of the line before.

Any change to a line, or between lines, shows; what is missing at the end does not. A line whose
hash fits is still looked at: it may have been written by another program.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from dpkfc.privacy.events import event_from_dict

Values = Mapping[str, Any]
FORMAT = 1
_START = b'{"format":'
_RESERVED = {"format", "plan_hash", "created", "dpkfc", "id", "prev", "hash"}
_UNKNOWN = "the privacy spent is unknown (docs/errors.md#ledger)"


class LedgerError(RuntimeError):
    """A ledger that cannot be read, written or trusted."""


@dataclass(frozen=True)
class Verified:
    """A ledger whose chain holds.

    Attributes:
        header: the first line.
        releases: the other lines, in order.
        heads: hash of every line; `heads[n]` is the head after n releases.
        size: bytes that these lines take.
    """

    header: dict[str, Any]
    releases: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    size: int = 0

    @property
    def id(self) -> str:
        """Return the name of this ledger, drawn at random when it was begun."""
        return str(self.header["id"])

    def contains(self, count: int, head: str) -> bool:
        """Return whether this history had `head` after `count` releases."""
        return 0 <= count < len(self.heads) and self.heads[count] == head

    @property
    def groups(self) -> int:
        """Return the number of groups that took turns, 1 where every step drew from all units.

        So many consecutive steps cost a unit one event.
        """
        stated = self.header.get("groups", 1)
        return stated if type(stated) is int and stated > 1 else 1

    @property
    def planned_extra(self) -> dict[str, int]:
        """Releases that the first line plans beside the steps, by purpose."""
        planned = self.header.get("extra")
        if not isinstance(planned, dict):
            return {}
        return {purpose: count for purpose, count in planned.items() if isinstance(count, int)}


def make_header(plan_hash: str, extra: Values | None) -> dict[str, Any]:
    """Return the first line: plan, time, version, a random name, and what `extra` says.

    Raises:
        ValueError: `extra` sets a key that the ledger writes itself.
    """
    extra = dict(extra or {})
    if reserved := _RESERVED & set(extra):
        raise ValueError(
            f"a header of a ledger may not set {sorted(reserved)}: the ledger writes these itself"
        )
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "format": FORMAT,
        "plan_hash": plan_hash,
        "created": created,
        "dpkfc": version("dpkfc"),
        # Two ledgers of one plan may begin in the same second; a budget must tell them apart.
        "id": uuid.uuid4().hex,
        "certified": None,
        "rng": None,
        **extra,
    }


def encode_line(content: Values) -> tuple[bytes, str]:
    """Return the bytes of a line and its hash, which covers the line and its predecessors."""
    head = hashlib.sha256(_canonical(content).encode("utf-8")).hexdigest()
    return (_canonical({**content, "hash": head}) + "\n").encode("utf-8"), head


def parse(content: bytes, name: str) -> Verified:
    """Return the lines of a ledger that is not empty.

    Raises:
        LedgerError: a line was changed, left out, damaged or cut short, or does not belong to a
            ledger; its number is named.
    """
    first, *rest = content.splitlines(keepends=True)
    where = f"line 1 of the ledger {name}"
    top = read_line(first, where)
    names = (top.get("plan_hash"), top.get("id"))
    are_words = all(isinstance(name, str) and name.isprintable() for name in names)
    if top.get("format") != FORMAT or not are_words:
        raise LedgerError(f"{where} is not a header of format {FORMAT}")
    state = Verified(top, [], [top["hash"]], len(content))
    for number, raw in enumerate(rest, start=2):
        where = f"line {number} of the ledger {name}"
        release = read_line(raw, where)
        is_next = release.get("release") == number - 1
        if not is_next or release.get("prev") != state.heads[-1]:
            raise LedgerError(
                f"{where} does not follow line {number - 1}: lines are missing or in another"
                f" order; {_UNKNOWN}"
            )
        _check_release(release, where)
        state.releases.append(release)
        state.heads.append(release["hash"])
    return state


def read_line(raw: bytes, where: str) -> dict[str, Any]:
    """Return one line as it was written.

    Raises:
        LedgerError: it was changed, is damaged or cut short.
    """
    if not raw.endswith(b"\n"):
        raise LedgerError(f"{where} is cut short")
    try:
        content = json.loads(raw)
        stated = content.pop("hash")
        # NaN, and brackets inside brackets without end, cannot be written again.
        written, head = encode_line(content)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{where} is damaged; {_UNKNOWN}") from error
    if head != stated or written != raw:
        raise LedgerError(f"{where} was changed: its hash does not fit; {_UNKNOWN}")
    return content | {"hash": stated}


def check_header(header: Values, wanted: Values, name: str) -> None:
    """Raise unless a ledger belongs to this run.

    Other fields of a header are in the hash of the plan, or have no consequence.

    Raises:
        LedgerError: another plan, kind of noise, or number of releases (None means no limit; a
            header need not state it).
    """
    if header["plan_hash"] != wanted["plan_hash"]:
        raise LedgerError(
            f"the ledger {name} belongs to the plan {header['plan_hash'][:12]}, this run to"
            f" {wanted['plan_hash'][:12]}; use another folder, or the settings of that run"
            " (docs/errors.md#ledger)"
        )
    for key in ("certified", "rng"):
        if header.get(key) != wanted[key]:
            raise LedgerError(
                f"the ledger {name} was begun with {key}={header.get(key)!r}, this run has"
                f" {wanted[key]!r}; use another folder"
            )
    limit = wanted.get("steps")
    if header.get("steps", limit) != limit:
        raise LedgerError(
            f"the ledger {name} was begun for {header['steps'] or 'unlimited'} releases, this run"
            f" is for {limit or 'unlimited'}; use another ledger_path, or the call of that run"
        )


def begins_a_ledger(content: bytes) -> bool:
    """Return whether this is a ledger, or the beginning of its first line."""
    return content.startswith(_START) or _START.startswith(content)


def is_complete(torn: bytes) -> bool:
    """Return whether the text is a whole object; a crash leaves only its beginning."""
    try:
        json.JSONDecoder().raw_decode(torn.decode("utf-8", errors="replace"))
    except ValueError:
        return False
    except RecursionError:
        pass  # no line of ours: left to the check
    return True


@functools.cache
def version(package: str) -> str:
    """Return the version of an installed package, found once a process."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _canonical(content: Values) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _check_release(line: Values, where: str) -> None:
    """Check that a line that follows says what was released."""
    names = ("step", "noise_multiplier", "stddev", "sensitivity")
    figures = [line.get(name, -1) for name in names]
    are_numbers = all(_is_number(x) and x >= 0 for x in figures)
    if not are_numbers or not isinstance(line["step"], int):
        raise LedgerError(
            f"{where} is not a release: step and scale of the noise are not numbers >= 0;"
            f" {_UNKNOWN}"
        )
    purpose = line.get("purpose", "step")
    if not isinstance(purpose, str) or not purpose.isidentifier():
        raise LedgerError(f"{where} is not a release: its purpose is not a word; {_UNKNOWN}")
    try:
        _check_event(_canonical({"event": line.get("event")}))
    except (ValueError, RecursionError) as error:
        raise LedgerError(
            f"{where} names no event that can be accounted for ({error}); {_UNKNOWN}"
        ) from error


@functools.lru_cache(maxsize=64)
def _check_event(text: str) -> None:
    """Raise unless this is an event; the lines of a ledger share a few of them.

    Raises:
        ValueError: it is not an event.
        RecursionError: it goes too deep.
    """
    event = json.loads(text)["event"]
    if not isinstance(event, dict) or not _has_numbers_alone(event):
        raise ValueError("it is not made of events and numbers")
    event_from_dict(event)


def _has_numbers_alone(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_has_numbers_alone(inner) for name, inner in value.items() if name != "type")
    return all(map(_has_numbers_alone, value)) if isinstance(value, list) else _is_number(value)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
