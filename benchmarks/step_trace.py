"""Count the files and functions of dpkfc that one steady step enters, as a reader of the code would
have to open them.

    python benchmarks/step_trace.py

The model is a CNN of two layers, the batch has 64 examples, the process is one, and no refresh and
no check is due.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpkfc
from dpkfc import KFAC, PrivacyConfig, Session, WhiteNoise

ROOT = Path(dpkfc.__file__).parent
STEADY = 4  # steps before the one that is counted


class Trace:
    """Counts calls of functions of the package, and moves from one file to another."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str, int]] = Counter()
        self.moves = 0
        self._files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(ROOT)) or code.co_name in (
            "<genexpr>",
            "<listcomp>",
            "<dictcomp>",
            "<lambda>",
        ):
            return
        if event == "call":
            self.functions[
                code.co_filename, getattr(code, "co_qualname", code.co_name), code.co_firstlineno
            ] += 1
            self.moves += bool(self._files) and self._files[-1] != code.co_filename
            self._files.append(code.co_filename)
        elif event == "return" and self._files:
            self._files.pop()

    @property
    def files(self) -> set[str]:
        """Files that were entered."""
        return {file for file, _, _ in self.functions}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def trace_step(preconditioner: KFAC | None) -> Trace:
    """Return what the fifth step of a short run enters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    data = torch.randn(640, 1, 14, 14), torch.randint(0, 10, (640,))
    config = PrivacyConfig(expected_batch_size=64, steps=STEADY + 1, preconditioner=preconditioner)
    plan = config.with_noise(1.0, 1e-5, len(data[0]))
    trace = Trace()
    with Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), data) as session:
        for number, batch in enumerate(session.batches()):
            if number == STEADY:
                sys.setprofile(trace)
            session.step(batch, losses)
        sys.setprofile(None)
    return trace


def main() -> None:
    kfac = KFAC(probe=WhiteNoise((1, 14, 14)), probe_size=64, every=100)
    for name, preconditioner in (("DP-SGD", None), ("DP-KFC", kfac)):
        trace = trace_step(preconditioner)
        calls = sum(trace.functions.values())
        print(
            f"{name}: {len(trace.files)} files, {len(trace.functions)} functions, {calls} calls,"
            f" {trace.moves} moves"
        )
        if "--list" in sys.argv:
            for file in sorted(trace.files):
                names = sorted(function for path, function, _ in trace.functions if path == file)
                print(f"  {Path(file).relative_to(ROOT)}: {len(names)}: {', '.join(names)}")


if __name__ == "__main__":
    main()
