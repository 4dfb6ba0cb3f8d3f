"""Record small runs in test mode, so that a change of the code's shape can be shown to change no
number.

    python -m tests.golden.record            # compare with tests/golden/golden.json
    python -m tests.golden.record --write    # write that file

Sums of floating-point numbers differ between processors in their last bits, and torch's initial
weights do, so runs start from weights that are exact everywhere and figures are compared with a
tolerance. Plans, ledgers and contracts are text without such figures: their digests are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.cases import CASES, Case
from tests.federated.golden_cases import GOLDEN_CASES, run_case
from tests.integrations import opacus_cases
from tests.test_session import loss_fn

__all__ = ["PATH", "RUNS", "differences", "record", "run_session"]

PATH = Path(__file__).parent / "golden.json"
# Of ε, relative; two libraries of elementary functions differ by 1e-13.
EPSILON_TOLERANCE = 1e-9
# Of the norm and projections of the weights, relative to the norm. Instruction sets differ by up to
# 3e-7: probes draw their noise in float32. A norm bound that is off by 1e-4 moves them by 1e-5.
WEIGHT_TOLERANCE = 2e-6
PROJECTIONS = 4


def draw_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Draw the weights of a model anew, in numbers that no processor rounds.

    torch's own initial weights are scaled in float32, with or without a fused multiply-add.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-512, 513, p.shape, generator=generator) / 1024)
    return model


def flatten_weights(model: torch.nn.Module) -> Tensor:
    """Return all parameters of a model as one vector in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def describe_weights(model: torch.nn.Module) -> list[float]:
    """Return the norm of all weights and their inner products with vectors of random signs."""
    weights = flatten_weights(model)
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (PROJECTIONS, len(weights)), generator=generator) * 2.0 - 1
    return [float(weights.norm()), *(signs.double() @ weights).tolist()]


def digest_ledger(path: Path) -> str:
    """Return the SHA-256 of what a ledger says, without its dates and what hangs on them."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    kept = [{name: value for name, value in line.items() if name not in DATED} for line in lines]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


DATED = {"created", "dpkfc", "id", "hash", "prev"}


def run_session(case: Case) -> dict[str, Any]:
    """Train a session to its end, with a checkpoint in the middle, and return what it left."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        case = dataclasses.replace(case, model=lambda make=case.model: draw_weights(make()))
        session, model = case.open(path)
        with session:
            batches = session.batches()
            session.step(next(batches), loss_fn)
            session.save(Path(folder) / "checkpoint")
            for batch in batches:
                session.step(batch, loss_fn)
        manifest = json.loads((Path(folder) / "checkpoint" / "manifest.json").read_text("utf-8"))
        return {
            "plan": session.plan.hash,
            "epsilon": session.plan.epsilon(session.ledger.count),
            "ledger": digest_ledger(path),
            "checkpoint": sorted(manifest["sha256"]),
            "weights": describe_weights(model),
        }


def run_script() -> dict[str, Any]:
    """Train a script in the shape of Opacus."""
    model = draw_weights(opacus_cases.mlp())
    engine, model, optimizer, loader = opacus_cases.private(model, noise_multiplier=1.0)
    opacus_cases.train(model, optimizer, loader)
    found = {
        "releases": engine.ledger.count,
        "weights": describe_weights(model),
    }
    engine.close()
    return found


def run_federated(name: str) -> dict[str, Any]:
    """Train a federated case and return what its server and its clients left."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_case(name, Path(folder))
        plan = run.server.plan
        description = {
            name: value for name, value in plan.describe().items() if not name.startswith("epsilon")
        }
        return {
            "plan": plan.hash,
            "description": hashlib.sha256(
                json.dumps(description, sort_keys=True).encode()
            ).hexdigest(),
            "contract": run.server.contract,
            "epsilon": run.server.epsilon,
            "dropped": sum(record.dropped for record in run.records),
            "ledgers": {
                path.stem: digest_ledger(path) for path in sorted(Path(folder).glob("*.jsonl"))
            },
            "weights": describe_weights(run.server.model),
        }


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"session, {name}": (lambda case=case: run_session(case)) for name, case in CASES.items()},
    "Opacus script": run_script,
    **{f"federated, {name}": (lambda name=name: run_federated(name)) for name in GOLDEN_CASES},
}


def record(names: Sequence[str] = tuple(RUNS)) -> dict[str, Any]:
    """Return the figures of some runs."""
    torch.set_num_threads(1)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            torch.manual_seed(0)
            found[name] = RUNS[name]()
    return found


def differences(stored: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the runs and figures that differ, for the runs that were found."""
    result = []
    for name, figures in found.items():
        before = stored.get(name)
        if before is None:
            result.append(f"{name}: is not in the file")
            continue
        for key, value in figures.items():
            if key == "weights":
                off = max(abs(x - y) for x, y in zip(value, before[key], strict=True))
                is_equal = off <= WEIGHT_TOLERANCE * before[key][0]
            elif key == "epsilon":
                is_equal = abs(value - before[key]) <= EPSILON_TOLERANCE * before[key]
            else:
                is_equal = value == before[key]
            if not is_equal:
                result.append(f"{name}: {key} is {value}, was {before[key]}")
    return result


def main() -> int:
    """Run all and compare, or write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = record()
    if options.write:
        PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
        return 0
    wrong = differences(json.loads(PATH.read_text("utf-8")), found)
    for line in wrong:
        print(line[:300])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
