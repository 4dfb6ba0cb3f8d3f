"""The command `dpkfc demo-federated`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

__all__ = ["demo_federated"]


def demo_federated(
    *,
    out: Annotated[str, typer.Option(help="Folder of the demo; a new one below runs/ when left out.")] = "",
    epsilon: Annotated[float, typer.Option(help="ε of every method.")] = 3.0,
    rounds: Annotated[int, typer.Option(help="Rounds of every method.")] = 40,
    engine: Annotated[str, typer.Option(help="here (one process), flower (its simulation), or both.")] = "both",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train DP-FedGD, DP-FedSOFIM and federated DP-KFC over ten clients, in this process and on Flower's simulation.

    No telemetry leaves the machine: Flower's and Ray's are switched off unless the environment switches them on.
    """
    from dpkfc.recipes.federated_demo import ENGINES, federated_demo

    console = Console()
    console = console if console.is_terminal else Console(width=140)
    engines = ENGINES if engine == "both" else (engine,)
    done = federated_demo(out, None if quiet else console, epsilon=epsilon, rounds=rounds, engines=engines)
    console.print(done.table)
    console.print("One run each, with noise of its own: differences of a point or two are that noise.")
    console.print(f"pictures, ledgers and privacy cards: {done.folder}", soft_wrap=True)
