"""The command `dpkfc-verify`: check the folder of a run without dpkfc, PyTorch or dp-accounting."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkfc_verify.run import FAILS, NEVER, OPEN, Report, add_up, verify_run


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; 0: all holds, 1: something does not hold, 2: it cannot be checked."""
    parser = argparse.ArgumentParser("dpkfc-verify", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--certificate", type=Path, help="FILE.json beside a certificate")
    parser.add_argument("--head", default="", help="a head of the ledger that you have kept")
    parser.add_argument("--releases", type=int, help="after how many releases it was noted")
    parser.add_argument("--tsa-root", type=Path, help="certificate of the time-stamping authority")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    if bool(options.head) != (options.releases is not None):
        parser.error("--head and --releases belong together")
    if len(options.runs) > 1 and (options.certificate or options.head):
        parser.error("--certificate and --head are about one run")
    head = (options.releases, options.head) if options.head else None
    settings = options.certificate, head, options.tsa_root
    try:
        reports = [verify_run(run, *settings) for run in options.runs]
    except OSError as error:
        parser.error(f"{str(error.filename)[:60]} cannot be read: {error.strerror}")
    total = add_up(reports) if len(reports) > 1 else None
    if options.json:
        content = {"runs": list(map(_to_dict, reports)), "total": total}
        text = json.dumps(content, indent=1, ensure_ascii=False)
    else:
        text = "\n\n".join(map(_render, reports)) + (f"\n\ntotal: {total}" if total else "")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Python writes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    verdicts = {report.verdict for report in reports}
    if total and total.startswith(OPEN):
        verdicts.add(OPEN)
    if FAILS in verdicts:
        return 1
    return 2 if OPEN in verdicts else 0


def _to_dict(report: Report) -> dict[str, Any]:
    content = dict(vars(report), run=str(report.run), never_checked=NEVER)
    del content["ledger"], content["card"]
    return content


def _render(report: Report) -> str:
    title = f"{report.run}: {report.verdict.upper()}" + (report.reason and f"; {report.reason}")
    lines = ["{verdict:18} {check}: {text}".format(**finding) for finding in report.findings]
    return "\n".join([title, *lines, f"{'never checked':18} {NEVER}"])


if __name__ == "__main__":
    sys.exit(main())
