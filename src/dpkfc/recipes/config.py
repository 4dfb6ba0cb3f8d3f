"""Where the value of every setting comes from, and the TOML file that replays a run.

Values are laid over one another: the defaults, the common part of the recipe's TOML, its part for a method that lends its own,
the method's settings, the recipe's part for that very method, then for the optimizer under it, a file given with `--config`,
and flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.recipes import rates
from dpkfc.recipes.methods import METHODS
from dpkfc.recipes.settings import OPTIMIZERS, SECTIONS, ConfigError, RunConfig, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "METHODS", "SECTIONS", "ConfigError", "RunConfig", "check_unchanged", "chosen", "flatten", "layered", "nearest", "of_the_run",
    "read_toml", "to_toml",
]  # fmt: skip

_PLACES = ("out", "data_dir", "pretrained", "public_data")
_FIELDS = {setting.name: setting for setting in dataclasses.fields(RunConfig)}


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the name and its permissions") from None
    except (ValueError, RecursionError) as error:  # bad syntax, bytes that are no UTF-8, brackets without end
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def flatten(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of a TOML file, whether written flat or in the sections of the written config.

    Args:
        content: the parsed file.
        where: name of the file, for errors.

    Raises:
        ConfigError: an unknown key or section (the nearest known one is named), or a key in the wrong section.
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if not isinstance(value, Mapping):
            _known_key(key, where)
            flat[key] = value
            continue
        if key not in SECTIONS:
            shown = f"[{key}]" if key.isprintable() else repr(key)
            raise ConfigError(f"{where}: unknown section {shown}; {nearest(key, SECTIONS)}")
        for name, inner in value.items():
            section = _known_key(name, where).metadata["section"]
            if section != key:
                raise ConfigError(f"{where}: {name} stands in [{key}] and belongs into [{section}]")
            if name in flat:
                raise ConfigError(f"{where}: {name} is given twice, in [{key}] and outside of any section; leave one of them out")
            flat[name] = inner
    return flat


def chosen(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What a user chose: a TOML file under flags. `--epsilon` as a flag takes the place of a noise multiplier in the file.

    Raises:
        ConfigError: as `read_toml` and `flatten`; both ways to say how much noise there is.
    """
    written = {} if file is None else flatten(read_toml(file), str(file))
    if "epsilon" in flags:
        if flags.get("noise_multiplier"):
            raise ConfigError("--epsilon asks for the least noise that keeps it, --noise-multiplier gives it; leave one out")
        written.pop("noise_multiplier", None)
    return {**written, **flags}


def _known_key(key: str, where: str) -> dataclasses.Field[Any]:
    if key not in _FIELDS:
        raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, _FIELDS)}")
    return _FIELDS[key]


def layered(defaults: Mapping[str, Any], chosen: Mapping[str, Any], where: str = "recipe") -> RunConfig:
    """A run's settings from a recipe's defaults and what the user chose.

    Args:
        defaults: parsed TOML of the recipe. Beside settings it may hold `[method.NAME]`, settings of one method, and in
            it a table per optimizer, which apply when that method and optimizer are in force.
        chosen: flat settings of the user, which win.
        where: name of the defaults, for errors.

    Raises:
        ConfigError: as `flatten` and `RunConfig`.
    """
    common = {key: value for key, value in defaults.items() if key != "method" or not isinstance(value, Mapping)}
    per_method = defaults["method"] if isinstance(defaults.get("method"), Mapping) else {}
    settings = flatten(common, where)
    method = chosen.get("method", settings.get("method", RunConfig.method))
    known = METHODS.get(method) if isinstance(method, str) else None
    section = method if known is None or method in per_method else known.like
    of_method = dict(per_method.get(section, {})) if isinstance(section, str) else {}
    tables = {key: of_method.pop(key) for key in OPTIMIZERS if key in of_method}
    settings |= flatten(of_method, f"{where} [method.{section}]")
    preset = dict(known.settings) if known else {}
    before = dict(settings)
    settings |= {key: value for key, value in preset.items() if section != method or key not in of_method}
    optimizer = chosen.get("optimizer") or settings.get("optimizer") or "adam"
    if isinstance(optimizer, str) and optimizer in tables:
        settings |= flatten(tables[optimizer], f"{where} [method.{section}.{optimizer}]")
    found = {**settings, **{_known_key(key, "settings").name: value for key, value in chosen.items()}}
    if "lr" not in chosen and known is not None:
        borrowed = before.get("lr") if section == known.like != method else None
        adam = borrowed if known.like == "dp-adam" else None
        if "lr" not in of_method and isinstance(tables.get("adam"), Mapping):
            adam = tables["adam"].get("lr")
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):  # a wrong value, which RunConfig names
            if borrowed and known.without_momentum and optimizer == "sgd":
                found["lr"] = rates.without_momentum(before, found)
            elif adam and optimizer == "adam-bc" and optimizer not in tables:
                found["lr"] = rates.of_adam(adam, found)
    return RunConfig(**found)


def of_the_run(config: RunConfig) -> dict[str, Any]:
    """The settings that decide what a run is; the others say where it runs and where its files lie."""
    return {
        name: getattr(config, name)
        for name, setting in _FIELDS.items()
        if setting.metadata["section"] != "machine" and name not in _PLACES
    }


def check_unchanged(config: RunConfig, begun: Mapping[str, Any], where: str) -> None:
    """A run that goes on has the settings that it was begun with.

    Args:
        config: settings now.
        begun: what `of_the_run` gave when it was begun; settings it does not name are not compared.
        where: name of the file with the settings, for the error.

    Raises:
        ConfigError: naming the first setting that has changed.
    """
    for name, value in of_the_run(config).items():
        if name in begun and begun[name] != value:
            raise ConfigError(
                f"{where}: {name} is {value!r}, and the run was begun with {begun[name]!r}; put that back to continue it, or "
                f"begin another run, with a budget of its own: dpkfc train --config {where} --out ANOTHER"
            )


def to_toml(config: RunConfig) -> str:
    """The settings as a TOML file that replays the run: every key, in sections, with what it means.

    `out` is left out, so that a replay gets a folder of its own.
    """
    lines = ["# Every setting of this run. Replay it with: dpkfc train --config config.toml"]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for name, setting in _FIELDS.items():
            if setting.metadata["section"] == section and name != "out":
                text = f"{name} = {_toml_value(getattr(config, name))}"
                lines.append(f"{text:<36}  # {setting.metadata['help']}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import tomli_w

        return tomli_w.dumps({"x": value}).split("=", 1)[1].strip()
    return repr(value)
