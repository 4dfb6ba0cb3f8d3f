"""What the runs of a study may have released, by their ledgers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import dp_accounting

from dpkfc.privacy import chain
from dpkfc.privacy.events import event_from_dict
from dpkfc.privacy.ledger import LedgerError, Verified
from dpkfc.studies.tuning_cost import composed

__all__ = ["Begun"]

_OTHER = {"add_or_remove_one": "replace_one", "replace_one": "add_or_remove_one"}


@dataclass(frozen=True)
class Begun:
    """Every run of a folder that has a ledger: finished, ended early or killed, at whatever ε it was begun.

    Attributes:
        runs: how many.
        releases: pairs of an event and how often it may have been released, over all runs.
        relations: neighbouring relations that their ledgers state.
        unread: ledgers of which nothing can be said, and why.
    """

    runs: int = 0
    releases: tuple[tuple[dp_accounting.DpEvent, int], ...] = ()
    relations: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Begun:
        """Of the folder that holds the run folders; it may be missing."""
        paths = sorted(folder.glob("*/ledger.jsonl"))
        counts: dict[str, int] = {}
        events: dict[str, dp_accounting.DpEvent] = {}
        relations, unread = set(), []
        for path in paths:
            try:
                found = _read(path)
                released = {} if found is None else _released(found)
                events |= {text: event_from_dict(json.loads(text)) for text in released.keys() - events.keys()}
            except (LedgerError, OSError, ValueError) as error:
                unread.append(" ".join(str(error).split()))
                continue
            if found is not None and "neighbouring_relation" in found.header:
                relations.add(str(found.header["neighbouring_relation"]))
            for text, count in released.items():
                counts[text] = counts.get(text, 0) + count
        releases = tuple((events[text], count) for text, count in counts.items())
        return cls(len(paths), releases, frozenset(relations), tuple(unread))

    def epsilon(self, delta: float, relation: str) -> float | None:
        """ε of all of them, one after the other, by RDP; None without a run, or where it cannot be told."""
        if not self.runs or self.unread or _OTHER[relation] in self.relations:
            return None
        if not self.releases:
            return 0.0
        try:
            return composed(self.releases, delta, relation)
        except ValueError:  # RDP knows each of the events, and not a composition of them
            return None


def _read(path: Path) -> Verified | None:
    """A ledger as its run would go on with it: without a last line that a kill cut short, whose release never left.

    Returns:
        None where the run was killed before its first line was written.

    Raises:
        LedgerError: a line before the end was changed, left out or damaged.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    whole = content + b"\n" if content[end:] and chain.is_complete(content[end:]) else content[:end]
    if not whole and chain.begins_a_ledger(content):
        return None
    return chain.parse(whole or content, f"{path.parent.name}/{path.name}")


def _released(found: Verified) -> dict[str, int]:
    """How often each event counts: as planned, since a run that was ended early was ended by what it showed.

    What is left of the plan counts as the last release did. A run without a release gave nothing away.
    """
    counts: dict[str, int] = {}
    event = ""
    for release in found.releases:
        event = json.dumps(release["event"], sort_keys=True)
        counts[event] = counts.get(event, 0) + 1
    planned = found.header.get("steps")
    if event and isinstance(planned, int):
        counts[event] += max(0, planned - len(found.releases))
    return counts
