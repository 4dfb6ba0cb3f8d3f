"""Where the value of each setting of a run comes from.

Later values replace earlier ones: the defaults, the common part of the recipe's TOML, its part for
a method whose defaults it uses, the method's settings, the recipe's part for that very method, its
part for the optimizer under that method, a file given with `--config`, and flags.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from dpkfc.app.methods import METHODS, Method, Settings
from dpkfc.app.run_config import SETTINGS, RunConfig, check_name, make_config
from dpkfc.app.settings import OPTIMIZERS
from dpkfc.app.settings_file import flatten
from dpkfc.app.toml import ensure_text
from dpkfc.postprocess import AdamBC


def layer_settings(defaults: Settings, chosen: Settings, where: str = "recipe") -> RunConfig:
    """Return a run's settings from a recipe's defaults and what the user chose.

    Args:
        defaults: parsed TOML of the recipe. Beside settings it may hold `[method.NAME]`, settings
            of one method, and in it a table per optimizer. Both apply when that method and that
            optimizer are in force.
        chosen: settings of the user by the names of their flags, which win.
        where: name of the defaults, for errors.

    Raises:
        ConfigError: as `flatten` and `RunConfig`.
    """
    common = dict(defaults)
    per_method = {}
    if isinstance(common.get("method"), Mapping):
        per_method = common.pop("method")
    common = flatten(common, where)
    for key in chosen:
        check_name(key, "settings")
    name = chosen.get("method", common.get("method", SETTINGS["method"].default))
    if ensure_text(name) not in METHODS:
        # `RunConfig` names a wrong method.
        return make_config(method=name)
    method = METHODS[name]
    lender = name if name in per_method else method.like
    table = dict(per_method.get(lender, {}))
    by_optimizer = {key: table.pop(key) for key in OPTIMIZERS if key in table}
    of_method = flatten(table, f"{where} [method.{lender}]")
    borrowed = {**common, **of_method}
    settings = {**borrowed, **method.settings}
    if lender == name:
        # A table of the very method wins over its preset, a borrowed table does not.
        borrowed = {}
        settings |= of_method
    optimizer = chosen.get("optimizer") or settings.get("optimizer") or "adam"
    if ensure_text(optimizer) in by_optimizer:
        settings |= flatten(by_optimizer[optimizer], f"{where} [method.{lender}.{optimizer}]")
    settings |= chosen
    if "epochs" in chosen and not chosen.get("steps"):
        # Steps of the recipe would win.
        settings["steps"] = 0
    if "lr" not in chosen:
        settings |= _borrow_rate(method, optimizer, settings, borrowed, of_method, by_optimizer)
    return make_config(**settings)


# --------------------------------------------------------------------------------------------------
# Learning rates that a method borrows. A recipe's file has rates for DP-SGD with momentum and for
# DP-Adam, and few others. A method whose steps have another length at the same rate takes the rate
# that makes the lengths equal. That is a starting point and not the result of a search.

_DIGITS = 4


def _borrow_rate(
    method: Method,
    optimizer: Any,
    settings: Settings,
    borrowed: Settings,
    of_method: Settings,
    by_optimizer: Settings,
) -> dict[str, float]:
    """Return the learning rate that follows from another method's, {} without such a rate."""
    rate = borrowed.get("lr")
    adam = rate if method.like == "dp-adam" else None
    if "lr" not in of_method and isinstance(by_optimizer.get("adam"), Mapping):
        adam = by_optimizer["adam"].get("lr")
    # `RunConfig` names a wrong value.
    with contextlib.suppress(TypeError, ValueError, ArithmeticError):
        if rate and method.without_momentum and optimizer == "sgd":
            return {"lr": rate_without_momentum(borrowed, settings)}
        if adam and optimizer == "adam-bc" and optimizer not in by_optimizer:
            return {"lr": rate_of_adam_bc(adam, settings)}
    return {}


def rate_without_momentum(lender: Settings, settings: Settings) -> float:
    """Return the rate of a method without momentum, from one that was chosen with momentum m.

    The rate is divided by 1 − m. DP-NGD clips in another space, so η C / √λ_safe takes the place
    of the η C of DP-SGD (Eq. 16), and η C where the step is only preconditioned. A normalised clip
    releases gradients of length 1 whatever C is.

    Args:
        lender: settings that the rate was chosen with.
        settings: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting has a value that no run can have.
    """
    rate = _number(lender, "lr")
    rate = rate * (1 - _number(settings, "momentum")) / (1 - _number(lender, "momentum"))
    if settings.get("preconditioner") == "ngd":
        natural = (
            math.sqrt(_number(settings, "lambda_safe")) if settings["readout"] == "natural" else 1.0
        )
        rate *= _longest(lender) / _longest(settings) * natural
    return _positive(rate)


def rate_of_adam_bc(rate: float, settings: Settings) -> float:
    """Return the rate of DP-AdamBC from one of DP-Adam: times √(γ′/Φ), as most of v is noise.

    There DP-Adam divides by √Φ and DP-AdamBC by the root of its floor, which falls to 0.03 Φ times
    `adam_bc_resolution`. The floor of the first steps is larger, so a run of a hundred steps takes
    a larger rate. With a given floor the rate stays: Φ is not known before the plan.

    Args:
        rate: of DP-Adam.
        settings: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting has a value that no run can have.
    """
    if _number(settings, "adam_bc_floor") > 0:
        return rate
    beta = AdamBC.betas[1]
    resolved = math.sqrt(2 * (1 - beta) / (1 + beta))
    return _positive(rate * math.sqrt(_number(settings, "adam_bc_resolution") * resolved))


def _longest(settings: Settings) -> float:
    """Return the length of the longest gradient that one example contributes."""
    if settings.get("clipping", SETTINGS["clipping"].default) == "normalised":
        return 1.0
    return _number(settings, "max_grad_norm")


def _number(settings: Settings, name: str) -> float:
    value = settings.get(name, SETTINGS[name].default)
    return float(SETTINGS[name].metadata["words"].get(value, value))


def _positive(rate: float) -> float:
    if not rate > 0:
        raise ValueError("a setting behind the learning rate is outside its range")
    return float(f"{rate:.{_DIGITS}g}")
