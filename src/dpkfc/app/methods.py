"""The methods by name: sets of settings that a run starts from, never classes or loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from dpkfc.app.toml import tomllib

# By the names of their flags, or by section and key as a TOML file has them.
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of `dpkfc methods`.

    Attributes:
        name: as given to `--method`.
        label: in tables and plots.
        settings: settings that differ from the defaults of a run.
        acts: the parts of a step that it changes: gradient, coordinates, clip, release, read-out,
            filter, optimizer, weights, start.
        side_data: data that it needs next to the private data.
        privacy: extra privacy cost.
        state: numbers kept between steps, d being the parameters.
        cost: of a step, against DP-SGD.
        source: paper, with equation or algorithm.
        equation: what it does, in one line.
        page: its page in docs/methods.
        like: the method whose part of a recipe's file is used where the file has no part for this
            one.
        without_momentum: whether the learning rate of that part was chosen with momentum m. It is
            then divided by 1 − m, which gives steps of the same length; see
            `rate_without_momentum`.
        defines_optimizer: whether another optimizer would be another method.
    """

    name: str
    label: str
    settings: Settings = field(default_factory=dict)
    acts: str
    side_data: str = "none"
    privacy: str = "none"
    state: str
    cost: str
    source: str
    equation: str
    page: str
    like: str = "dp-sgd"
    without_momentum: bool = False
    defines_optimizer: bool = False


_ROWS = tomllib.loads((files("dpkfc.app") / "methods.toml").read_text("utf-8"))
METHODS: Mapping[str, Method] = {name: Method(name=name, **row) for name, row in _ROWS.items()}
METHOD_LABELS = {name: method.label for name, method in METHODS.items()}
