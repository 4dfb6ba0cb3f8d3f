"""Which kind of own data settings name, and which settings follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpkfc._errors import one_name
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.owndata.files import text_width
from dpkfc.app.owndata.proposals import kind_of_data
from dpkfc.app.owndata.schema import Schema, TextForm, read_schema
from dpkfc.app.owndata.targets import target_of
from dpkfc.app.owndata.tasks import load_task, task_examples
from dpkfc.app.recipes.text import WHITENED
from dpkfc.app.toml import ConfigError, ensure_text
from dpkfc.convex import convex_rate, whitened_rate

MOMENTS = "dp-moments"
OWN_KINDS = ("own-table", "own-images", "own-text", "own-task")
# The kinds of data that a setting describes.
_KINDS_OF = {
    "target": OWN_KINDS[:3],
    "schema": OWN_KINDS[:3],
    "text": ("own-text",),
    "label_file": ("own-images",),
}


def own_source(chosen: Mapping[str, Any], known: str = "") -> tuple[str, Schema | None]:
    """Return the kind of own data that settings name, and its schema, which is read here alone.

    Args:
        chosen: settings.
        known: the kind, of a run whose data may since have been moved.

    Returns:
        An empty text for a recipe; no schema where it is left out.

    Raises:
        ConfigError: settings that do not go together, data of an unknown form, or a bad schema.
    """
    kind = known or _own_kind(chosen)
    place = ensure_text(chosen.get("schema"))
    if not place or kind == "own-task":
        return kind, None
    target = str(chosen.get("target", ""))
    schema = read_schema(Path(place), target, may_be_open=bool(chosen.get("bounds")))
    key, stated = str(chosen.get("text") or ""), schema.text.key
    if key and schema.columns:
        raise ConfigError(
            f"{place} has [columns.…], which make a table; leave --text {key:.40} out, or write"
            " [text] in their place"
        )
    if key and stated not in (key, TextForm.key):
        raise ConfigError(
            f"{place} [text]: key is {stated!r:.40}, and --text says {key!r:.40}; leave one out"
        )
    if kind == "own-text" and schema.columns:
        kind = "own-table"
    for section, form in (("images", schema.images), ("text", schema.text)):
        if form != type(form)() and kind != f"own-{section}":
            what = kind.removeprefix("own-")
            raise ConfigError(
                f"{place} has [{section}], and the data are of kind {what}: leave it out"
            )
    if kind == "own-text":
        form = schema.text.settled
        schema = replace(schema, text=replace(form, key=key or stated))
    return kind, schema


def _own_kind(chosen: Mapping[str, Any]) -> str:
    """Return the kind of own data that settings name; JSON lines may also be a table."""
    given = {name: chosen.get(name, "") for name in ("data", "task", *_KINDS_OF)}
    data, task = given["data"], given["task"]
    if not any(given.values()):
        return ""
    kind = ""
    if task:
        kind = "own-task"
    elif data:
        kind = kind_of_data(Path(str(data)))
    if given["label_file"] and not os.path.exists(str(given["label_file"])):
        name = one_name(given["label_file"])
        raise DatasetError(f"{name}: does not exist; --label-file takes a table")
    recipe = chosen.get("recipe", "")
    if not kind:
        raise ConfigError("target, schema, text and label_file describe own data; give --data")
    if data and task:
        raise ConfigError("--data and --task are two sources of examples; leave one out")
    for name, kinds in _KINDS_OF.items():
        if given[name] and kind not in kinds:
            place = one_name(data or task)
            raise ConfigError(
                f"{name} = {given[name]!r:.40} does not apply to {place}; leave it out"
            )
    if recipe not in ("", kind) and (recipe, kind) != ("own-table", "own-text"):
        raise ConfigError(
            f"recipe = {recipe!r} has its own data; leave it out, or leave --data and --task out"
        )
    return kind


def own_settings(chosen: dict[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Return the choice with what follows from own data.

    That is the likelihood of a number, and the probe of a task, or a method without one.

    Raises:
        ConfigError: the task cannot be made.
    """
    name = ensure_text(chosen.get("task"))
    if schema is not None:
        likelihood = target_of(schema).likelihood
        if chosen["recipe"] == "own-text" and schema.text.encoder == "sentences":
            if chosen.get("method", "dp-sgd") == "dp-sgd":
                rate = whitened_rate(text_width(schema), likelihood)
                chosen = {**WHITENED, "lr": rate, **chosen}
        elif chosen["recipe"] == "own-text" and schema.text.encoder == "weighted-words":
            chosen = {"method": "dp-sgd", **chosen}
        elif likelihood == "gaussian" and chosen.get("method", MOMENTS) == MOMENTS:
            chosen = {"lr": convex_rate(likelihood), **chosen}
        return {"likelihood": likelihood, **chosen}
    if not name:
        return chosen
    task = load_task(name)
    inputs, labels = task_examples(task, name).train
    if labels.is_floating_point() and labels.dim() == 1:
        chosen = {"likelihood": "gaussian", **chosen}
    if task.probe is not None:
        return {"source": "tokens", **chosen}
    if not inputs.is_floating_point():
        return {"method": "dp-adam", **chosen}
    return chosen
