"""Write the certificate of a run: one page to sign, an annex, and what `dpkfc-verify` reads.

The page is made of the card after card, ledger and weights were compared. Its fingerprint, in words
and as a QR code, is the hash of the head of the ledger and of the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpkfc.checkpoint import file_digest, place_file
from dpkfc.privacy.ledger import verify
from dpkfc.report.audit_section import audit_rows, failed_checks
from dpkfc.report.card_files import CARD, LEDGER, to_json
from dpkfc.report.officer import check_line, describe_noun, is_promised, meaning_lines
from dpkfc.report.text import number, round_up
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import CardError, require_card

FORMAT = 1
# A part of a page, of reportlab, which is optional.
Flowable = Any
_EMPTY = "................................................................................"
_FIELDS = {
    "owner": "Made by",
    "controller": "Controller",
    "contact": "Contact",
    "purpose": "Purpose",
    "data_subjects": "People",
    "legal_basis": "Legal basis",
    "retention": "Kept until",
}
# Upper ends of the zones of Ponomareva et al. 2023, "How to DP-fy ML", section 5.2.
_ZONES = ((1.0, "#2b7a4b", "strong"), (10.0, "#c99a2e", "reasonable"), (100.0, "#b04a3a", "weak"))
_LEAST = 0.1
_WIDTH = 172  # of the text, in mm
_NOT_COVERED = (
    "What holds for the whole group, with or without one person: “smokers fall ill more often”.",
    "The training data where they are stored, and the training itself.",
    "Other models and figures from the same data, unless the total above counts them.",
)


def certify(run: Path, out: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Write the certificate of a run as a PDF, and as JSON beside it.

    Args:
        run: folder with ledger, card and weights.
        out: the PDF; the JSON has its name with another ending.
        given: fields of the page that the card lacks, or other values for them.

    Returns:
        What the JSON holds.

    Raises:
        CardError: the card or the weights are missing, the card disagrees with ledger or weights,
            or states no certified guarantee to sign.
        ValueError: a field that is not one short line, or `out` does not end in .pdf.
        ImportError: reportlab is not installed.
    """
    if out.suffix.lower() != ".pdf":
        raise ValueError(f"a certificate is a PDF, got {out}; give --out FILE.pdf")
    if find_spec("reportlab") is None:
        raise ImportError("a certificate needs reportlab: pip install 'dpkfc[certificate]'")
    for name, value in given.items():
        check_line(name, value)
    card = require_card(run)
    compared = verify_ledger(run / LEDGER)["weights"]
    content = card.content
    if not is_promised(content) or failed_checks(content.get("audit")):
        reason = content.get("stamp") or "its audit failed"
        raise CardError(
            f"{run} has no guarantee to certify ({reason}): train with a certified plan"
        )
    if compared.startswith("not compared"):
        raise CardError(f"the weights of {run} were {compared}; put back the released file")
    ledger = verify(run / LEDGER)
    if card.releases != len(ledger.releases):
        raise CardError(f"{run / CARD} was written before the last release; write it anew")
    weights = {"file": "", "sha256": "", **(content.get("weights") or {})}
    head = ledger.heads[-1]
    certificate = {
        "certificate": FORMAT,
        "title": content["title"],
        "declared": {**(content.get("declared") or {}), **given},
        "guarantee": content["guarantee"],
        "meaning": content["meaning"],
        "total": content.get("total"),
        "ledger": {"id": ledger.id, "releases": card.releases, "head": head},
        "plan_hash": content["plan_hash"],
        "weights": weights,
        "card": file_digest(run / CARD),
        "fingerprint": fingerprint(head, weights["sha256"]),
    }
    place_file(out, lambda part: _draw(part, certificate, content))
    text = to_json(certificate)
    place_file(out.with_suffix(".json"), lambda part: part.write_text(text, "utf-8"))
    return certificate


def fingerprint(head: str, weights: str) -> str:
    """Return the hash of the head of a ledger and of the weights, which a certificate shows."""
    return hashlib.sha256(f"{head}\n{weights}\n".encode()).hexdigest()


# -- the page --------------------------------------------------------------------------------------


