"""Define `dpkfc pretrain-encoder`: train the public encoder anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.progress import Progress

from dpkfc.app.pretrained import pretrain_and_save
from dpkfc.app.run_folder import write_text
from dpkfc.app.settings import ConfigError
from dpkfc.terminal import Whole, open_console


def pretrain_encoder(
    out: Path,
    /,
    *,
    steps: Annotated[Whole, Parameter(validator=Number(gte=2))] = 7800,
    batch_size: Annotated[Whole, Parameter(validator=Number(gte=2))] = 1024,
    seed: Whole = 0,
    device: str = "cpu",
) -> None:
    """Train the encoder of `SyntheticEncoder` anew, on synthetic images alone.

    Args:
        out: The file of weights (safetensors).
        steps: Steps; the package's encoder took 7,783.
        batch_size: Images a step.
        seed: Public seed of images, views and weights.
        device: cpu or cuda.
    """
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    losses: list[tuple[int, float]] = []
    with Progress(console=open_console()) as progress:
        task = progress.add_task("encoder", total=steps)

        def report(step: int, loss: float) -> None:
            losses.append((step, round(loss, 4)))
            progress.update(task, completed=step, description=f"encoder, loss {loss:.3f}")

        facts = pretrain_and_save(
            out,
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            device=device,
            report=report,
        )
    log = out.with_suffix(".json")
    write_text(log, json.dumps({**facts, "losses": losses}))
    open_console().print(f"{out}: SHA-256 {facts['sha256']}; losses in {log}", soft_wrap=True)
