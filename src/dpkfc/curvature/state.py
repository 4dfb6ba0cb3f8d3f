"""A preconditioner as a flat dictionary of tensors, and back, without loss and without unpickling.

Structure, names and Python floats go into one JSON text stored as bytes (`repr` of a float is exact); tensors are
stored under names with an index, since a layer's name may hold any character.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpkfc.metric import Dense, Diagonal, Eigenbasis, Elementwise, Entry, Identity, Kronecker, LowRank, Metric, Side

__all__ = ["mismatch", "moved", "pack", "unpack"]

_Held = TypeVar("_Held", bound=Identity | Diagonal | Dense | LowRank | Eigenbasis)
_META = "meta"
_STORED = "stored"


def pack(metric: Metric, spectra: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Flatten a metric, spectra and JSON-able values into tensors."""
    tensors = _Once()
    entries = [_pack_entry(f"metric.{i}", name, entry, tensors) for i, (name, entry) in enumerate(metric.items())]
    curves: list[list[str]] = []
    for i, (name, sides) in enumerate(spectra.items()):
        for side, values in sides.items():
            key = f"spectrum.{i}.{len(curves)}"
            curves.append([name, side, tensors.put(key, values)])
    text = json.dumps({"metric": entries, "spectra": curves, "rest": dict(rest)})
    tensors.put(_META, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone())
    return tensors.held


class _Once:
    """Tensors by key; one that several layers share is stored under its first key alone."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}

    def put(self, key: str, tensor: Tensor) -> str:
        """The key that the tensor is stored under."""
        known = self._keys.get(id(tensor))
        if known is not None and self.held[known] is tensor:
            return known
        self._keys[id(tensor)] = key
        self.held[key] = tensor
        return key


def _pack_entry(key: str, name: str, entry: Entry, tensors: _Once) -> dict[str, Any]:
    if isinstance(entry, Elementwise):
        roles = {role: tensors.put(f"{key}.{i}", scale) for i, (role, scale) in enumerate(entry.scale.items())}
        return {"layer": name, "elementwise": roles}
    if isinstance(entry, Eigenbasis):
        values = {f.name: getattr(entry, f.name) for f in fields(entry)}
        stored = {k: tensors.put(f"{key}.{k}", x) if isinstance(x, Tensor) else x for k, x in values.items()}
        return {"layer": name, "eigenbasis": stored}
    sides = {side: _pack_side(f"{key}.{side}", getattr(entry, side), tensors) for side in ("input", "output")}
    return {"layer": name, **sides}


def _pack_side(key: str, side: Side, tensors: _Once) -> dict[str, Any]:
    match side:
        case Identity():
            return {"kind": "identity", "factor": side.factor}
        case Diagonal():
            return {"kind": "diagonal", "scale": tensors.put(f"{key}.scale", side.scale)}
        case Dense():
            return {"kind": "dense", "root": tensors.put(f"{key}.root", side.root), "norm": side.norm}
        case LowRank():
            vectors = tensors.put(f"{key}.vectors", side.vectors)
            return {"kind": "lowrank", "vectors": vectors, "scale": tensors.put(f"{key}.scale", side.scale), "tail": side.tail}


def unpack(tensors: Mapping[str, Tensor]) -> tuple[Metric, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `pack` was given.

    Raises:
        ValueError: tensors that `pack` did not write.
    """
    try:
        state = json.loads(bytes(tensors[_META].cpu().tolist()).decode())
        metric = {entry["layer"]: _unpack_entry(entry, tensors) for entry in state["metric"]}
        spectra: dict[str, dict[str, Tensor]] = {}
        for name, side, key in state["spectra"]:
            spectra.setdefault(name, {})[side] = tensors[key]
        return metric, spectra, state["rest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the state of a preconditioner, or a damaged one: {error!r}") from error


def _unpack_entry(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Entry:
    if "elementwise" in entry:
        return Elementwise({role: tensors[key] for role, key in entry["elementwise"].items()})
    if "eigenbasis" in entry:
        stored = entry["eigenbasis"]
        into, out = (None if stored[side] is None else tensors[stored[side]] for side in ("input", "output"))
        rest = stored.get("rest")  # states written before the field existed do not have it
        return Eigenbasis(tensors[stored["scale"]], into, out, None if rest is None else float(rest))
    return Kronecker(_unpack_side(entry["input"], tensors), _unpack_side(entry["output"], tensors))


def _unpack_side(side: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Side:
    match side["kind"]:
        case "identity":
            return Identity(side["factor"])
        case "diagonal":
            return Diagonal(tensors[side["scale"]])
        case "dense":
            return Dense(tensors[side["root"]], side["norm"])
        case "lowrank":
            return LowRank(tensors[side["vectors"]], tensors[side["scale"]], side["tail"])
    raise ValueError(f"unknown side {side['kind']!r}")


def mismatch(shape: Mapping[str, Any], roles: Mapping[str, tuple[int, ...]]) -> str | None:
    """What does not fit between the sides of a layer's map and the shapes of its parameters, or None.

    A weight may be stored as `[d_out, d_in]` or, as in transformers' Conv1D, as `[d_in, d_out]`. Which of the two it is
    follows from the shape it had when the map was built, where that is known.

    Args:
        shape: `kind`, the sizes of the sides and the `stored` shape of the weight, as `Preconditioner.shapes` holds them.
        roles: role to parameter shape, trainable parameters only.
    """
    if shape["kind"] == "elementwise":
        held = {role: tuple(s) for role, s in shape.items() if role not in ("kind", _STORED)}
        return None if held == dict(roles) else f"parameters {dict(roles)}, the preconditioner {held}"
    d_in, d_out = shape["input"][0], shape["output"][0]
    weight = roles.get("weight", (*roles.get("bias", (0,)), 0))
    if shape["kind"] in ("lookup", "tied"):
        rows, columns = (d_in, d_out) if shape["kind"] == "lookup" else (d_out, d_in)
        fits = (weight[0], weight[-1]) == (rows, columns)
        return None if fits else f"a table {tuple(weight)}, the preconditioner one of {(rows, columns)}"
    stored = shape.get(_STORED)
    if "weight" in roles and stored is not None and tuple(stored) != tuple(weight):
        return f"a weight {tuple(weight)}, the preconditioner was built for {tuple(stored)}"
    bias = "bias" in roles
    columns = math.prod(weight[1:]) + bias
    fits = columns == d_in and weight[0] % d_out == 0
    fits = fits or (len(weight) == 2 and (weight[0] + bias, weight[1]) == (d_in, d_out))
    return None if fits else f"a gradient {(weight[0], columns)}, the preconditioner sides {(d_out, d_in)}"


def moved(entry: Entry, device: torch.device | str) -> Entry:
    """The same map with its tensors on a device."""
    if isinstance(entry, Elementwise):
        return Elementwise({role: scale.to(device) for role, scale in entry.scale.items()})
    if isinstance(entry, Eigenbasis):
        return _on(entry, device)
    return Kronecker(_on(entry.input, device), _on(entry.output, device))


def _on(value: _Held, device: torch.device | str) -> _Held:
    tensors = {f.name: getattr(value, f.name) for f in fields(value) if isinstance(getattr(value, f.name), Tensor)}
    return replace(value, **{name: tensor.to(device) for name, tensor in tensors.items()})