def _draw(path: Path, certificate: Mapping[str, Any], card: Mapping[str, Any]) -> None:
    from reportlab.lib.units import mm
    from reportlab.platypus import KeepInFrame, PageBreak, SimpleDocTemplate

    _register_fonts()
    margin = 17 * mm
    document = SimpleDocTemplate(
        str(path),
        leftMargin=margin,
        rightMargin=margin,
        topMargin=13 * mm,
        bottomMargin=12 * mm,
        title=f"Certificate of differential privacy: {certificate['title']}",
        invariant=1,
    )
    # Long texts make everything smaller: this page is one page.
    front = KeepInFrame(document.width - 12, document.height - 12, _front(certificate, card))
    document.build([front, PageBreak(), *_annex(certificate, card)])


def _register_fonts() -> None:
    """Take the fonts of matplotlib, which have Greek letters."""
    import matplotlib
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name in ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono"):
        pdfmetrics.registerFont(TTFont(name, str(folder / f"{name}.ttf")))
    pdfmetrics.registerFontFamily("DejaVuSans", normal="DejaVuSans", bold="DejaVuSans-Bold")


def _paragraph(text: str, size: float = 8.6, font: str = "DejaVuSans", **style: Any) -> Flowable:
    from reportlab.lib.styles import ParagraphStyle
    from reportlab.platypus import Paragraph

    layout = ParagraphStyle("text", fontName=font, fontSize=size, leading=1.3 * size, **style)
    return Paragraph(text, layout)


def _heading(text: str) -> Flowable:
    return _paragraph(text, 10, "DejaVuSans-Bold", spaceBefore=7, spaceAfter=2, textColor="#1f3b57")


def _rows(rows: Sequence[tuple[str, str]], size: float = 8.6, wide: float = 0.76) -> Flowable:
    from reportlab.lib.units import mm
    from reportlab.platypus import Table

    width = _WIDTH * mm
    cells = []
    for name, value in rows:
        cells.append([_paragraph(f"<b>{name}</b>", size), _paragraph(value, size)])
    return Table(
        cells,
        colWidths=[(1 - wide) * width, wide * width],
        hAlign="LEFT",
        style=[
            ("VALIGN", (0, 0), (-1, -1), "TOP"),
            ("TOPPADDING", (0, 0), (-1, -1), 1.2),
            ("BOTTOMPADDING", (0, 0), (-1, -1), 1.2),
            ("LEFTPADDING", (0, 0), (0, -1), 0),
            ("LINEBELOW", (0, 0), (-1, -1), 0.25, "#c8ced6"),
        ],
    )


def _bullets(texts: Sequence[str]) -> list[Flowable]:
    return [_paragraph(f"• {text}", leftIndent=8, firstLineIndent=-8) for text in texts]


def _front(certificate: Mapping[str, Any], card: Mapping[str, Any]) -> list[Flowable]:
    """Return page one, which is to be read and signed."""
    promise, declared = card["guarantee"], certificate["declared"]
    noun, epsilon = describe_noun(card), float(promise["epsilon"])
    fields = [("Model", _escape(card["title"]))]
    for name, label in _FIELDS.items():
        fields.append((label, _escape(declared.get(name)) or _EMPTY))
    days = dict.fromkeys((_day(card, "begun"), _day(card, "ended")))
    fields.append(("Trained", " to ".join(days)))
    unit = str(promise["unit"]).replace("one ", "each ", 1)
    against = promise.get("against", "everyone who sees the model")
    fields.append(("Protected", _escape(f"{unit}, from {against}")))
    return [
        _paragraph("Certificate of differential privacy", 16, "DejaVuSans-Bold", spaceAfter=9),
        _rows(fields, 8.4),
        _heading("What is promised"),
        _paragraph(
            f"Anyone who sees this model learns almost the same whether one {_escape(noun)} was in "
            "the training data or not. “Almost” is measured by ε (epsilon): the smaller, the "
            f"safer. Here <b>ε = {round_up(epsilon, 2)}</b>. The promise may fail with a "
            f"probability of 1 in {1 / promise['delta']:,.0f} (δ)."
        ),
        _scale(epsilon),
        _heading("What an attacker can find out at most"),
        *_bullets(_attacks(card, _escape(noun))),
        _heading("What adds up"),
        *_bullets([_escape(line) for line in meaning_lines(card)[-2:]]),
        _heading("What is not covered"),
        *_bullets([*_NOT_COVERED, *_list_uncovered(card)]),
        _heading("Quality"),
        *_bullets(_quality(card)),
        _heading("How it was checked"),
        *_bullets(_checks(card)),
        _signature(certificate),
    ]


