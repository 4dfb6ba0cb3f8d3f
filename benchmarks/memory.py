"""Peak memory of one contender, alone in a process of its own; what is counted: docs/speed.md, "How
memory is taken".
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import CardWatch, MemoryWatch

LATER = 4  # steps after the first
# Freed blocks go back to the system at once, for all alike, so that resident memory is live memory.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def run_alone(command: Sequence[str]) -> dict[str, Any]:
    """What a script prints as JSON in its last line, from a process of its own; `not_available`
    with the reason if it fails.
    """
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **GIVEN_BACK},
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {
        "not_available": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[
            -1
        ][:300]
    }


def peaks(build: Callable[[Any], Any], case: Any, device: str = "cpu") -> dict[str, Any]:
    """Peaks in MiB above the start: of the first step, of those after it, of a refresh while the
    old metric is held.

    `step_mib` is the peak of a step that does not refresh.

    Args:
        build: makes the contender of a `contenders.Setting`; model, data and contender are there
            before the start.
        case: of `models`.
        device: a card's memory is what torch has allocated on it.
    """
    import torch

    from contenders import setting_for

    with tempfile.TemporaryDirectory() as folder:
        contender = build(setting_for(case, Path(folder), device, copies=False))
        wake_libraries(device)
        load_code(build, case, device)
        gc.collect()
        watch = MemoryWatch() if device == "cpu" else CardWatch()

        def peak_of(work: Callable[[], Any], times: int = 1) -> float:
            gc.collect()
            watch.reset()
            for _ in range(times):
                work()
            return watch.peak()

        found: dict[str, Any] = {
            "start_mib": round(watch.start / 2**20, 1),
            "first_step_mib": peak_of(contender.step),
        }
        found |= {"extra_mib": peak_of(contender.step, LATER), "step_mib": peak_of(contender.step)}
        if contender.refresh is not None:
            found["refresh_mib"] = peak_of(contender.refresh)
        contender.close()
    return {**found, "threads": torch.get_num_threads()}


def highest(memory: dict[str, Any]) -> float:
    """Of all peaks of one contender; in results without a peak of a refresh alone, the first step
    holds it.
    """
    return max(
        memory[name] for name in ("first_step_mib", "extra_mib", "refresh_mib") if name in memory
    )


def load_code(build: Callable[[Any], Any], case: Any, device: str) -> None:
    """Two steps of a tiny model of the same kind: a process holds the code of libraries from when
    it is first run, and no step gives it back.
    """
    from contenders import setting_for
    from models import cases

    kind = next((name for name in ("cnn", "mlp", "wrn", "vit") if name in case.name), "encoder-32")
    with tempfile.TemporaryDirectory() as folder, suppress(Exception):
        tiny = cases(smoke=True)[f"smoke-{kind}"]
        contender = build(setting_for(tiny, Path(folder), device, copies=False))
        contender.step()
        contender.step()
        contender.close()


def wake_libraries(device: str) -> None:
    """Kernels, thread pools, and what a first step imports, load before the watch begins."""
    import torch

    import dpkfc.session  # noqa: F401

    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    weight.grad = torch.zeros_like(weight)
    torch.optim.SGD([weight]).step()
    x = torch.randn(256, 256, requires_grad=True, device=device)
    image, kernel = (
        torch.randn(size, requires_grad=True, device=device)
        for size in ((2, 4, 8, 8), (4, 4, 3, 3))
    )
    (x @ x).sum().backward()
    torch.nn.functional.conv2d(image, kernel).sum().backward()
    torch.bmm(x.detach().view(4, 64, 256), x.detach().view(4, 256, 64))
    torch.linalg.eigh(x.detach() @ x.detach().T)
    torch.linalg.qr(x.detach())
    torch.fft.ifft2(torch.fft.fft2(image.detach()))
