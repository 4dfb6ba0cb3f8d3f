"""The lines of a ledger: one JSON object each, hashed together with the hash of the line before.

Any change to a line, or between lines, shows; what is missing at the end does not. A line whose hash fits is still looked at:
it may have been written by another program.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from dpkfc.privacy.events import event_from_dict

__all__ = [
    "LedgerError", "Verified", "begins_a_ledger", "certified_before", "check_header", "header", "is_complete", "line", "parse",
    "record", "version",
]  # fmt: skip

FORMAT = 1
_START = b'{"format":'
_RESERVED = {"format", "plan_hash", "created", "dpkfc", "prev", "hash"}
_UNKNOWN = "the privacy spent is unknown"


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


def header(plan_hash: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The first line: plan, time, the version that wrote it, and what `extra` says.

    Raises:
        ValueError: `extra` sets a key that the ledger writes itself.
    """
    extra = dict(extra or {})
    if taken := _RESERVED & set(extra):
        raise ValueError(f"a header of a ledger may not set {sorted(taken)}: the ledger writes these itself")
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    own = {"format": FORMAT, "plan_hash": plan_hash, "created": created, "dpkfc": version()}
    return {**own, "certified": None, "rng": None, **extra}


def line(content: Mapping[str, Any]) -> tuple[bytes, str]:
    """The bytes of a line and its hash, which covers all of it and, through "prev", all lines before."""
    head = hashlib.sha256(_canonical(content).encode("utf-8")).hexdigest()
    return (_canonical({**content, "hash": head}) + "\n").encode("utf-8"), head


def parse(content: bytes, name: str) -> Verified:
    """The lines of a ledger that is not empty.

    Raises:
        LedgerError: a line was changed, left out, damaged, cut short or is none of a ledger; its number is named.
    """
    first, *rest = content.splitlines(keepends=True)
    where = f"line 1 of the ledger {name}"
    top = record(first, where)
    plan = top.get("plan_hash")
    if top.get("format") != FORMAT or not isinstance(plan, str) or not plan.isprintable():
        raise LedgerError(f"{where} is not a header of format {FORMAT}")
    state = Verified(top, [], [top["hash"]], len(content))
    for number, raw in enumerate(rest, start=2):
        where = f"line {number} of the ledger {name}"
        found = record(raw, where)
        if found.get("prev") != state.heads[-1] or found.get("release") != number - 1:
            raise LedgerError(
                f"{where} does not follow line {number - 1}: lines are missing or in another order; {_UNKNOWN}"
            )
        _check_release(found, where)
        state.releases.append(found)
        state.heads.append(found["hash"])
    return state


def record(raw: bytes, where: str) -> dict[str, Any]:
    """One line as it was written.

    Raises:
        LedgerError: it was changed, is damaged or cut short.
    """
    if not raw.endswith(b"\n"):
        raise LedgerError(f"{where} is cut short")
    try:
        found = json.loads(raw)
        stated = found.pop("hash")
        written, head = line(found)  # not a number, and brackets inside brackets without end, cannot be written again
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{where} is damaged; {_UNKNOWN}") from error
    if head != stated or written != raw:
        raise LedgerError(f"{where} was changed: its hash does not fit; {_UNKNOWN}")
    return found | {"hash": stated}


def check_header(found: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raise unless a ledger belongs to this run. What else a header says is in the hash of the plan, or of no consequence.

    Raises:
        LedgerError: another plan, or another kind of noise.
    """
    if found["plan_hash"] != wanted["plan_hash"]:
        raise LedgerError(
            f"the ledger {name} belongs to the plan {found['plan_hash']}, this run to the plan {wanted['plan_hash']}; "
            "use another folder, or the settings the run was begun with"
        )
    for key in ("certified", "rng"):
        if found.get(key) != wanted[key] and not (key == "certified" and certified_before(found, wanted)):
            raise LedgerError(
                f"the ledger {name} was begun with {key}={found.get(key)!r}, this run has {wanted[key]!r}; "
                "use another folder"
            )


def certified_before(found: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a ledger was begun as certified when a δ of 1 / N or more was only warned of; its first line held no δ then."""
    vacuous = "delta" in now and now["delta"] * now["dataset_size"] >= 1
    return vacuous and found.get("certified") is True and "delta" not in found


def begins_a_ledger(content: bytes) -> bool:
    """Whether this is a ledger, or the beginning of its first line."""
    return content.startswith(_START) or _START.startswith(content)


def is_complete(torn: bytes) -> bool:
    """Whether a whole object stands here; the beginning of a line, which a crash leaves, is none."""
    try:
        json.JSONDecoder().raw_decode(torn.decode("utf-8", errors="replace"))
    except ValueError:
        return False
    except RecursionError:
        pass  # no line of ours: left to the check
    return True


@functools.cache
def version() -> str:
    """The version of this package, as it is installed."""
    try:
        return metadata.version("dpkfc")
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _check_release(found: Mapping[str, Any], where: str) -> None:
    """Raise unless a line that follows says what was released."""
    figures = [found.get(name) for name in ("step", "noise_multiplier", "stddev", "sensitivity")]
    if not all(_is_number(x) and float(x or 0) >= 0 for x in figures) or not isinstance(figures[0], int):
        raise LedgerError(f"{where} is no release: step and scale of the noise are not numbers >= 0; {_UNKNOWN}")
    try:
        _check_event(_canonical({"event": found.get("event")}))
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{where} names no event that can be accounted for ({error}); {_UNKNOWN}") from error


@functools.lru_cache(maxsize=64)
def _check_event(text: str) -> None:
    """Raise unless this is an event; the lines of a ledger share a few of them.

    Raises:
        ValueError: it is none.
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
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
