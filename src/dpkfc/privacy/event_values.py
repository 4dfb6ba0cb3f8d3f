"""Events of dp-accounting as plain values, for ledgers and cards, and what can be read off them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import dp_accounting

__all__ = [
    "NEGLIGIBLE_NOISE",
    "convolutions",
    "event_from_dict",
    "event_to_dict",
    "fields",
    "has_no_noise",
    "is_gaussian",
    "parts",
]

NEGLIGIBLE_NOISE = 1e-3  # over the sensitivity


def event_to_dict(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """The event as plain values that JSON keeps exactly: its class under "type", then its fields."""
    return {"type": type(event).__name__} | {name: _plain(getattr(event, name)) for name in fields(event)}


def event_from_dict(data: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """The event that `event_to_dict` described.

    Raises:
        ValueError: an unknown class of event, or fields that do not fit it.
    """
    kind = getattr(dp_accounting, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
        raise ValueError(f"unknown privacy event {data.get('type')!r}; expected the name of a dp_accounting event")
    fields = {name: _rich(value) for name, value in data.items() if name != "type"}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"the fields {sorted(fields)} do not fit the event {data['type']}: {error}") from error


def fields(event: dp_accounting.DpEvent) -> list[str]:
    """Names of the fields; events are attrs classes, which list them there."""
    return [field.name for field in type(event).__attrs_attrs__]


def _plain(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return event_to_dict(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _rich(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_dict(value)
    return [_rich(v) for v in value] if isinstance(value, list) else value


def parts(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    """The event and all events within it."""
    yield event
    for name in fields(event):
        value = getattr(event, name)
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, dp_accounting.DpEvent):
                yield from parts(inner)


def has_no_noise(event: dp_accounting.DpEvent) -> bool:
    """Whether a part of the event releases something without noise, or with too little to hide anything: ε is infinite.

    A release at a thousandth of the sensitivity may lose 5·10⁵; to say so exactly helps nobody, and overflows further on.
    """
    gaussian = (dp_accounting.GaussianDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent)
    return any(
        isinstance(part, dp_accounting.NonPrivateDpEvent)
        or (isinstance(part, gaussian) and part.noise_multiplier < NEGLIGIBLE_NOISE)
        for part in parts(event)
    )


def convolutions(event: dp_accounting.DpEvent) -> int:
    """How many sampled releases PLD convolves for an event."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return int(event.count) * convolutions(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(convolutions, event.events))
    return 0 if is_gaussian(event) else 1  # Gaussian losses add up in closed form


def is_gaussian(event: dp_accounting.DpEvent) -> bool:
    """Whether it is one Gaussian release without sampling."""
    return isinstance(event, dp_accounting.GaussianDpEvent)
