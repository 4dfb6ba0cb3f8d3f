"""Every rule, every norm method and every metric against a loop of autograd over single examples,
in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkfc.gradients.clipped_sum import Clip, ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, PerExample
from dpkfc.linalg.metric import Elementwise, Kronecker, Metric, Side
from dpkfc.linalg.norms import per_example_norms
from tests.gradients.cases import CASES, Case, build, looped, loss_fn
from tests.gradients.whitened import side

SIDES = ("identity", "diagonal", "dense", "lowrank")


def make_metric(layers: list[Layer], kind: str) -> Metric:
    metric: dict[str, Kronecker | Elementwise] = {}
    for layer in layers:
        if layer.rule in ("norm", "fallback"):
            scales = {
                r: torch.rand(layer.tensor(r).shape, dtype=torch.float64) + 0.2
                for r in layer.parameters
            }
            metric[layer.name] = Elementwise(scales)
            continue
        weight = layer.tensor("weight")
        if layer.rule == "embedding":
            rows = side(kind if kind in ("identity", "diagonal") else "diagonal", weight.shape[0])
            metric[layer.name] = Kronecker(rows, side(kind, weight.shape[1]))
        else:
            groups = getattr(layer.module, "groups", 1)
            d_in = weight[0].numel() + ("bias" in layer.parameters)
            metric[layer.name] = Kronecker(side(kind, d_in), side(kind, weight.shape[0] // groups))
    return metric


def dense_side(side: Side, d: int) -> Tensor:
    return side.apply(torch.eye(d, dtype=torch.float64))


def whiten(
    layer: Layer, entry: Kronecker | Elementwise | None, grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The definition: z = U_out g U_in with explicit matrices, one group at a time."""
    own = {role: grads[full] for role, full in layer.parameters.items()}
    if entry is None:
        return {layer.parameters[r]: g for r, g in own.items()}
    if isinstance(entry, Elementwise):
        return {layer.parameters[r]: entry.scale[r] * g for r, g in own.items()}
    if layer.rule == "embedding":
        g = own["weight"]
        z = dense_side(entry.input, g.shape[0]) @ g @ dense_side(entry.output, g.shape[1])
        return {layer.parameters["weight"]: z}
    groups = getattr(layer.module, "groups", 1)
    matrix = own["weight"].flatten(1)
    if "bias" in own:
        matrix = torch.cat([matrix, own["bias"].unsqueeze(1)], 1)
    parts = matrix.view(groups, -1, matrix.shape[1])
    u_in, u_out = dense_side(entry.input, parts.shape[2]), dense_side(entry.output, parts.shape[1])
    z = torch.stack([u_out @ part @ u_in for part in parts]).reshape(matrix.shape)
    result = {
        layer.parameters["weight"]: z[:, : own["weight"][0].numel()].reshape(own["weight"].shape)
    }
    if "bias" in own:
        result[layer.parameters["bias"]] = z[:, -1]
    return result


def brute(
    model: nn.Module, batch: tuple[Tensor, Tensor], layers: list[Layer], metric: Metric
) -> list[dict[str, Tensor]]:
    rows = []
    for grads in looped(model, batch):
        row: dict[str, Tensor] = {}
        for layer in layers:
            row.update(whiten(layer, metric.get(layer.name), grads))
        rows.append(row)
    return rows


def norm(row: dict[str, Tensor]) -> Tensor:
    return torch.sqrt(sum(g.square().sum() for g in row.values()))


def run(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    layers: list[Layer],
    metric: Metric,
    clip: Clip,
    splits: list[int],
):  # noqa: ANN201
    summer = ClippedSummer(layers, metric, clip)
    norms, start = [], 0
    for size in splits:
        part = (batch[0][start : start + size], batch[1][start : start + size])
        tape = Tape(model, layers)
        with tape:
            losses = loss_fn(model, part)
        norms.append(summer.add(tape.backward(losses), size))
        start += size
    return torch.cat(norms), summer.result()


@pytest.mark.parametrize("kind", [None, *SIDES])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_clipped_sum_equals_a_loop(case: Case, kind: str | None) -> None:
    model, batch = build(case)
    layers = find_layers(model)
    metric = make_metric(layers, kind) if kind else {}
    rows = brute(model, batch, layers, metric)
    exact = torch.stack([norm(row) for row in rows])
    c = float(exact.median())
    norms, total = run(model, batch, layers, metric, Clip(c), [5])
    torch.testing.assert_close(norms, exact, rtol=1e-10, atol=1e-12)
    assert bool((norms >= exact * (1 - 1e-14)).all())
    for name in total:
        expected = sum(
            min(1.0, c / float(n)) * row[name] for n, row in zip(exact, rows, strict=True)
        )
        torch.testing.assert_close(
            total[name], expected, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert set(total) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_any_split_gives_the_same_sum(case: Case) -> None:
    model, batch = build(case)
    layers = find_layers(model)
    metric = make_metric(layers, "dense")
    _, whole = run(model, batch, layers, metric, Clip(0.5), [5])
    for splits in ([1, 1, 1, 1, 1], [2, 3], [4, 1]):
        _, parts = run(model, batch, layers, metric, Clip(0.5), splits)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_norm_method_agrees(case: Case, kind: str) -> None:
    model, batch = build(case)
    layers = find_layers(model)
    metric = make_metric(layers, kind)
    tape = Tape(model, layers)
    with tape:
        losses = loss_fn(model, batch)
    calls = tape.backward(losses)
    rows = looped(model, batch)
    for layer in layers:
        block = blocks_of(layer, calls[layer.name], 5)
        exact = torch.stack([norm(whiten(layer, metric[layer.name], row)) for row in rows])
        methods: list[str | None] = [None]
        if isinstance(block, (Outer, ConvBlock)):
            methods = ["gram", "materialised"]
            if isinstance(block, Outer) and block.a.shape[1] == 1:
                methods.append("rank-one")
        else:
            assert isinstance(block, (Lookup, PerExample))
        for method in methods:
            found = per_example_norms(block, metric[layer.name], method).norms
            torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_parameters_gradients_and_flags_are_untouched() -> None:
    model, batch = build(CASES[0])
    before = {n: p.clone() for n, p in model.named_parameters()}
    layers = find_layers(model)
    run(model, batch, layers, {}, Clip(1.0), [5])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
