"""TOML files of settings: sections, or settings outside of any section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.app.library_values import explain_setting
from dpkfc.app.methods import Settings
from dpkfc.app.run_config import SECTION_OF, SECTIONS, RunConfig, check_name, make_config
from dpkfc.app.toml import ConfigError, nearest, read_toml


def flatten(content: Settings, where: str) -> dict[str, Any]:
    """Return the settings of a TOML file by their names.

    Args:
        content: the parsed file.
        where: name of the file, for errors.

    Raises:
        ConfigError: an unknown key or section, with the nearest known one, a key in the wrong
            section, or a schema.
    """
    if content.keys() & {"columns", "classes", "target_bounds"}:
        raise ConfigError(f"{where}: holds a schema; give it by --schema")
    settings: dict[str, Any] = {}
    for section, value in content.items():
        if not isinstance(value, Mapping):
            check_name(section, where)
            _add_setting(settings, section, value, where)
            continue
        if section not in SECTIONS:
            shown = f"[{section}]" if section.isprintable() else repr(section)
            raise ConfigError(f"{where}: unknown section {shown}; {nearest(section, SECTIONS)}")
        for name, inner in value.items():
            check_name(name, where)
            home = SECTION_OF[name]
            if home != section:
                raise ConfigError(f"{where}: {name} is in [{section}] but belongs in [{home}]")
            _add_setting(settings, name, inner, where)
    return settings


def _add_setting(settings: dict[str, Any], name: str, value: Any, where: str) -> None:
    if name in settings:
        raise ConfigError(
            f"{where}: {name} is given twice, in its section and outside; leave one out"
        )
    settings[name] = value


def known_settings(content: Settings) -> dict[str, Any]:
    """Return what a file holds by the names of settings; keys need not be known."""
    settings: dict[str, Any] = {}
    for name, value in content.items():
        settings |= value if isinstance(value, Mapping) else {name: value}
    return settings


def read_config(path: Path) -> RunConfig:
    """Return the settings in a file that holds all of them.

    Raises:
        ConfigError: as `read_toml`, `flatten` and `RunConfig`.
    """
    return make_config(**flatten(read_toml(path), str(path)))


def read_choices(file: Path | None, flags: Settings) -> dict[str, Any]:
    """Return what a user chose: a TOML file under flags.

    The flag `--epsilon` replaces a noise multiplier of the file, and `--epochs` its steps.

    Raises:
        ConfigError: as `read_toml` and `flatten`; both ways to say how much noise there is,
            or how long the run is; a clip to nothing, or no noise.
    """
    settings = {} if file is None else flatten(read_toml(file), str(file))
    # The file of a run holds every setting, also those without effect.
    is_of_a_run = len(settings) >= len(SECTION_OF) - 1
    for where, given in (("", flags), (f"{file}: ", {} if is_of_a_run else settings)):
        if given.get("steps") and "epochs" in given:
            raise ConfigError(
                f"{where}epochs = {given['epochs']} and steps = {given['steps']} both say how long"
                " the run is; leave one out"
            )
    if flags.get("max_grad_norm") == 0:
        raise ConfigError(
            "--max-grad-norm 0 would leave no gradient; give a bound above 0, or auto for the rule"
            " of dp-moments and of texts by an encoder"
        )
    if flags.get("noise_multiplier") == 0:
        raise ConfigError(
            "--noise-multiplier 0 would add no noise; leave it out for the least noise that keeps"
            " --epsilon"
        )
    if "epochs" in flags:
        settings.pop("steps", None)
    if "epsilon" in flags:
        if flags.get("noise_multiplier"):
            raise ConfigError(
                "--epsilon asks for the least noise that keeps it, --noise-multiplier gives it; "
                "leave one out"
            )
        settings.pop("noise_multiplier", None)
    return {**settings, **flags}


_PLACES = (
    "out",
    "budget",
    "data_dir",
    "pretrained",
    "public_data",
    "public_validation",
    "data",
    "schema",
    "label_file",
)


MACHINE = (
    "max_physical_batch_size",
    "num_workers",
    "threads",
    "device",
    "capture_graphs",
    "compile",
    "log",
    "log_private",
    "keep_encoded",
)


def deciding_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what a run is, by the names of their flags."""
    left_out = (*_PLACES, *MACHINE)
    return {name: value for name, value in config.values.items() if name not in left_out}


def check_unchanged(config: RunConfig, first: Settings, where: str) -> None:
    """Refuse to continue a run with other settings than those it was started with.

    Args:
        config: settings now.
        first: what `deciding_settings` gave at the start; settings it lacks are not compared.
        where: name of the file with the settings, for the error.

    Raises:
        ConfigError: naming the first setting that has changed.
    """
    for name, value in deciding_settings(config).items():
        if first.get(name, value) != value:
            raise ConfigError(
                f"{where}: {name} is {value!r}, and the run was started with {first[name]!r}; put "
                "that back, or start another run with --config FILE --out ANOTHER"
            )


def to_toml(config: RunConfig) -> str:
    """Return a TOML file that replays the run: every setting, in sections, with what it means.

    `out` is left out, so that a replay gets a folder of its own.
    """
    import tomli_w

    lines = ["# Every setting of this run. Replay it with: dpkfc train --config config.toml"]
    section = ""
    for name, value in config.values.items():
        if SECTION_OF[name] != section:
            section = SECTION_OF[name]
            lines += ["", f"[{section}]"]
        if name != "out":
            pair = tomli_w.dumps({name: value}).strip()
            lines.append(f"{pair:<36}  # {explain_setting(name)}")
    return "\n".join(lines) + "\n"
