"""What is told of an arm: its best trial, and the tests of that trial's settings alone.

A search that goes on may come to another best trial; tests of the one before stay in the results and are told no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["best_trials", "winners_tests"]

Row = Mapping[str, Any]
Key = tuple[str, str]  # recipe, arm


def best_trials(rows: Iterable[Row]) -> dict[Key, Row]:
    """The full trial with the highest validation accuracy, by recipe and arm; of equals the one with most tests."""
    rows = list(rows)
    tests = [(_key(row), row["tag"].get("tuned")) for row in rows if _is_test(row)]
    found: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        tag = row.get("tag", {})
        if row["measured_on"] == "validation" and "params" in tag and not tag.get("pruned"):
            found[_key(row)].append(row)
    return {
        key: max(trials, key=lambda row: (row["accuracy"], tests.count((key, row["tag"]["params"]))))
        for key, trials in found.items()
    }


def winners_tests(rows: Iterable[Row]) -> list[Row]:
    """Runs on the test set with the settings of their arm's best trial; those of an arm without trials as they are."""
    rows = list(rows)
    best = best_trials(rows)

    def current(row: Row) -> bool:
        won = best.get(_key(row))
        return won is None or row["tag"].get("tuned", won["tag"]["params"]) == won["tag"]["params"]

    return [row for row in rows if _is_test(row) and current(row)]


def _is_test(row: Row) -> bool:
    return bool(row["measured_on"] == "test" and "arm" in row.get("tag", {}))


def _key(row: Row) -> Key:
    return row["run"]["recipe"], row["tag"].get("arm", "")
