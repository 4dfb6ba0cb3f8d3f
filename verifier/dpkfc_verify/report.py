"""Note what was found in the folder of a run, check by check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkfc_verify.ledger import DAMAGE, Ledger, Mismatch, Unchecked

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be checked"
# Checks without which nothing is known.
_NEEDED = {"ledger", "privacy loss", "certificate"}


@dataclass(frozen=True)
class Kept:
    """What somebody has kept outside of the folder.

    Attributes:
        certificate: its JSON file; None takes `certificate.json` in the folder, if it is there.
        head, releases: a head, and the number of releases after which it was noted.
        root: certificate of the time-stamping authority that you trust.
    """

    certificate: Path | None = None
    head: str = ""
    releases: int | None = None
    root: Path | None = None


@dataclass
class Report:
    """What was found in the folder of a run.

    Attributes:
        run: the folder, or the ledger in it.
        kept: outside of it.
        findings: check, verdict and one sentence each, in the order of the checks.
        verdict: `FAILS` if a check failed, `OPEN` if a needed one could not be made.
        reason: the sentence behind the verdict, "" where all holds.
        epsilon, delta: recomputed; None where they cannot be.
        ledger: an empty one where it cannot be read.
        card: empty where it cannot be read.
    """

    run: Path
    kept: Kept
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    verdict: str = HOLDS
    reason: str = ""
    epsilon: float | None = None
    delta: float = 1e-5
    ledger: Ledger = field(default_factory=Ledger)
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return where ledger, card and weights lie."""
        return self.run if self.run.is_dir() else self.run.parent

    def find(self, name: str) -> Path:
        """Return a file beside the ledger."""
        path = self.folder / Path(name).name
        if not path.is_file():
            raise Unchecked(f"there is no {path.name} in the folder")
        return path

    def check(self, name: str, function: Callable[..., str], *words: Any) -> None:
        """Make one check, and note what came out; "" is nothing to check."""
        try:
            verdict, text = HOLDS, function(self, *words)
        except (Mismatch, Unchecked) as error:
            verdict, text = FAILS if isinstance(error, Mismatch) else OPEN, str(error)
        except DAMAGE as error:
            verdict, text = FAILS, f"damaged or changed ({type(error).__name__}: {error})"[:150]
        if text:
            self.findings.append((name, verdict, text))
        is_new = self.verdict == HOLDS or (self.verdict == OPEN and verdict == FAILS)
        if is_new and (verdict == FAILS or (verdict == OPEN and name in _NEEDED)):
            self.verdict, self.reason = verdict, f"{name}: {text}"


def round_up(value: float) -> str:
    """Return a number with four decimals, rounded up."""
    units = round(value * 10_000)
    return f"{(units if units / 10_000 >= value else math.ceil(value * 10_000)) / 10_000:.4f}"
