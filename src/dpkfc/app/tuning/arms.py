"""What a study compares: methods as arms, each with the settings that are searched, as values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dpkfc.app.methods import METHODS
from dpkfc.app.toml import nearest
from dpkfc.app.tuning.runs import Plain, Run, StudyError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, uniform or uniform in the logarithm.

    With `times`, names of other ranges of the space and their powers, the bounds hold for the
    product with them. A step of DP-SGD has length lr · C where examples are clipped. Good values of
    lr and C so lie along a ridge that independent samples of both mostly miss. A step of DP-NGD has
    length lr · C / √λ_safe (Eq. 16), one of DP-AdamBC lr over the root of its floor.
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
    """One method of a comparison.

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
_TIMES_C = (("max_grad_norm", 1.0),)
_STEP = {"lr": Range(0.01, 4.0, times=_TIMES_C)}
_WITHOUT_MOMENTUM = {"lr": Range(0.03, 10.0, times=_TIMES_C)}
_NATURAL = {"lr": Range(0.03, 10.0, times=(*_TIMES_C, ("lambda_safe", -0.5)))}
_ADAM = {"lr": Range(3e-4, 3e-2)}
_ADAM_BC = {
    "lr": Range(5e-5, 2e-2, times=(("adam_bc_resolution", -0.5),)),
    "adam_bc_resolution": Range(2.0, 500.0),
}
_PINK = {"power_exponent": Range(0.0, 2.0, log=False)}
_ZIPF = {"zipf_exponent": Range(0.0, 1.5, log=False)}
_KFAC = {"damping": Range(0.01, 1.0), **_CLIP, **_PINK}
_ADADPS = {**_STEP, "adadps_floor": Range(1e-3, 1.0), **_CLIP}
_SPACES: dict[str, Space] = {
    "dp-sgd": {**_STEP, **_CLIP},
    "dp-sgd-pt": {**_STEP, **_CLIP},
    "dp-adam": {**_ADAM, **_CLIP},
    "dp-adamw": {**_ADAM, **_CLIP, "weight_decay": Range(1e-4, 0.1)},
    # The learning rate and C are one number here.
    "dp-sgd-normalised": dict(_SGD),
    "adadps": _ADADPS,
    "pink-adadps": _ADADPS,
    "gep": {
        **_SGD,
        "gep_embedding_norm": Range(0.5, 20.0),
        "gep_residual_norm": Range(0.2, 10.0),
    },
    "b-gep": {**_SGD, "gep_embedding_norm": Range(0.5, 20.0)},
    "dp-kfc": _KFAC,
    "dp-kfc-a": _KFAC,
    "dp-kfc-g": _KFAC,
    "dp-kfc-random": _KFAC,
    "dp-kfc-natural": {"lr": Range(0.002, 1.0, times=_TIMES_C), **_KFAC},
    "dp-ngd": {
        **_NATURAL,
        "lambda_safe": Range(1e-4, 0.1),
        "max_grad_norm": Range(1.0, 30.0),
    },
    "disk": {
        **_WITHOUT_MOMENTUM,
        **_CLIP,
        "filter_kappa": Range(0.1, 0.9, log=False),
        "disk_gamma": Choice((0.3, 0.5, 0.7, 1.0)),
    },
    "doppler": {**_WITHOUT_MOMENTUM, **_CLIP, "doppler_cutoff": Range(0.02, 0.5)},
    "dp-adambc": {**_ADAM_BC, **_CLIP},
    "sofim": {
        **_STEP,
        **_CLIP,
        "sofim_rho": Range(0.01, 10.0),
        "sofim_beta": Choice((0.5, 0.9, 0.99)),
    },
    "de-et-al": {"lr": Range(0.05, 10.0)},
}
# Arms that every comparison holds unless asked to leave them out. `arms_for` says when it leaves
# out the last one.
CONTROLS = ("dp-sgd-normalised", "dp-sgd-matched", "dp-kfc-a", "dp-kfc-random")


