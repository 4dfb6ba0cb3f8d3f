"""Give settings back as arguments of the dataclasses of the library that they belong to."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from dpkfc.app.run_config import SECTION_OF, SETTINGS, RunConfig
from dpkfc.report.officer import Declared
from dpkfc.terminal import argument_text


def explain_setting(name: str) -> str:
    """Return what a setting means, with the classes that it belongs to if only some have it."""
    rules = SETTINGS[name].metadata
    owners = rules.get("owners", ())
    text = rules.get("help", "")
    if owners and not text:
        # The first clause.
        documented = argument_text(_find_owner(owners[0]), library_key(name))
        text = re.split(r"(?<!et al)[.:;] ", documented)[0].removesuffix(".")
    text = text or argument_text(Declared, name)
    shown = SECTION_OF[name] in ("preconditioner", "postprocess") and owners
    return f"{', '.join(owners)}: {text}" if shown else text


def library_key(name: str) -> str:
    """Return the name of the field of the library that a setting is."""
    key: str = SETTINGS[name].metadata["key"]
    return key or name


def _find_owner(name: str) -> type:
    """Return a dataclass of the library by its name; its module needs torch."""
    from dpkfc.config import PrivacyConfig
    from dpkfc.curvature import GEP, KFAC, NGD, AdaDPS, DeadLeaves, PinkNoise
    from dpkfc.postprocess import SOFIM, AdamBC, DiSK

    known = (PrivacyConfig, GEP, KFAC, NGD, AdaDPS, DeadLeaves, PinkNoise, SOFIM, AdamBC, DiSK)
    return next(owner for owner in known if owner.__name__ == name)


def library_values(config: RunConfig, owner: type) -> dict[str, Any]:
    """Return the settings that are fields of a dataclass of the library, as its arguments."""
    kinds = {found.name: str(found.type) for found in dataclasses.fields(owner)}
    values = {}
    for name, setting in SETTINGS.items():
        if owner.__name__ in setting.metadata.get("owners", ()):
            key = library_key(name)
            values[key] = _library_value(setting, config.values[name], kinds[key])
    return values


def _library_value(setting: dataclasses.Field[Any], value: Any, kind: str) -> Any:
    """Return the value of a setting in the type of a field of the library."""
    words = {number: word for word, number in setting.metadata["words"].items()}
    value = words.get(value, value)
    if kind.startswith("tuple"):
        value = tuple(value.replace(",", " ").split())
    return value or None if "None" in kind else value
