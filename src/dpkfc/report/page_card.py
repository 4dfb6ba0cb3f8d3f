"""The privacy card of a run as HTML: its warnings first, and every figure that ε does not protect marked as such."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpkfc.report.audited import audit_rows, audited, failed_checks
from dpkfc.report.page_text import epsilon_text, escaped, show

__all__ = ["card_html", "definition_table", "not_protected"]

_CAPTIONS = {"divisor": "divisor (expected batch size)", "stddev": "standard deviation on the sum"}
_CAPTIONS |= {"max_grad_norm": "clipping bound C", "noise_multiplier": "noise multiplier σ"}
_CAPTIONS |= {"sensitivity": "sensitivity of the sum", "delta": "δ"}

# Keys that have a place of their own; whatever else a card says is shown as it stands.
_GUARANTEE = {"certified", "epsilon", "delta", "target_epsilon", "unit", "neighbouring_relation", "releases", "planned_steps"}
_GUARANTEE |= {"planned_releases", "epsilon_by", "epsilon_for_others", "neighbours_differ_in"}
_ELSEWHERE = {"event", "certified", "caveats", "epsilon", "target_epsilon", "epsilon_for_others", "against", "delta", "releases"}
_ELSEWHERE |= {"plan_hash"}
_PARTS = {"format", "title", "stamp", "caveats", "guarantee", "mechanism", "accounting", "curvature", "assumed_public", "ledger"}
_PARTS |= {"hyper_parameters", "not_private", "results", "public_seeds", "plan_hash", "software", "audit", "weights"}


def not_protected(text: str = "not protected by ε") -> str:
    """The mark of a figure that is outside the guarantee."""
    return f'<span class="badge warn">{escaped(text)}</span>'


def card_html(card: Mapping[str, Any], *, level: int = 4) -> str:
    """The card; parts that an older version did not write are left out.

    Args:
        card: as read from JSON; nothing in it is trusted.
        level: of its headings.
    """
    parts = [_statement(card), _section("Guarantee", _guarantee(card), level)]
    parts.append(_section("Mechanism", _rows(card.get("mechanism"), _ELSEWHERE), level))
    parts.append(_curvature(card, level) if "curvature" in card else "")
    parts.append(_section("Taken as public", _public(card.get("assumed_public")), level, ("setting", "value", "why")))
    parts.append(_section("Hyper-parameters", _rows(card.get("hyper_parameters")), level))
    results = _rows(card.get("results"))
    parts.append(_section("Results", results, level, mark=not_protected()))
    parts.append(_audit(card.get("audit"), level))
    hidden = [(name, show(why)) for name, why in _mapping(card.get("not_private")).items()]
    parts.append(_section("Figures that ε does NOT protect", hidden, level, ("figure", "why"), mark=not_protected("not private")))
    rest = [("plan", show(card.get("plan_hash")))] + [(f"ledger, {k}", v) for k, v in _rows(card.get("ledger"))]
    rest += [(f"weights, {k}", v) for k, v in _rows(card.get("weights"))]
    rest += [(f"public seed, {k}", v) for k, v in _rows(card.get("public_seeds"))] + _rows(card.get("software"))
    rest = [*_rows(card, _PARTS), *rest]
    parts.append(_section("Provenance", rest, level))
    return "\n".join(part for part in parts if part)


def _public(found: Any) -> list[tuple[str, str, str]]:
    """Setting, value and reason; a card of federated training gives the reason alone."""
    rows = []
    for name, entry in _mapping(found).items():
        both = entry if isinstance(entry, Mapping) else {"why": entry}
        rows.append((show(name), show(both.get("value")), show(both.get("why"))))
    return rows


def _statement(card: Mapping[str, Any]) -> str:
    promise = _mapping(card.get("guarantee"))
    caveats = [show(text) for text in card.get("caveats") or () if text] if isinstance(card.get("caveats"), list) else []
    if failed := failed_checks(card.get("audit")):
        said = f"<strong>AUDIT FAILED: {escaped(', '.join(failed), 300)}</strong> Do not rely on what this card states."
        return f'<div class="alarm" role="note">{said}</div>'
    if card.get("stamp") or promise.get("certified") is not True or caveats:
        items = "".join(f"<li>{escaped(text)}</li>" for text in caveats)
        stamp = escaped(card.get("stamp") or "UNCERTIFIED", 80)
        said = f"<strong>{stamp}</strong> There is no certified guarantee for this model."
        return f'<div class="alarm" role="note">{said}<ul>{items}</ul></div>'
    spent = f"(ε = {epsilon_text(promise.get('epsilon'), 4)}, δ = {show(promise.get('delta'))})"
    unit, differ = escaped(show(promise.get("unit")), 60), escaped(show(promise.get("neighbours_differ_in")), 120)
    against = f" This holds against {escaped(promise['against'], 300)}." if promise.get("against") else ""
    return (
        f'<p class="promise">The released weights are <strong>{escaped(spent)}-differentially private</strong> for {unit}: '
        f"neighbouring data sets differ in {differ}.{against}</p>"
    )


def _guarantee(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    promise, accounting = _mapping(card.get("guarantee")), _mapping(card.get("accounting"))
    beside = _mapping(accounting.get("epsilon_by") or promise.get("epsilon_by"))
    by = [f"{name.upper()}: {epsilon_text(value, 4)}" for name, value in beside.items()]
    others = _mapping(promise.get("epsilon_for_others"))
    planned = promise.get("planned_steps", promise.get("planned_releases"))
    rows = [
        ("ε spent", epsilon_text(promise.get("epsilon"), 4)),
        ("ε of the budget", show(promise.get("target_epsilon"))),
        ("δ", show(promise.get("delta"))),
        ("privacy unit", show(promise.get("unit"))),
        ("neighbouring relation", show(promise.get("neighbouring_relation")).replace("_", " ")),
        *((f"ε for {show(who)}", epsilon_text(value, 4)) for who, value in others.items()),
        *_rows(promise, _GUARANTEE),
        ("releases", show(promise.get("releases")) + (f" of {show(planned)} planned" if planned else ", without a limit")),
        ("accountant", f"{show(accounting.get('accountant')).upper()} of {show(accounting.get('library'))}"),
        ("ε by each accountant", ", ".join(by) or "–"),
        ("certified", "yes" if promise.get("certified") is True else "NO"),
    ]
    return [row for row in rows if row[1].strip("– of") or row[0] == "certified"]


def _curvature(card: Mapping[str, Any], level: int) -> str:
    found = card.get("curvature")
    if not isinstance(found, Mapping):
        return _section("Curvature", [("preconditioner", "none")], level)
    private = found.get("uses_private_data")
    rows = _rows(found, {"refreshes", "uses_private_data", "layer_rules", "loss", "curvature_source"})
    refreshes = found.get("refreshes")
    count = len(refreshes) if isinstance(refreshes, list) else 0
    rows = [("uses private data", "yes: NOT PRIVATE" if private else "no"), *rows, ("refreshes", f"{count:,}")]
    return _section("Curvature", rows, level)


def _audit(audit: Any, level: int) -> str:
    """What `dpkfc audit` found, where it was asked."""
    section = _section("Audit", audit_rows(audit), level, ("check", "measured", "allowed", "verdict", "how"))
    return section.replace('<div class="scroll"', f'<p>{escaped(audited(audit))}</p><div class="scroll"', 1)


def _rows(found: Any, leave_out: Iterable[str] = ()) -> list[tuple[str, str]]:
    hidden = {*leave_out}
    items = [(name, value) for name, value in _mapping(found).items() if name not in hidden and value not in (None, [], "")]
    return [(_CAPTIONS.get(name, str(name).replace("_", " ")), show(value)) for name, value in items]


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _section(title: str, rows: Sequence[Sequence[str]], level: int, header: Sequence[str] = (), mark: str = "") -> str:
    if not rows:
        return ""
    heading = f"<h{level}>{escaped(title)} {mark}</h{level}>"
    return f"<section>{heading}{definition_table(rows, header)}</section>"


def definition_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table whose first column names the rows; every text is escaped here."""
    head = "".join(f'<th scope="col">{escaped(text)}</th>' for text in header)
    lines = [
        f'<tr><th scope="row">{escaped(row[0])}</th>' + "".join(f"<td>{escaped(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    ]
    top = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f'<div class="scroll" tabindex="0"><table class="plain">{top}<tbody>{"".join(lines)}</tbody></table></div>'