def arm_of(recipe: str, method: str, optimizer: str = "") -> Arm:
    """Return the arm of a method, with its search space for its optimizer.

    Args:
        recipe: whose file may name the optimizer of a method.
        method: as of `dpkfc train --method`, or `dp-sgd-matched`: DP-SGD with the optimizer of the
            others and one number for lr·C, at a bound that clips every example. A preconditioner
            of a large scale does the same by itself.
        optimizer: for methods that take any; empty as the method says.

    Raises:
        StudyError: an unknown method; the nearest one is named.
    """
    if method == "dp-sgd-matched":
        return Arm(
            name=method,
            label="DP-SGD, lr·C matched",
            method="dp-sgd",
            settings={"max_grad_norm": 0.05},
            space={"lr": Range(0.2, 20.0)},
            first={"lr": 2.0},
            control=True,
        )
    if method not in METHODS:
        known = [*METHODS, "dp-sgd-matched"]
        raise StudyError(f"unknown method {method!r}; {nearest(method, known)}")
    row = METHODS[method]
    arm = Arm(
        name=method,
        label=row.label,
        method=method,
        space=_search_space(recipe, method, optimizer),
        control=method in CONTROLS,
    )
    if not optimizer or row.defines_optimizer:
        return arm
    return replace(
        arm,
        name=f"{method}+{optimizer}",
        label=f"{row.label} + {optimizer}",
        settings={"optimizer": optimizer},
    )


def _search_space(recipe: str, method: str, optimizer: str) -> Space:
    run = Run.make(recipe, method)
    space: Space = _SPACES.get(method, _SGD)
    if optimizer not in ("", "sgd") and not METHODS[method].defines_optimizer:
        space = _remove(space, ["lr"])
    if "lr" not in space:
        is_clipped = "max_grad_norm" in space
        rates = _rates(optimizer or run.default("optimizer"), is_clipped)
        space = {**rates, **space}
    source = run.default("source")
    if "power_exponent" in space and source != "pink":
        space = _remove(space, _PINK)
        if source == "tokens":
            space = {**space, **_ZIPF}
    return space


def _remove(space: Space, names: Collection[str]) -> Space:
    return {name: values for name, values in space.items() if name not in names}


def _rates(optimizer: str, is_clipped: bool) -> Space:
    """Return the ranges of an optimizer; Adam's step does not grow with C."""
    if optimizer == "adam-bc":
        return _ADAM_BC
    if optimizer == "adam":
        return _ADAM
    return _STEP if is_clipped else _SGD


def _whitens_one_side(method: str) -> bool:
    row = METHODS.get(method)
    return row is not None and row.settings.get("sides") in ("input", "output")


def random_twin(arm: Arm) -> Arm:
    """Return the arm with random orthogonal directions in place of its eigenvectors.

    Spectra, sides, read-out and search stay the same.
    """
    return replace(
        arm,
        name=f"{arm.name}-random",
        label=f"{arm.label}: random, same spectrum",
        control=True,
        settings={**arm.settings, "control": "random"},
    )


def arms_for(
    recipe: str, methods: list[str], *, controls: bool = True, optimizer: str = ""
) -> list[Arm]:
    """Return the arms of methods, and the controls that belong next to them.

    A method that was asked for is not a control. A method that whitens one side only has a control
    of random directions on that side (`random_twin`). That control replaces `dp-kfc-random`, which
    has random directions on both sides and stays next to `dp-kfc`.

    Raises:
        StudyError: an unknown method, or one given twice.
    """
    for method in methods:
        if methods.count(method) > 1:
            raise StudyError(f"--method {method} is given twice; every method has its trials once")
    arms = [replace(arm_of(recipe, name, optimizer), control=False) for name in methods]
    if not controls:
        return arms
    one_sided = [name for name in methods if _whitens_one_side(name)]
    for name in CONTROLS:
        is_replaced = name == "dp-kfc-random" and one_sided and "dp-kfc" not in methods
        if name not in methods and not is_replaced:
            arms.append(arm_of(recipe, name, optimizer))
    arms += [random_twin(arm_of(recipe, name, optimizer)) for name in one_sided]
    return arms