def _attacks(card: Mapping[str, Any], noun: str) -> list[str]:
    """Return what every attack finds out at most."""
    meaning = card["meaning"]
    right, found = meaning["right_at_even_odds"], meaning["found_at_1_percent_false_alarms"]
    return [
        f"Guessing by coin toss whether one {noun} was in the data is right half of the time. "
        f"The best attack is right at most <b>{round_up(100 * right, 1)} %</b> of the time.",
        f"An attack that wrongly accuses 1 of 100 outsiders finds at most "
        f"<b>{round_up(100 * found, 1)}</b> of 100 that were in the data. Guessing finds 1.",
        "Both hold for every attack, with any other knowledge and any computer.",
    ]


def _list_uncovered(card: Mapping[str, Any]) -> list[str]:
    figures = "No figures were named that were computed from the data without noise."
    if count := len(card["not_private"]):
        figures = (
            f"{count} kinds of figures that were computed from the data without noise: see the "
            "annex before you publish any of them."
        )
    chosen = (card.get("hyper_parameters") or card).get("chosen_by")
    return [
        figures,
        f"How the settings were chosen: {_escape(chosen)}.",
    ]


def _quality(card: Mapping[str, Any]) -> list[str]:
    results = {name: number(value) for name, value in card["results"].items()}
    shown = []
    for name, value in results.items():
        is_share = any(word in name for word in ("accuracy", "recall", "precision"))
        if value is not None:
            shown.append(f"{_escape(name)}: {f'{value:.1%}' if is_share else f'{value:.4g}'}")
    if not shown:
        shown = ["No figure of quality is on the card."]
    if not any(name.startswith("lowest") for name in results):
        shown.append(
            "Quality for small groups was not measured. Noise and clipping can make it worse for "
            "them than for others."
        )
    return shown[:5]


def _checks(card: Mapping[str, Any]) -> list[str]:
    rows = audit_rows(card.get("audit"))
    audit = "No audit was made." if not rows else f"{len(rows)} checks of an audit, none failed."
    lower = ((card.get("audit") or {}).get("one_run") or {}).get("gaussian_lower")
    if lower is not None:
        audit += f" A test attack on made-up records showed that ε is {lower:.2f} or more."
    return [
        "Before this page was written, ε was computed again from the ledger, and ledger, card and "
        f"weights were compared. {audit}",
        "Anybody can check this certificate: dpkfc-verify RUN --certificate FILE.json. What nobody "
        "can check from files: that the program trained as its ledger says, and what the owner "
        "states above.",
    ]


def _scale(epsilon: float) -> Flowable:
    """Return a scale on which this ε is marked."""
    from reportlab.graphics.shapes import Drawing, Polygon, Rect, String
    from reportlab.lib.colors import HexColor
    from reportlab.lib.units import mm

    width, left, bar = _WIDTH * mm, 0.0, 9.0
    drawing = Drawing(width, 46)

    def place(value: float) -> float:
        share = math.log(value / _LEAST) / math.log(_ZONES[-1][0] / _LEAST)
        return width * min(1.0, max(0.0, share))

    for end, colour, word in _ZONES:
        right = place(end)
        drawing.add(Rect(left, 17, right - left, bar, fillColor=HexColor(colour), strokeWidth=0))
        middle = (left + right) / 2
        text = {"fontName": "DejaVuSans", "fontSize": 7, "textAnchor": "middle"}
        drawing.add(String(middle, 19, word, fillColor=HexColor("#ffffff"), **text))
        left = right
    for value in (0.1, 1, 10, 100):
        anchor = {0.1: "start", 100: "end"}.get(value, "middle")
        label = String(place(value), 8, f"ε = {value:g}", fontName="DejaVuSans", fontSize=7)
        label.textAnchor = anchor
        drawing.add(label)
    here = place(epsilon)
    drawing.add(Polygon([here - 3.5, 35, here + 3.5, 35, here, 27]))
    anchor = "start" if here < width / 2 else "end"
    shift = 6 if anchor == "start" else -6
    mark = String(here + shift, 31, f"this model: {round_up(epsilon, 2)}", fontSize=8)
    mark.fontName, mark.textAnchor = "DejaVuSans-Bold", anchor
    drawing.add(mark)
    note = String(0, 0, "Zones after Ponomareva et al. 2023, How to DP-fy ML.", fontSize=5.8)
    note.fontName, note.fillColor = "DejaVuSans", HexColor("#666666")
    drawing.add(note)
    return drawing


