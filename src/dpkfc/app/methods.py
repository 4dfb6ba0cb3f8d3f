"""The methods by name: each is a set of settings that a run starts from, never a class or a loop.

The settings of a method replace what a recipe's file says of all methods. What the file says of
this method, a file given with `--config` and flags replace them in turn. Each row also says where
the method acts in a step, what it needs and costs, and where it comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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
            `settings.rate_without_momentum`.
        defines_optimizer: whether another optimizer would be another method.
    """

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
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


def _read_methods() -> dict[str, Method]:
    """Return the rows of `methods.toml`, in its order."""
    text = (files("dpkfc.app") / "methods.toml").read_text("utf-8")
    return {name: Method(name=name, **row) for name, row in tomllib.loads(text).items()}


METHODS: Mapping[str, Method] = _read_methods()
LABELS = {name: method.label for name, method in METHODS.items()}
