"""Define `dpkfc certify`: write a page to sign, and what `dpkfc-verify` reads."""

from __future__ import annotations

from pathlib import Path

from dpkfc.app.run_folder import check_out
from dpkfc.terminal import print_line


def certify(
    run: Path,
    /,
    *,
    out: Path | None = None,
    owner: str = "",
    controller: str = "",
    contact: str = "",
    purpose: str = "",
    data_subjects: str = "",
    legal_basis: str = "",
    retention: str = "",
) -> None:
    """Write the certificate of a run: one page to sign, an annex, and FILE.json beside them.

    Args:
        run: A folder with ledger, card and weights.
        out: The PDF. Default: certificate.pdf in RUN.
        owner: Who made the model; as on the card, where it is left out.
        controller: Who decides why and how the data are used (GDPR, article 4).
        contact: Whom to ask.
        purpose: What the model is for.
        data_subjects: Whose data it has seen.
        legal_basis: Why the data may be used.
        retention: Until when model and data are kept.
    """
    from dpkfc.app.certificate import certify as write

    fields = {
        "owner": owner,
        "controller": controller,
        "contact": contact,
        "purpose": purpose,
        "data_subjects": data_subjects,
        "legal_basis": legal_basis,
        "retention": retention,
    }
    given = {name: value for name, value in fields.items() if value}
    path = out or run / "certificate.pdf"
    record = path.with_suffix(".json")
    check_out(record, b'{\n  "certificate"')
    if not record.exists():
        check_out(path)
    content = write(run, path, given)
    print_line(f"certificate: {path}, and {record.name} for dpkfc-verify")
    print_line(f"fingerprint of ledger and weights: {content['fingerprint']}")
