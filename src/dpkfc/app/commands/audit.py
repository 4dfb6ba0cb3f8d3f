"""Define `dpkfc audit`: try to disprove the guarantee of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpkfc.app.commands.flags import SettingsWithoutFolder
from dpkfc.app.settings_file import read_choices
from dpkfc.app.toml import ConfigError
from dpkfc.terminal import Whole, open_console


def audit(
    run: Path | None = None,
    /,
    *,
    config: Path | None = None,
    kind: list[str] | None = None,
    canaries: Whole = 1000,
    runs: Whole = 1500,
    quiet: bool = False,
    settings: SettingsWithoutFolder = None,
) -> None:
    """Try to disprove the guarantee of a run.

    Args:
        run: A run folder; left out: the settings, as of `train`.
        config: TOML file of settings; flags win.
        kind: step, one-run, membership; may be given several times.
        canaries: Canaries of the one-run audit.
        runs: Releases of each of the two worlds.
        quiet: No progress bar.
        settings: flags of settings that were given.
    """
    from dpkfc.app import audit_folder as audits
    from dpkfc.app.audit_verdict import verdict_table
    from dpkfc.app.recipes.catalogue import run_config

    console = open_console()
    if run is not None and (settings or config is not None):
        raise ConfigError(
            "a run folder is audited with its own settings; leave out every other setting"
        )
    options: dict[str, Any] = {
        "kinds": kind or ["step"],
        "canaries": canaries,
        "runs": runs,
        "console": None if quiet else console,
    }
    if run is not None:
        verdict = audits.audit_folder(run, **options)
    else:
        verdict = audits.audit(run_config(read_choices(config, settings or {})), **options)
    console.print(verdict_table(verdict))
    if not verdict.passed:
        raise ConfigError(
            "the audit FAILED: the guarantee that is claimed does not hold, or not for what lies"
            " in the folder"
        )
