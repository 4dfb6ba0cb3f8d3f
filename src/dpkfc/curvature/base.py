"""What the settings of all preconditioners have in common: checks, and what they say of their probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from dpkfc.curvature.probe_pass import ProbeRun
from dpkfc.curvature.probes import Probe

USUAL_EXAMPLES = 256


def check_probe(probe: Any, name: str = "probe") -> None:
    """Raise unless a value can be sampled.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(probe, Probe):
        raise ValueError(f"{name} must have sample() and describe(), as PinkNoise(shape) has; got {probe!r}")


def check_choices(config: Any, choices: dict[str, tuple[Any, ...]]) -> None:
    """Raise where a field is none of its allowed values.

    Raises:
        ValueError: naming the field and the values.
    """
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {getattr(config, name)!r}")


def check_positive(config: Any, names: Sequence[str]) -> None:
    """Raise where a field is not an integer of at least 1; None passes where it is a field's default.

    Raises:
        ValueError: naming the field.
    """
    optional = {f.name for f in fields(config) if f.default is None}
    for name in names:
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def run_of(config: Any, step: int) -> ProbeRun:
    """The probe of one refresh, for settings that name all of it."""
    return ProbeRun(
        probe=config.probe, size=probe_examples(config.probe, config.probe_size), chunk=config.chunk, labels=config.labels,
        likelihood=config.likelihood, loss=config.loss, seed=config.seed, step=step,
    )  # fmt: skip


def probe_examples(probe: Probe, wanted: int | None) -> int:
    """Examples of a refresh: as many as wanted, by default all that the probe holds, or 256 of an endless one."""
    return int(probe.describe().get("examples", USUAL_EXAMPLES)) if wanted is None else wanted


def labels_of(probe: Probe, labels: str) -> str:
    """Labels of one probe of several: `given` falls back to the model's own where a probe holds none."""
    return "model" if labels == "given" and not probe.describe().get("labelled") else labels


def described(config: Any, name: str, **more: Any) -> dict[str, Any]:
    """JSON-able description of a preconditioner: its fields, where its curvature comes from and whether that is private."""
    sources = {"probe": config.probe, "output_probe": getattr(config, "output_probe", None)}
    probes = {role: None if source is None else source.describe() for role, source in sources.items()}
    held = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in (*sources, "loss")}
    told = [_told(probe) for probe in probes.values() if probe is not None]
    return {
        "name": name,
        **held,
        "probe_size": probe_examples(config.probe, config.probe_size),
        **more,
        **({"labels_that_do_not_fit": "drawn from the model"} if {**held, **more}.get("labels") == "given" else {}),
        **{role: probe for role, probe in probes.items() if role == "probe" or hasattr(config, role)},
        "loss": None if config.loss is None else function_name(config.loss),
        "curvature_source": told[0] if len(told) == 1 else f"A from {told[0]}; G from {told[1]}",
        "uses_private_data": any(probe.get("uses_private_data", False) for probe in probes.values() if probe),
    }


def _told(probe: Mapping[str, Any]) -> str:
    source = str(probe.get("source", "unknown"))
    return f"{source}: {probe['provenance']}" if "provenance" in probe else source


def function_name(function: Callable[..., Any]) -> str:
    """Where a function comes from; its contents are the caller's to keep fixed."""
    named = function if hasattr(function, "__qualname__") else type(function)
    # Hashes of plans hold this name, so a module keeps its first name in them.
    module = named.__module__.replace("dpkfc.curvature.probe_loss", "dpkfc.curvature.likelihood")
    return f"{module}.{named.__qualname__}"
