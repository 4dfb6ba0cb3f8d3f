"""Every rule, every norm method and every metric against a loop of autograd over single examples,
in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, PerExample
from dpkfc.linalg.metric import Metric
from dpkfc.linalg.norms import per_example_norms
from tests.gradients.cases import CASES, Case, build, looped, loss_fn
from tests.gradients.whitened import metric_of, whiten

SIDES = ("identity", "diagonal", "dense", "lowrank")


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
    metric = metric_of(layers, kind) if kind else {}
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
    metric = metric_of(layers, "dense")
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
    metric = metric_of(layers, kind)
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
