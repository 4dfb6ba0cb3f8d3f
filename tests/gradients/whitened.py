"""The definition of a whitened gradient with explicit matrices, for every rule, and brute force
over single examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.subspace_clip import spread
from dpkfc.linalg.metric import Elementwise, Kronecker, Metric
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank, Side
from dpkfc.linalg.subspace import Subspace
from tests.gradients.loop import record
from tests.zoo.brute_force import clipped_sum, gradients_of_each, norm_of

Loss = Callable[[nn.Module, Any], Tensor]


def side(kind: str, d: int) -> Side:
    if kind == "identity":
        return Identity(1.7)
    if kind == "diagonal":
        return Diagonal(torch.rand(d, dtype=torch.float64) + 0.2)
    q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    values = torch.rand(d, dtype=torch.float64) + 0.2
    if kind == "dense":
        return Dense((q * values) @ q.T, float(values.max()))
    return LowRank(q[:, : max(1, d // 3)], values[: max(1, d // 3)], 0.9)


def metric_of(layers: Sequence[Layer], kind: str) -> Metric:
    """A random metric of one kind; sides over the rows of a table are diagonal where that kind is
    not allowed.
    """
    metric: dict[str, Kronecker | Elementwise] = {}
    rows = kind if kind in ("identity", "diagonal") else "diagonal"
    for layer in layers:
        if layer.rule in ("norm", "fallback", "recurrent"):
            scale = {
                r: torch.rand(layer.tensor(r).shape, dtype=torch.float64) + 0.2
                for r in layer.parameters
            }
            metric[layer.name] = Elementwise(scale)
        elif layer.rule == "embedding":
            v, d = layer.tensor("weight").shape
            metric[layer.name] = Kronecker(side(rows, v), side(kind, d))
        else:
            d_out, d_in = matrix(layer, {r: layer.tensor(r) for r in layer.parameters}).shape
            d_out //= getattr(layer.module, "groups", 1)
            metric[layer.name] = Kronecker(
                side(kind, d_in), side(rows if layer.rule == "tied" else kind, d_out)
            )
    return metric


def matrix(layer: Layer, own: Mapping[str, Tensor]) -> Tensor:
    """The gradient of a matrix-shaped layer `[d_out, d_in (+ 1)]`, ungrouped."""
    columns = []
    if "weight" in own:
        columns.append(own["weight"].T if layer.transposed else own["weight"].flatten(1))
    if "bias" in own:
        columns.append(own["bias"].unsqueeze(1))
    return torch.cat(columns, 1)


def whiten(
    layer: Layer, entry: Kronecker | Elementwise | None, grads: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Parameter name to the part of z = U_out g U_in that belongs to it, one group at a time."""
    own = {role: grads[full] for role, full in layer.parameters.items()}
    if isinstance(entry, Elementwise):
        return {layer.parameters[r]: entry.scale[r] * g for r, g in own.items()}
    if entry is None:
        return {layer.parameters[r]: g for r, g in own.items()}
    g = own["weight"].T if layer.rule == "embedding" else matrix(layer, own)
    parts = g.reshape(getattr(layer.module, "groups", 1), -1, g.shape[1])
    u_out, u_in = explicit(entry.output, parts.shape[1]), explicit(entry.input, parts.shape[2])
    z = (u_out @ parts @ u_in).view(g.shape)
    if layer.rule == "embedding":
        return {layer.parameters["weight"]: z.T}
    result = {}
    if "weight" in own:
        z_weight = z[:, :-1] if "bias" in own else z
        result[layer.parameters["weight"]] = (z_weight.T if layer.transposed else z_weight).reshape(
            own["weight"].shape
        )
    if "bias" in own:
        result[layer.parameters["bias"]] = z[:, -1]
    return result


def explicit(of: Side, d: int) -> Tensor:
    return of.apply(torch.eye(d, dtype=torch.float64))


def example_rows(batch: Any, chosen: Sequence[int]) -> Any:
    """Some examples of a batch, a dict or a tuple of tensors."""
    if isinstance(batch, Mapping):
        return {name: x[list(chosen)] for name, x in batch.items()}
    return tuple(x[list(chosen)] for x in batch)


def size_of(batch: Any) -> int:
    return len(next(iter(batch.values()) if isinstance(batch, Mapping) else iter(batch)))


def loop_gradients(model: nn.Module, batch: Any, loss_fn: Loss) -> list[dict[str, Tensor]]:
    """The gradient of every single example by plain autograd."""
    singles = [example_rows(batch, [i]) for i in range(size_of(batch))]
    return gradients_of_each(model, singles, loss_fn)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return the entries of all tensors in float64."""
    return torch.cat([x.flatten().double() for x in tensors.values()])


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def stack_directions(model: nn.Module, basis: Subspace) -> Tensor:
    """Return L as a matrix over all trainable parameters `[P, K]`, column by column."""
    layers = find_layers(model)
    parameters = trained(model)
    columns = []
    for one in torch.eye(basis.width, dtype=torch.float64):
        along = spread(basis, layers, lambda span, one=one: span.combine(one))
        columns.append(flat({n: along.get(n, torch.zeros_like(p)) for n, p in parameters.items()}))
    return torch.stack(columns, 1)


def clip_in_library(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: Any,
    loss_fn: Loss,
    clip: float | Clip,
    metric: Metric | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(norms, clipped sum) by the library."""
    clip = clip if isinstance(clip, Clip) else Clip(clip)
    summer = ClippedSummer(layers, metric or {}, clip)
    calls = record(model, layers, lambda: loss_fn(model, batch))
    return summer.add(calls, size_of(batch)), summer.result()


def check(
    model: nn.Module, batch: Any, loss_fn: Loss, kind: str | None = None, tolerance: float = 1e-9
) -> None:
    """Norms and clipped sum against the loop, and a split into micro-batches of one against the
    whole.
    """
    layers = find_layers(model)
    metric = metric_of(layers, kind) if kind else {}
    rows = []
    for grads in loop_gradients(model, batch, loss_fn):
        row: dict[str, Tensor] = {}
        for layer in layers:
            row.update(whiten(layer, metric.get(layer.name), grads))
        rows.append(row)
    exact = torch.tensor([norm_of(row) for row in rows], dtype=torch.float64)
    c = float(exact.median())
    norms, total = clip_in_library(model, layers, batch, loss_fn, c, metric)
    assert_close(norms, exact, rtol=tolerance, atol=1e-12)
    assert bool((norms >= exact * (1 - 1e-14)).all())
    assert set(total) == {name for name, p in model.named_parameters() if p.requires_grad}
    parts = [
        clip_in_library(model, layers, example_rows(batch, [i]), loss_fn, c, metric)[1]
        for i in range(len(rows))
    ]
    for name, expected in clipped_sum(rows, c).items():
        for found in (total[name], sum(part[name] for part in parts)):
            assert found.shape == expected.shape
            assert_close(
                found,
                expected,
                rtol=tolerance,
                atol=tolerance * norm_of(total),
                msg=lambda m, name=name: f"{name}: {m}",
            )
