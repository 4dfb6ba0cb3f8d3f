"""Record small runs in test mode, so that a change of the code's shape can be shown to change no
number.

    python -m tests.golden.record            # compare with tests/golden/golden.json
    python -m tests.golden.record --write    # write that file

Sums of floating-point numbers differ between processors in their last bits. Figures that depend on
them are stored beside the processor's instruction set and maker, and compared to the bit where both
are the same, and elsewhere to nine digits, or seven in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.cases import CASES, Case
from tests.federated.golden_cases import GOLDEN_CASES, run_case
from tests.integrations import opacus_cases
from tests.test_session import loss_fn

__all__ = ["PATH", "RUNS", "differences", "record"]

PATH = Path(__file__).parent / "golden.json"


def digest(x: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()


def flatten_weights(model: torch.nn.Module) -> Tensor:
    """Return all parameters of a model as one vector in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


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
        session, model = case.open(path)
        with session:
            batches = session.batches()
            session.step(next(batches), loss_fn)
            session.save(Path(folder) / "checkpoint")
            for batch in batches:
                session.step(batch, loss_fn)
            metric = session.preconditioner.digest if session.preconditioner is not None else ""
        manifest = json.loads((Path(folder) / "checkpoint" / "manifest.json").read_text("utf-8"))
        return {
            "plan": session.plan.hash,
            "epsilon": session.plan.epsilon(session.ledger.count),
            "ledger": digest_ledger(path),
            "checkpoint": sorted(manifest["sha256"]),
            "metric": metric,
            "weights": digest(flatten_weights(model)),
            "norm": float(flatten_weights(model).norm()),
        }


def run_script() -> dict[str, Any]:
    """Train a script in the shape of Opacus."""
    engine, model, optimizer, loader = opacus_cases.private(noise_multiplier=1.0)
    opacus_cases.train(model, optimizer, loader)
    found = {
        "releases": engine.ledger.count,
        "weights": digest(flatten_weights(model)),
        "norm": float(flatten_weights(model).norm()),
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
        preconditioner = run.server.preconditioner
        return {
            "plan": plan.hash,
            "description": hashlib.sha256(
                json.dumps(description, sort_keys=True).encode()
            ).hexdigest(),
            "contract": run.server.contract,
            "epsilon": float(f"{run.server.epsilon:.9g}"),
            "dropped": sum(record.dropped for record in run.records),
            "ledgers": {
                path.stem: digest_ledger(path) for path in sorted(Path(folder).glob("*.jsonl"))
            },
            "metric": preconditioner.digest if preconditioner is not None else "",
            "weights": digest(flatten_weights(run.server.model)),
            "norm": float(flatten_weights(run.server.model).norm()),
        }


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"session, {name}": (lambda case=case: run_session(case)) for name, case in CASES.items()},
    "Opacus script": run_script,
    **{f"federated, {name}": (lambda name=name: run_federated(name)) for name in GOLDEN_CASES},
}


def processor() -> str:
    """Return instruction set and maker of the processor, by which MKL chooses its kernels."""
    maker = ""
    with suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        maker = next((line.split()[-1] for line in facts if line.startswith("vendor_id")), "")
    return f"{torch.backends.cpu.get_cpu_capability()} {maker}"


def record(names: Sequence[str] = tuple(RUNS)) -> dict[str, Any]:
    """Return the figures of some runs and the instruction set they were made with."""
    torch.set_num_threads(1)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            torch.manual_seed(0)
            found[name] = RUNS[name]()
    return {
        "processor": processor(),
        "torch": torch.__version__,
        "runs": found,
    }


def differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the runs and figures that differ, for the runs that were found."""
    same_machine = all(stored[name] == found[name] for name in ("processor", "torch"))
    result = []
    for name, figures in found["runs"].items():
        before = stored["runs"].get(name)
        if before is None:
            result.append(f"{name}: is not in the file")
            continue
        for key, value in figures.items():
            if key in ("weights", "metric") and not same_machine:
                continue
            if isinstance(value, float) and not same_machine:
                digits = 1e-7 if "float32" in name else 1e-9
                is_equal = abs(value - before[key]) <= digits * abs(before[key]) + 1e-15
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
    found = json.loads(json.dumps(record()))
    if options.write:
        PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
        return 0
    wrong = differences(json.loads(PATH.read_text("utf-8")), found)
    for line in wrong:
        print(line[:300])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
