"""Learning rates that a method borrows: a recipe's file has them for DP-SGD with momentum and for DP-Adam, and few others.

A method whose steps are of another length for the same rate takes the rate that makes them alike. It is a start, not a search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpkfc.postprocess.adam_bc import AdamBC
from dpkfc.recipes.settings import RunConfig

__all__ = ["of_adam", "without_momentum"]

_DIGITS = 4


def without_momentum(like: Mapping[str, Any], own: Mapping[str, Any]) -> float:
    """The rate of a method without momentum, from one that was chosen with momentum m: divided by 1 − m.

    For DP-NGD, whose C is of another space, η C / √λ_safe is the η C of DP-SGD (Eq. 16), and η C where nothing is mapped back.
    A normalised clip releases gradients of length 1 whatever C is.

    Args:
        like: settings that the rate was chosen with.
        own: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting is none that a run can have.
    """
    rate = _of(like, "lr") * (1 - _of(own, "momentum")) / (1 - _of(like, "momentum"))
    if own.get("preconditioner") == "ngd":
        rate *= _longest(like) / _longest(own) * (math.sqrt(_of(own, "lambda_safe")) if own["readout"] == "natural" else 1.0)
    return _positive(rate)


def of_adam(rate: float, own: Mapping[str, Any]) -> float:
    """The rate of DP-AdamBC from one of DP-Adam: times √(γ′/Φ), as most entries of v are noise.

    There DP-Adam divides by √Φ and DP-AdamBC by the root of its floor, which falls to 0.03 Φ times `adam_bc_resolution`; that of
    the first steps is larger, so a run of a hundred steps takes a larger rate. With a floor that is given the rate stays as it
    is: Φ is not known before the plan.

    Args:
        rate: of DP-Adam.
        own: settings of the method.

    Raises:
        TypeError, ValueError, ArithmeticError: a setting is none that a run can have.
    """
    if _of(own, "adam_bc_floor") > 0:
        return rate
    beta = AdamBC.betas[1]
    return _positive(rate * math.sqrt(_of(own, "adam_bc_resolution") * math.sqrt(2 * (1 - beta) / (1 + beta))))


def _longest(settings: Mapping[str, Any]) -> float:
    return 1.0 if settings.get("clipping", RunConfig.clipping) == "normalised" else _of(settings, "max_grad_norm")


def _of(settings: Mapping[str, Any], name: str) -> float:
    return float(settings.get(name, getattr(RunConfig, name)))


def _positive(rate: float) -> float:
    if not rate > 0:
        raise ValueError("a setting behind the learning rate is outside its range")
    return float(f"{rate:.{_DIGITS}g}")
