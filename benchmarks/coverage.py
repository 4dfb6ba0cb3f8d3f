"""Which architectures of the zoo are captured as one graph, and what the others cost.

python benchmarks/coverage.py --output FILE.json
python benchmarks/coverage.py --only NAME …      # prints, writes nothing
python benchmarks/coverage.py --table FILE.json  # the Markdown table
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from common import machine, markdown, read_json, stamp, write_json  # noqa: E402

SIZES = (2, 7, 5)
# Where torch says in which file it stopped.
_PATH = re.compile(r"(?<=[\s`'\"])/\S+")


def measure(name: str) -> dict[str, Any]:
    """Capture one architecture, and compare its clipped sums with single examples."""
    from dpkfc.gradients.clip import Clip
    from dpkfc.gradients.clipped_summer import ClippedSummer
    from dpkfc.gradients.discovery import find_layers
    from dpkfc.graph.passes import GraphPasses
    from tests.zoo.architectures import ARCHITECTURES
    from tests.zoo.brute_force import clipped_sum, gradients_of_each, norm_of, relative_error
    from tests.zoo.registry import rows_of

    architecture = ARCHITECTURES[name]
    entry: dict[str, Any] = {"kind": architecture.kind, "family": architecture.family}
    torch._dynamo.reset()
    model = architecture.make()
    try:
        layers = find_layers(model)
    except ValueError as error:
        return entry | {"outcome": "refused", "why": str(error)[:120]}
    passes = GraphPasses(model, layers)
    sizes = SIZES if architecture.size is None else (architecture.size,)
    entry["errors"] = []
    began = time.perf_counter()
    try:
        for size in sizes:
            rows = architecture.batch(size)
            batch = architecture.collate([rows_of(rows, i) for i in range(size)])
            augment = architecture.augment
            calls = passes.calls(architecture.loss_fn, augment, batch, size, torch.sum)
            if calls is None:
                reason = f"{passes.refusal.operation}: {passes.refusal.reason}"
                entry |= {"outcome": "not captured", "why": _PATH.sub("…", reason)[:200]}
                return entry | {"price": find_price(architecture, sizes[-1])}
            entry.setdefault("seconds", round(time.perf_counter() - began, 2))
            if architecture.is_random or architecture.kind == "mixing":
                continue
            singles = architecture.singles(architecture.batch(size))
            gradients = gradients_of_each(architecture.make(), singles, architecture.loss_fn)
            finite = [norm_of(g) for g in gradients]
            clip = float(torch.tensor(finite).nanmedian())
            if not 0 < clip < float("inf"):
                clip = 1.0
            summer = ClippedSummer(layers, {}, Clip(clip))
            summer.add(calls, size)
            expected = clipped_sum(gradients, clip)
            entry["errors"].append(relative_error(summer.result(), expected))
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return entry | {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:200]}
    entry["captures"] = passes.captures
    right = all(x <= max(architecture.tolerance, 1e-9) for x in entry["errors"])
    return entry | {"outcome": "captured" if right else "wrong"}


def find_price(architecture: Any, size: int) -> float | None:
    """Return the time of gradients one example at a time over one gradient of the whole batch.

    Processor seconds, the least of three; None where an example or the batch cannot run.
    """
    from tests.zoo.brute_force import gradients_of_each
    from tests.zoo.registry import rows_of

    model = architecture.make()
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = architecture.batch(size)
    singles = architecture.singles(rows)

    def together() -> None:
        batch = architecture.collate([rows_of(rows, i) for i in range(size)])
        loss = architecture.loss_fn(model, batch).sum()
        torch.autograd.grad(loss, trained, allow_unused=True)

    def alone() -> None:
        gradients_of_each(model, singles, architecture.loss_fn)

    least = []
    for run in (together, alone):
        taken = []
        for _ in range(4):
            began = time.process_time()
            try:
                run()
            except Exception:  # noqa: BLE001
                return None
            taken.append(time.process_time() - began)
        least.append(min(taken[1:]))
    return round(least[1] / least[0], 1)


def table(results: dict[str, Any]) -> str:
    """Return what became of every architecture, and why."""
    found = results["architectures"]
    counts = Counter((x["kind"], x["outcome"]) for x in found.values())
    rows = [[kind, outcome, str(count)] for (kind, outcome), count in sorted(counts.items())]
    head = markdown(["kind", "outcome", "architectures"], rows)
    rows = []
    for name, x in sorted(found.items()):
        seconds = "–" if x.get("seconds") is None else f"{x['seconds']:.1f}"
        error = f"{max(x['errors']):.0e}" if x.get("errors") else "–"
        price = "–" if x.get("price") is None else f"{x['price']:.1f}"
        cells = [f"`{name}`", x["kind"], x["outcome"], seconds, error, price, x.get("why", "")]
        rows.append(cells)
    names = ["architecture", "kind", "outcome", "seconds to capture", "largest error"]
    names += ["one at a time ÷ batch", "why not"]
    every = markdown(names, [[cell.replace("|", "/") for cell in row] for row in rows])
    return f"{head}\n\n{every}\n\n{machine(results)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read_json(arguments.table)))
        return 0
    from tests.zoo.architectures import ARCHITECTURES

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = arguments.only or list(ARCHITECTURES)
    results: dict[str, Any] = {}
    for name in names:
        try:
            found = measure(name)
        except Exception as error:  # noqa: BLE001
            found = {"outcome": "error", "why": f"{type(error).__name__}: {error}"[:200]}
        results[name] = found
        print(name, found, flush=True)
        if arguments.output:
            write_json(arguments.output, stamp(1) | {"architectures": results})
    print(Counter((x.get("kind"), x["outcome"]) for x in results.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
