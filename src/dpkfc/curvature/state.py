"""A preconditioner as a flat dictionary of tensors, and back, without loss and without unpickling.

Structure, names and Python floats go into one JSON text stored as bytes (`repr` of a float is exact); tensors are
stored under names with an index, since a layer's name may hold any character.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dpkfc.metric import Dense, Diagonal, Elementwise, Identity, Kronecker, LowRank, Metric, Side

__all__ = ["mismatch", "moved", "pack", "unpack"]

_META = "meta"


def pack(metric: Metric, spectra: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Flatten a metric, spectra and JSON-able values into tensors."""
    tensors: dict[str, Tensor] = {}
    entries = [_pack_entry(f"metric.{i}", name, entry, tensors) for i, (name, entry) in enumerate(metric.items())]
    curves: list[list[str]] = []
    for i, (name, sides) in enumerate(spectra.items()):
        for side, values in sides.items():
            key = f"spectrum.{i}.{len(curves)}"
            tensors[key] = values
            curves.append([name, side, key])
    text = json.dumps({"metric": entries, "spectra": curves, "rest": dict(rest)})
    tensors[_META] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
    return tensors


def _pack_entry(key: str, name: str, entry: Kronecker | Elementwise, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(entry, Elementwise):
        roles = {}
        for i, (role, scale) in enumerate(entry.scale.items()):
            tensors[f"{key}.{i}"] = scale
            roles[role] = f"{key}.{i}"
        return {"layer": name, "elementwise": roles}
    sides = {side: _pack_side(f"{key}.{side}", getattr(entry, side), tensors) for side in ("input", "output")}
    return {"layer": name, **sides}


def _pack_side(key: str, side: Side, tensors: dict[str, Tensor]) -> dict[str, Any]:
    match side:
        case Identity():
            return {"kind": "identity", "factor": side.factor}
        case Diagonal():
            tensors[f"{key}.scale"] = side.scale
            return {"kind": "diagonal", "key": key}
        case Dense():
            tensors[f"{key}.root"] = side.root
            return {"kind": "dense", "key": key, "norm": side.norm}
        case LowRank():
            tensors[f"{key}.vectors"], tensors[f"{key}.scale"] = side.vectors, side.scale
            return {"kind": "lowrank", "key": key, "tail": side.tail}


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


def _unpack_entry(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Kronecker | Elementwise:
    if "elementwise" in entry:
        return Elementwise({role: tensors[key] for role, key in entry["elementwise"].items()})
    return Kronecker(_unpack_side(entry["input"], tensors), _unpack_side(entry["output"], tensors))


def _unpack_side(side: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Side:
    key = side.get("key")
    match side["kind"]:
        case "identity":
            return Identity(side["factor"])
        case "diagonal":
            return Diagonal(tensors[f"{key}.scale"])
        case "dense":
            return Dense(tensors[f"{key}.root"], side["norm"])
        case "lowrank":
            return LowRank(tensors[f"{key}.vectors"], tensors[f"{key}.scale"], side["tail"])
    raise ValueError(f"unknown side {side['kind']!r}")


def mismatch(shape: Mapping[str, Any], roles: Mapping[str, tuple[int, ...]]) -> str | None:
    """What does not fit between the sides of a layer's map and the shapes of its parameters, or None.

    Args:
        shape: `kind` and the sizes of the sides, as `Preconditioner.shapes` holds them.
        roles: role to parameter shape, trainable parameters only.
    """
    if shape["kind"] == "elementwise":
        held = {role: tuple(s) for role, s in shape.items() if role != "kind"}
        return None if held == dict(roles) else f"parameters {dict(roles)}, the preconditioner {held}"
    d_in, d_out = shape["input"][0], shape["output"][0]
    weight = roles.get("weight", (*roles.get("bias", (0,)), 0))
    if shape["kind"] == "lookup":
        fits = (weight[0], weight[-1]) == (d_in, d_out)
        return None if fits else f"a table {tuple(weight)}, the preconditioner sides {(d_in, d_out)}"
    columns = math.prod(weight[1:]) + ("bias" in roles)
    fits = columns == d_in and weight[0] % d_out == 0
    return None if fits else f"a gradient {(weight[0], columns)}, the preconditioner sides {(d_out, d_in)}"


def moved(entry: Kronecker | Elementwise, device: torch.device | str) -> Kronecker | Elementwise:
    """The same map with its tensors on a device."""
    if isinstance(entry, Elementwise):
        return Elementwise({role: scale.to(device) for role, scale in entry.scale.items()})
    return Kronecker(_moved_side(entry.input, device), _moved_side(entry.output, device))


def _moved_side(side: Side, device: torch.device | str) -> Side:
    tensors = {f.name: getattr(side, f.name) for f in fields(side) if isinstance(getattr(side, f.name), Tensor)}
    return replace(side, **{name: tensor.to(device) for name, tensor in tensors.items()})
