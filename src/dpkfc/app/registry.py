"""Write the entry of a run in the public registry of differential privacy deployments.

The rules are of github.com/opendp/deployments-registry-data (`schemas/deployments-schema.yaml` and
`scripts/check.py` at commit 3e9c812): names of files, quotes, and no doubled backslash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpkfc.checkpoint import place_file
from dpkfc.report.card_files import LEDGER
from dpkfc.report.officer import MISSING, check_line, is_promised, registry_record
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import CardError, require_card

_NAME = re.compile(r"[a-z0-9_]+\.yaml")
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
# Where the texts go that only the owner knows, and by which flag they come.
_PLACES = {
    "sector": ("basic", "data_product_sector"),
    "actors": ("deployment_model", "actors"),
    "justification": ("implementation", "justification"),
}
# What tier 3 asks for beside what every run knows.
_TIER_3 = {
    ("dp_variant", "data_domain"): "dpkfc card RUN --data-subjects TEXT",
    ("deployment_model", "actors"): "--actors TEXT",
    ("implementation", "justification"): "--justification TEXT",
}


def export_entry(run: Path, out: Path | None, stated: Mapping[str, str]) -> tuple[Path, list[str]]:
    """Write the entry of a run as YAML: tier 2, or tier 3 where the owner has stated all of it.

    Args:
        run: folder with ledger and card.
        out: the file; None takes a name from the title, in the folder.
        stated: "sector", "actors" and "justification", where the owner gives them.

    Returns:
        The file, and what is missing: the field, and the flag that fills it in.

    Raises:
        CardError: no card, a card that disagrees with its ledger, or no certified guarantee.
        ValueError: a name or sector that the registry refuses, or a text that is not a short line.
    """
    for name, value in stated.items():
        check_line(name, value)
    if stated.get("sector", SECTORS[0]) not in SECTORS:
        raise ValueError(f"sector {stated['sector']!r:.40} is unknown; take {', '.join(SECTORS)}")
    card = require_card(run)
    verify_ledger(run / LEDGER)
    if not is_promised(card.content):
        raise CardError(f"{run} has no certified guarantee, so the registry has no place for it")
    record = registry_record(card.content)
    deployment = record["deployment"]
    for name, value in stated.items():
        section, key = _PLACES[name]
        deployment[section][key] = value
    missing = []
    for section, content in deployment.items():
        for key, value in content.items():
            texts = value if isinstance(value, list) else [value]
            found = [text for text in texts if str(text).startswith(MISSING)]
            if key != "notes":
                missing += [f"{section}.{key}: {text.removeprefix(MISSING)}" for text in found]
    for (section, key), flag in _TIER_3.items():
        if key not in deployment[section]:
            missing.append(f"{section}.{key}, for tier 3: {flag}")
    record["tier"] = 2 if missing else 3
    name = record["url_slug"].replace("-", "_") or "deployment"
    path = out or run / f"{name}.yaml"
    if not _NAME.fullmatch(path.name):
        raise ValueError(
            f"the registry takes names of a-z, 0-9, _ and .yaml, got {path.name!r:.60}"
        )
    text = "\n".join(_lines(record)) + "\n"
    place_file(path, lambda part: part.write_text(text, "utf-8"))
    return path, missing


def _lines(content: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the lines of a mapping in YAML; a text is quoted as JSON does it."""
    space = "  " * depth
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield f"{space}{key}:"
            yield from _lines(value, depth + 1)
        elif isinstance(value, list):
            yield f"{space}{key}:"
            yield from (f"{space}  - {_scalar(item)}" for item in value)
        else:
            yield f"{space}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value.replace("\\", "/"), ensure_ascii=False)
    # YAML 1.1 reads 1e-05 as a text.
    return re.sub(r"^(\d+)e", r"\1.0e", repr(value))
