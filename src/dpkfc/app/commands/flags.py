"""The settings of a run as flags of a command, one each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Group, Parameter
from cyclopts.token import Token

from dpkfc.app.library_values import explain_setting
from dpkfc.app.run_config import SECTION_OF, SETTINGS
from dpkfc.terminal import make_table, open_console

# What `--help` shows of the settings, by group; `dpkfc settings` shows all of them by section.
_SHORT_HELP = {
    "Data": {
        "data": "CSV, Parquet, Feather, JSONL or image folder.",
        "target": "Column of the labels.",
        "schema": "Public schema; see `dpkfc schema`.",
        "text": "Column of the text.",
        "task": "Your own, as module:function.",
        "recipe": "A built-in task; see `dpkfc recipes`.",
        "data_dir": "Folder of its files; else $DPKFC_DATA.",
    },
    "Privacy": {
        "epsilon": "Target ε of the whole run.",
        "delta": "Target δ of the whole run.",
        "epochs": "Passes over the data.",
        "steps": "Steps, instead of epochs.",
        "expected_batch_size": "Mean size of a batch.",
        "max_grad_norm": "Bound C of a gradient.",
    },
    "Method": {
        "method": "See `dpkfc methods`.",
        "lr": "Learning rate.",
    },
    "Run": {
        "out": "Run folder; else a new one in runs/.",
        "seed": "Public seed of weights and probes.",
    },
}
_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_NUMBERS: dict[type, tuple[type, ...]] = {int: (int, float), float: (float,)}


def _convert(kind: type, tokens: Sequence[Token]) -> Any:
    """Return a number, or the text that is not one: `RunConfig` names it."""
    text = tokens[0].value
    for number in _NUMBERS.get(kind, ()):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _make_flags(*leave_out: str) -> Any:
    """Return what a command takes: a dictionary of the settings that were given as flags."""
    short = {
        name: (group, text, place)
        for place, (group, texts) in enumerate(_SHORT_HELP.items(), start=1)
        for name, text in texts.items()
    }
    fields = {name: field for name, field in SETTINGS.items() if name not in leave_out}
    hints = {}
    # The settings of the short help come first, in its order.
    for name in dict.fromkeys([*short, *fields]):
        if name not in fields:
            continue
        kind = _KINDS[str(fields[name].type)]
        flag = flag_of(name)
        group, text, place = short.get(name, ("", "", 0))
        parameter = Parameter(
            # `calibrate` and `epsilon` take both names too.
            name=("--batch-size", flag) if name == "expected_batch_size" else flag,
            negative=f"--no-{flag[2:]}" if kind is bool else (),
            converter=None if kind is bool else _convert,
            help=text,
            group=Group(group, sort_key=place) if group else None,
            show=bool(group),
        )
        hints[name] = Annotated[kind, parameter]
    flags = TypedDict("Flags", hints, total=False)  # type: ignore[misc]
    return Annotated[flags | None, Parameter(name="*")]


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


if TYPE_CHECKING:
    Settings = dict[str, Any] | None
    SettingsOfModel = Settings
    SettingsWithoutFolder = Settings
    SettingsOfSearch = Settings
else:
    Settings = _make_flags()
    SettingsWithoutFolder = _make_flags("out")
    SettingsOfModel = _make_flags("recipe", "method", "out")
    # A search has flags of these names, some with another meaning.
    SettingsOfSearch = _make_flags("recipe", "method", "out", "optimizer", "budget", "data_dir")


def print_every_flag() -> None:
    """Print each setting with what it means, by section."""
    table = make_table("flag", "section", "meaning")
    for name, setting in SETTINGS.items():
        choices = " | ".join(filter(None, setting.metadata.get("choices", ())))
        text = explain_setting(name) + (f" ({choices})" if choices else "")
        table.add_row(flag_of(name), SECTION_OF[name], text)
    open_console().print(table)
