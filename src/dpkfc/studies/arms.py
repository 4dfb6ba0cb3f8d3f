"""What is compared: methods as arms of a study, each with the settings that are searched and their ranges, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dpkfc.recipes.config import nearest
from dpkfc.recipes.methods import METHODS
from dpkfc.studies.cell import Plain, Run
from dpkfc.studies.errors import StudyError

__all__ = ["CONTROLS", "Arm", "Choice", "Range", "Space", "arm_of", "arms_for", "random_twin", "with_public", "with_source"]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, uniform or uniform in the logarithm.

    With `times`, names of other ranges of the space and their powers, the bounds are those of the product with them. A step of
    DP-SGD is lr · C long where examples are clipped, so good values of lr and C lie along a ridge that independent draws of both
    mostly miss; one of DP-NGD is lr · C / √λ_safe (Eq. 16), and lr over the root of its floor one of DP-AdamBC.
    """

    low: float
    high: float
    log: bool = True
    times: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Plain, ...]


Space = Mapping[str, Range | Choice]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of a comparison.

    Attributes:
        name: unique within a study.
        label: in tables.
        method: as of `dpkfc train --method`.
        settings: fixed ones, over the recipe's.
        space: settings that are searched.
        first: where the search begins; empty takes what the recipe gives.
        control: a control that is matched to the other arms, not a method that is compared.
    """

    name: str
    label: str
    method: str
    settings: Mapping[str, Plain] = field(default_factory=dict)
    space: Space = field(default_factory=dict)
    first: Mapping[str, Plain] = field(default_factory=dict)
    control: bool = False


_CLIP = {"max_grad_norm": Range(0.1, 10.0)}
_SGD = {"lr": Range(0.01, 4.0)}
_STEP = {"lr": Range(0.01, 4.0, times=(("max_grad_norm", 1.0),))}
_WITHOUT_MOMENTUM = {"lr": Range(0.03, 10.0, times=(("max_grad_norm", 1.0),))}
_NATURAL = {"lr": Range(0.03, 10.0, times=(("max_grad_norm", 1.0), ("lambda_safe", -0.5)))}
_ADAM = {"lr": Range(3e-4, 3e-2)}
_ADAM_BC = {"lr": Range(5e-5, 2e-2, times=(("adam_bc_resolution", -0.5),)), "adam_bc_resolution": Range(2.0, 500.0)}
_KFAC = {"damping": Range(0.01, 1.0), **_CLIP}
_PINK = {"power_exponent": Range(0.0, 2.0, log=False)}
_ZIPF = {"zipf_exponent": Range(0.0, 1.5, log=False)}

_SPACES: dict[str, dict[str, Range | Choice]] = {
    "dp-sgd": {**_STEP, **_CLIP},
    "dp-adam": {**_ADAM, **_CLIP},
    "dp-adamw": {**_ADAM, **_CLIP, "weight_decay": Range(1e-4, 0.1)},
    "dp-sgd-normalised": dict(_SGD),  # lr and C are one number here
    "adadps": {**_STEP, "adadps_floor": Range(1e-3, 1.0), **_CLIP},
    "pink-adadps": {**_STEP, "adadps_floor": Range(1e-3, 1.0), **_CLIP},
    "dp2": {**_WITHOUT_MOMENTUM, **_CLIP, "dp2_phase": Choice((10, 50, 200)), "dp2_ratio": Range(0.1, 10.0)},
    "gep": {**_SGD, "gep_embedding_norm": Range(0.5, 20.0), "gep_residual_norm": Range(0.2, 10.0)},
    "b-gep": {**_SGD, "gep_embedding_norm": Range(0.5, 20.0)},
    "dp-kfc": {**_KFAC, **_PINK},
    "dp-kfc-a": {**_KFAC, **_PINK},
    "dp-kfc-natural": {"lr": Range(0.002, 1.0, times=(("max_grad_norm", 1.0),)), **_KFAC, **_PINK},
    "dp-kfc-g": {**_KFAC, **_PINK},
    "dp-kfc-random": {**_KFAC, **_PINK},
    "dp-ngd": {**_NATURAL, "lambda_safe": Range(1e-4, 0.1), "max_grad_norm": Range(1.0, 30.0)},
    "disk": {
        **_WITHOUT_MOMENTUM, **_CLIP, "filter_kappa": Range(0.1, 0.9, log=False), "disk_gamma": Choice((0.3, 0.5, 0.7, 1.0)),
    },
    "doppler": {**_WITHOUT_MOMENTUM, **_CLIP, "doppler_cutoff": Range(0.02, 0.5)},
    "dp-adambc": {**_ADAM_BC, **_CLIP},
    "sofim": {**_STEP, **_CLIP, "sofim_rho": Range(0.01, 10.0), "sofim_beta": Choice((0.5, 0.9, 0.99))},
    "de-et-al": {"lr": Range(0.05, 10.0)},
    "dp-sgd-pt": {**_STEP, **_CLIP},
}  # fmt: skip

CONTROLS = ("dp-sgd-normalised", "dp-sgd-matched", "dp-kfc-a", "dp-kfc-random")
"""Arms that every comparison holds unless it is asked to leave them out; see `arms_for` for the last one."""


def arm_of(recipe: str, method: str, optimizer: str = "") -> Arm:
    """The arm of a method, with its search space for the optimizer it takes.

    Args:
        recipe: whose file may name the optimizer of a method.
        method: as of `dpkfc train --method`, or `dp-sgd-matched`: DP-SGD with the optimizer of the others and one number for
            lr·C, at a bound that clips every example, which is what a preconditioner of a large scale does by itself.
        optimizer: for methods that take any; empty as the method says.

    Raises:
        StudyError: an unknown method; the nearest one is named.
    """
    if method == "dp-sgd-matched":
        return Arm(
            name=method, label="DP-SGD, lr·C matched", method="dp-sgd", settings={"max_grad_norm": 0.05},
            space={"lr": Range(0.2, 20.0)}, first={"lr": 2.0}, control=True,
        )  # fmt: skip
    if method not in METHODS:
        raise StudyError(f"unknown method {method!r}; {nearest(method, [*METHODS, 'dp-sgd-matched'])}")
    row = METHODS[method]
    space = dict(_SPACES.get(method, _SGD))
    takes = optimizer or Run.of(recipe, method).default("optimizer")
    if optimizer not in ("", "sgd") and not row.defines_optimizer:
        space.pop("lr", None)
    if "lr" not in space:
        space = {**_rates(takes, "max_grad_norm" in space), **space}
    if "power_exponent" in space and (source := Run.of(recipe, method).default("source")) != "pink":
        space = {**{key: value for key, value in space.items() if key not in _PINK}, **(_ZIPF if source == "tokens" else {})}
    settings = {"optimizer": optimizer} if optimizer and not row.defines_optimizer else {}
    name = f"{method}+{optimizer}" if settings else method
    label = f"{row.label} + {optimizer}" if settings else row.label
    return Arm(name=name, label=label, method=method, settings=settings, space=space, control=method in CONTROLS)


def _whitens_one_side(method: str) -> bool:
    return method in METHODS and METHODS[method].settings.get("sides") in ("input", "output")


def random_twin(arm: Arm) -> Arm:
    """The arm with random orthogonal directions in place of its eigenvectors: the same spectra, sides, read-out and search."""
    return replace(
        arm, name=f"{arm.name}-random", label=f"{arm.label}: random, same spectrum", control=True,
        settings={**arm.settings, "control": "random"},
    )  # fmt: skip


def _rates(optimizer: str, clipped: bool) -> Space:
    """The ranges of an optimizer; Adam's step does not grow with C."""
    if optimizer == "adam-bc":
        return _ADAM_BC
    return _ADAM if optimizer == "adam" else _STEP if clipped else _SGD


