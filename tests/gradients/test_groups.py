"""Groups of rows as one example, for every kind of layer, against a loop over groups in float64."""

from __future__ import annotations

import pytest
import torch

from dpkfc.data.loading import layout
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_sum import clipped_sum
from dpkfc.gradients.discovery import find_layers
from tests.gradients.cases import CASES, build, loss_fn, reader
from tests.gradients.whitened import looped
from tests.zoo.brute_force import clipped_sum as clipped_sum_of
from tests.zoo.brute_force import norm_of

SIZES = (3, 1, 2, 3)


def table():
    """Four units of these sizes over rows 0..8, which do not lie in order."""
    order = torch.tensor([4, 0, 8, 2, 6, 1, 3, 5, 7])
    rows, start = [], 0
    for size in SIZES:
        rows.append([*order[start : start + size].tolist(), *[-1] * (3 - size)])
        start += size
    return torch.tensor(rows)


def brute_force(model, batch, reduction, bound):
    """One unit at a time: the gradient of the mean (sum) of its losses, clipped."""
    rows = looped(model, batch, loss_fn)
    units = []
    for row in table():
        own = [rows[i] for i in row[row >= 0]]
        weight = 1 / len(own) if reduction == "mean" else 1.0
        units.append({name: weight * sum(g[name] for g in own) for name in own[0]})
    return clipped_sum_of(units, bound), torch.tensor([norm_of(g) for g in units]).double()


def summed(model, layers, clip, data, batches):
    return clipped_sum(
        model,
        layers,
        {},
        clip,
        loss_fn=loss_fn,
        micro_batches=batches,
        one_record=reader(data),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_unit_is_clipped_once(case):
    model, (x, y) = build(case, n=9)
    layers = find_layers(model)
    for reduction, bound, multiple in (("mean", None, None), ("sum", 3, None), ("mean", 8, 4)):
        raw = brute_force(model, (x, y), reduction, 1e9)[1]
        c = float(raw.median())  # some are clipped, some are not
        expected, norms = brute_force(model, (x, y), reduction, c)
        parts = layout(table().numpy(), bound, multiple, reduction)
        batches = [((x[part.records], y[part.records]), part) for part in parts]
        found, upper = summed(model, layers, Clip(c), (x, y), batches)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
        torch.testing.assert_close(upper.sort().values, norms.sort().values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_padding_changes_nothing(case):
    model, (x, y) = build(case, n=7)
    layers, sums = find_layers(model), []
    for multiple in (None, 4, 16):
        parts = layout(range(7), None if multiple is None else 16, multiple)
        batches = [((x[part.records], y[part.records]), part) for part in parts]
        sums.append(summed(model, layers, Clip(0.5), (x, y), batches))
    for found, norms in sums[1:]:
        for name, value in sums[0][0].items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(norms, sums[0][1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("padding", [None, 8])
def test_a_broken_record_voids_its_unit_alone(padding):
    model, (x, y) = build(CASES[1], n=9)
    layers = find_layers(model)

    def sum_of(inputs, rows):
        parts = layout(rows.numpy(), None, padding)
        batches = [((inputs[p.records], y[p.records]), p) for p in parts]
        return summed(model, layers, Clip(0.5), (inputs, y), batches)[0]

    broken = x.clone()
    broken[int(table()[0, 0])] = float("nan")  # the record that also fills up and pads
    without = sum_of(x, table()[1:])
    for name, found in sum_of(broken, table()).items():
        torch.testing.assert_close(found, without[name], rtol=1e-10, atol=1e-12)
