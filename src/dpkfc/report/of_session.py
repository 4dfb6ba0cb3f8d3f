"""The privacy card of a run of one's own: what a `Session` or a `PrivacyEngine` knows is taken from it, not written by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.checkpoint import file_digest
from dpkfc.privacy.ledger import Ledger
from dpkfc.report.card import CardFacts, build_card, dataset_size

__all__ = ["session_card"]


def session_card(
    session: Any,
    *,
    title: str,
    chosen_by: str,
    not_private: Mapping[str, str],
    results: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The card of a training, as plain values; `report.card.to_markdown` shows it to people.

    Releases, the head of the ledger, the device of the noise, the refreshes of the preconditioner and the number of units are
    those of the session; it may be closed.

    Args:
        session: a `Session`, or a `PrivacyEngine` that has made a model private.
        title: of the model.
        chosen_by: how hyper-parameters were chosen; ε does not cover it.
        not_private: figure to the reason why ε does not protect it: whatever you publish beside the weights.
        results: figures of the model, with what they were computed on.
        settings: hyper-parameters that the plan does not hold, such as the learning rate.
        weights: the file that is delivered; its digest goes into the card, and `dpkfc ledger verify` compares it.

    Raises:
        RuntimeError: an engine that has made nothing private.
        OSError: the weights cannot be read.
    """
    trained = getattr(session, "_private", session)  # an engine keeps what it trains there
    plan, ledger = trained.plan, trained.ledger
    file = None if weights is None else Path(weights)
    facts = CardFacts(
        title=title,
        releases=ledger.count,
        ledger={"file": _name_of(ledger), "releases": ledger.count, "head": ledger.head},
        assumed_public=dataset_size(plan),
        chosen_by=chosen_by,
        not_private=not_private,
        device=str(next(p.device for p in trained.model.parameters() if p.requires_grad)),
        results=results or {},
        refreshes=_refreshes(trained),
        settings={"gradients": trained.gradients, **(settings or {})},
        limited=ledger.max_releases is not None,
        weights={} if file is None else {"file": file.name, "sha256": file_digest(file)},
    )
    return build_card(plan, facts)


def _name_of(ledger: Ledger) -> str:
    return "in memory, gone with the process" if ledger.path is None else ledger.path.name


def _refreshes(trained: Any) -> list[dict[str, Any]]:
    """Steps before which the preconditioner was rebuilt, with the digest of the one in force."""
    current, steps = trained.preconditioner, list(trained._coordinates.refreshed)
    if current is None:
        return []
    if current.step not in steps:  # it came with a checkpoint
        steps.insert(0, current.step)
    rows: list[dict[str, Any]] = [{"step": step} for step in steps]
    rows[steps.index(current.step)] |= {"digest": current.digest, "scale": current.scale}
    if steps[0] > 0:
        rows[0]["note"] = f"refreshes before step {steps[0]} came before the checkpoint that was restored and are not listed"
    return rows