def with_public(arm: Arm, public: str, name: str, label: str) -> Arm:
    """The arm with curvature from public examples."""
    return with_source(arm, "public", name, label, public_data=public)


def with_source(arm: Arm, source: str, name: str, label: str, **settings: Plain) -> Arm:
    """The arm with curvature from a source that has no exponent to search."""
    space = {key: value for key, value in arm.space.items() if key not in {**_PINK, **_ZIPF}}
    return replace(arm, name=name, label=label, settings={**arm.settings, "source": source, **settings}, space=space)


def arms_for(recipe: str, methods: list[str], *, controls: bool = True, optimizer: str = "") -> list[Arm]:
    """The arms of a list of methods, and the controls that belong beside them; a method that was asked for is none.

    A method that whitens one side only has a control of random directions on that side (`random_twin`), in place of
    `dp-kfc-random`, which has them on both and stays beside `dp-kfc`, or where no method of DP-KFC is compared.

    Raises:
        StudyError: an unknown method, or one given twice.
    """
    twice = next((m for m in methods if methods.count(m) > 1), None)
    if twice is not None:
        raise StudyError(f"--method {twice} is given twice; every method has its trials once")
    twins = [random_twin(arm_of(recipe, name, optimizer)) for name in methods if controls and _whitens_one_side(name)]
    beside = [name for name in CONTROLS if controls and name not in methods]
    if twins and "dp-kfc" not in methods:
        beside = [name for name in beside if name != "dp-kfc-random"]
    asked = [replace(arm_of(recipe, name, optimizer), control=False) for name in methods]
    return [*asked, *(arm_of(recipe, name, optimizer) for name in beside), *twins]
