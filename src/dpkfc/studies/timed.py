"""Ratios of step times beside a printed one: what `benchmarks/speed.py` has measured, and on what machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkfc.studies.errors import StudyError

__all__ = ["SHIPPED", "Timed", "read_speed", "timed"]

SHIPPED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "speed.json"  # of a checkout; a package has none


@dataclass(frozen=True)
class Timed:
    """A ratio of the times of two kinds of step, refreshes of curvature included, and where it was measured."""

    ratio: float
    where: str


def read_speed(path: Path | None) -> Mapping[str, Any]:
    """Results of `benchmarks/speed.py`; without a path those of the checkout, nothing where there is none.

    Raises:
        StudyError: the file is not there, or holds no such results.
    """
    if path is None and not SHIPPED.is_file():
        return {}
    path = path or SHIPPED
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StudyError(f"--speed {path} cannot be read ({error.strerror or error}); benchmarks/speed.py writes it") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("models"), dict):
        raise StudyError(f"--speed {path} holds no results of benchmarks/speed.py")
    return content


def timed(what: str, results: Mapping[str, Any]) -> Timed | None:
    """A ratio by its name, "MODEL: CONTENDER / CONTENDER"; None where it was not measured."""
    model, _, ratio = what.partition(": ")
    entry = results.get("models", {}).get(model, {})
    found = entry.get("paired", {}).get(ratio)
    value = found.get("ratio") if isinstance(found, Mapping) else found  # with quartiles, or of an older file without
    if value is None:
        return None
    own, every = entry.get("contenders", {}).get(ratio.partition(" / ")[0], {}), entry.get("setting", {}).get("every")
    amortised = bool(every) and "refresh_ms" in own
    value *= 1 + own["refresh_ms"] / every / own["median_ms"] if amortised else 1.0
    machine = entry.get("hardware", {})
    refreshed = f", curvature every {every} steps" if amortised else ""
    told = f"{entry['title']}, batches of {entry['batch_size']}{refreshed}, on {machine.get('cpu', 'an unknown processor')}, "
    return Timed(float(value), told + f"{machine.get('threads', '?')} threads, torch {machine.get('torch', '?')}")
