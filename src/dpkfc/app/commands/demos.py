"""Define `dpkfc demo` and `dpkfc demo-federated`."""

from __future__ import annotations

from dpkfc.app.commands.flags import SettingsOfModel
from dpkfc.app.commands.train import announce, results_table
from dpkfc.app.methods import METHOD_LABELS
from dpkfc.app.settings_file import read_choices
from dpkfc.terminal import Whole, open_console, print_line


def demo(
    *,
    out: str = "",
    quiet: bool = False,
    settings: SettingsOfModel = None,
) -> None:
    """Train DP-SGD and DP-KFC side by side on real digits under the same budget.

    Args:
        out: Folder of the demo; a new one below runs/ when left out.
        quiet: No progress bar.
        settings: flags of settings that were given.
    """
    from dpkfc.app.demo import demo as run_demo

    console = open_console()
    result = run_demo(read_choices(None, settings or {}), out, None if quiet else console)
    for run in result.results.values():
        if run.interrupted:
            announce(run)
    console.print(
        results_table({METHOD_LABELS[method]: run for method, run in result.results.items()})
    )
    print_line(f"pictures and privacy cards: {result.folder}")


def demo_federated(
    *,
    out: str = "",
    epsilon: float = 3.0,
    rounds: Whole = 40,
    engine: str = "both",
    quiet: bool = False,
) -> None:
    """Train DP-FedGD, DP-FedSOFIM and federated DP-KFC over ten clients.

    Args:
        out: Folder of the demo; a new one below runs/ when left out.
        epsilon: ε of every method.
        rounds: Rounds of every method.
        engine: here (one process), flower (its simulation), or both.
        quiet: No progress bar.
    """
    from dpkfc.app.federated_demo import ENGINES, federated_demo

    console = open_console()
    result = federated_demo(
        out,
        None if quiet else console,
        epsilon=epsilon,
        rounds=rounds,
        engines=ENGINES if engine == "both" else (engine,),
    )
    console.print(result.table)
    print_line("One run each, with its own noise: differences of a point or two are that noise.")
    print_line(f"pictures, ledgers and privacy cards: {result.folder}")