def _signature(certificate: Mapping[str, Any]) -> Flowable:
    from reportlab.graphics.barcode.qr import QrCodeWidget
    from reportlab.graphics.shapes import Drawing
    from reportlab.lib.units import mm
    from reportlab.platypus import Table

    side = 29 * mm
    code = QrCodeWidget(f"dpkfc certificate {FORMAT}\n{certificate['fingerprint']}")
    code.barWidth = code.barHeight = side
    picture = Drawing(side, side)
    picture.add(code)
    print_ = certificate["fingerprint"]
    words = [
        _paragraph("Name and role: ........................................................"),
        _paragraph(
            "Place and date: .......................................................", spaceBefore=9
        ),
        _paragraph(
            "Signature: ............................................................", spaceBefore=9
        ),
        _paragraph(
            f"Fingerprint of ledger and weights:<br/>{print_[:32]}<br/>{print_[32:]}",
            7,
            "DejaVuSansMono",
            spaceBefore=7,
        ),
    ]
    return Table(
        [[words, picture]],
        colWidths=[138 * mm, 33 * mm],
        spaceBefore=9,
        hAlign="LEFT",
        style=[("LEFTPADDING", (0, 0), (0, -1), 0)],
    )


def _annex(certificate: Mapping[str, Any], card: Mapping[str, Any]) -> list[Flowable]:
    """Return the technical facts behind page one."""
    promise, mechanism, ledger = card["guarantee"], card["mechanism"], certificate["ledger"]
    accounting = card.get("accounting") or promise
    figures = [f"{k.upper()} {round_up(v, 4)}" for k, v in accounting["epsilon_by"].items() if v]
    kinds = [
        f"{kind['releases']:,} for {kind['purpose']}, σ = {kind['noise_multiplier']:.6g}"
        for kind in mechanism.get("extra_releases", [])
    ]
    facts = {
        "ε": round_up(float(promise["epsilon"]), 4),
        "δ": f"{promise['delta']:g}",
        "unit": promise["unit"],
        "neighbouring data sets": promise["neighbours_differ_in"],
        "ε by each accountant": ", ".join(figures),
        "releases": ", of which ".join([f"{ledger['releases']:,}", *kinds]),
        "noise multiplier σ": f"{mechanism['noise_multiplier']:.6g}",
        "sensitivity of a sum": f"{mechanism['sensitivity']:.6g}",
        "standard deviation": f"{mechanism['stddev']:.6g}",
        "noise": mechanism.get("noise", ""),
        "event of a release": json.dumps(mechanism.get("event", "")),
        "plan": certificate["plan_hash"],
        "ledger": ledger["id"],
        "head of the ledger": ledger["head"],
        "weights, SHA-256": f"{certificate['weights']['file']} {certificate['weights']['sha256']}",
        "card, SHA-256": certificate["card"],
        "software": ", ".join(f"{k} {v}" for k, v in (card.get("software") or {}).items()),
    }
    public = {name: _reason(entry) for name, entry in card["assumed_public"].items()}
    pages = [_paragraph("Annex", 14, "DejaVuSans-Bold", spaceAfter=8)]
    sections = {"Guarantee and origin": facts, "Taken as public": public}
    sections["Figures that ε does not protect"] = card["not_private"]
    sections["Checks of the audit"] = {
        row[0]: f"{row[1]} ({row[2]})" for row in audit_rows(card.get("audit"))
    }
    for title, content in sections.items():
        rows = [(_escape(name), _escape(value)) for name, value in content.items() if value]
        if rows:
            pages += [_heading(title), _rows(rows, 7.2)]
    return pages


def _reason(entry: Any) -> str:
    return f"{entry['value']}: {entry['why']}" if isinstance(entry, Mapping) else str(entry)


def _day(card: Mapping[str, Any], name: str) -> str:
    return str((card.get("dates") or {}).get(name, ""))[:10] or "(not stated)"


def _escape(value: Any) -> str:
    """Return a text that nobody has checked as text of a paragraph."""
    from xml.sax.saxutils import escape

    from dpkfc.report.text import plain

    return escape(plain(value or "", 300))
