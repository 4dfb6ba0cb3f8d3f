"""Groups of rows as one example, for every kind of layer, against a loop over groups in float64."""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.data.loading import layout
from tests.gradients.cases import CASES, build, loss_fn, sum_examples
from tests.gradients.whitened import loop_gradients
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
    rows = loop_gradients(model, batch, loss_fn)
    units = []
    for row in table():
        own = [rows[i] for i in row[row >= 0]]
        weight = 1 / len(own) if reduction == "mean" else 1.0
        units.append({name: weight * sum(g[name] for g in own) for name in own[0]})
    return clipped_sum_of(units, bound), torch.tensor([norm_of(g) for g in units]).double()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_unit_is_clipped_once(case):
    model, (x, y) = build(case, n=9)
    for reduction, bound, least in (("mean", None, None), ("sum", 3, None), ("mean", 8, 4)):
        raw = brute_force(model, (x, y), reduction, 1e9)[1]
        c = float(raw.median())  # some are clipped, some are not
        expected, norms = brute_force(model, (x, y), reduction, c)
        parts = layout(table().numpy(), bound, reduction, least=least)
        found, upper = sum_examples(model, (x, y), c, parts=parts)
        for name, value in expected.items():
            assert_close(
                found[name], value, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert_close(upper.sort().values, norms.sort().values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("padding", [None, 8])
def test_a_broken_record_voids_its_unit_alone(padding):
    model, (x, y) = build(CASES[1], n=9)

    def sum_of(inputs, rows):
        parts = layout(rows.numpy(), least=padding)
        return sum_examples(model, (inputs, y), 0.5, parts=parts)[0]

    broken = x.clone()
    broken[int(table()[0, 0])] = float("nan")  # the record that also fills up and pads
    without = sum_of(x, table()[1:])
    for name, found in sum_of(broken, table()).items():
        assert_close(found, without[name], rtol=1e-10, atol=1e-12)
