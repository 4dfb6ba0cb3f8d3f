"""Events of dp-accounting as plain values, for ledgers and cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dp_accounting

__all__ = ["event_from_dict", "event_to_dict", "fields"]


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
