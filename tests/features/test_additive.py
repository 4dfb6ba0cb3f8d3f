"""Additive features: one curve a number, one value a category, no row longer than one."""

import math

import numpy as np
import torch
from torch import nn

from dpkfc.features import AdditiveFeatures, AdditiveModel, InputColumn
from dpkfc.features.additive import MOST_FEATURES, SMOOTHNESS, choose_knots

COLUMNS = (
    InputColumn("age", 1, 1),
    InputColumn("job", 3),
    InputColumn("pressure", 2, 2, norm=math.sqrt(2)),
    InputColumn("smoker", 1),
)
TINY = (InputColumn("age", 1, 1), InputColumn("job", 2))


def encode_rows(count=200, columns=COLUMNS):
    """Return encoded rows, some with missing values."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for column in columns:
        values = torch.zeros(count, column.values + 1)
        if column.numbers:
            values[:, :-1] = 2 * torch.rand(count, column.numbers, generator=generator) - 1
        else:
            places = torch.randint(column.values, (count,), generator=generator)
            values[torch.arange(count), places] = 1.0
        is_missing = torch.rand(count, generator=generator) < 0.1
        values[is_missing] = 0.0
        values[is_missing, -1] = 1.0
        parts.append(values)
    return torch.cat(parts, 1)


def test_features_are_those_of_a_plain_loop():
    rows = encode_rows(50).double()
    maps = AdditiveFeatures(COLUMNS, knots=5)
    kernel = np.exp(-np.abs(np.subtract.outer(np.arange(5), np.arange(5))) / SMOOTHNESS)
    values, vectors = np.linalg.eigh(kernel)
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    found = maps(rows).numpy()
    for row, features in zip(rows.numpy(), found, strict=True):
        expected = list(row)
        for place, missing in ((0, 1), (6, 8), (7, 8)):
            spot = (row[place] + 1) / 2 * 4
            hats = [max(0.0, 1 - abs(spot - knot)) for knot in range(5)]
            expected += list((1 - row[missing]) * np.array(hats) @ root)
        expected.append(1.0)
        np.testing.assert_allclose(features, np.array(expected) * maps.scale, atol=1e-6)


def test_no_row_is_longer_than_one_and_a_full_row_nearly_reaches_it():
    maps = AdditiveFeatures(COLUMNS)
    rows = encode_rows(4000)
    ends = torch.zeros(2, maps.width)
    ends[:, [0, 2, 6, 7, 10]] = torch.tensor([[-1.0, 1, -1, -1, -1], [1.0, 1, 1, 1, 1]])
    lengths = maps(torch.cat([rows, ends])).norm(dim=1)
    assert 0.95 < float(lengths.max()) <= 1.0


def test_a_value_outside_of_its_bounds_has_the_curve_of_the_bound():
    maps = AdditiveFeatures(TINY)
    rows = torch.zeros(2, maps.width)
    rows[:, 0] = torch.tensor([1.0, 7.0])
    curves = maps(rows)[:, maps.width :]
    assert torch.equal(curves[0], curves[1])


def test_many_columns_have_no_curves():
    assert choose_knots([InputColumn(str(number), 1, 1) for number in range(20)]) == 16
    many = [InputColumn(str(number), 1, 1) for number in range(MOST_FEATURES // 8)]
    assert choose_knots(many) == 0
    assert AdditiveModel(many, 2)[0].features == 2 * len(many) + 1


def test_effects_add_up_to_the_output():
    model = AdditiveModel(COLUMNS, 3)
    nn.init.normal_(model[1].weight)
    model.double()
    effects = model.effects()
    assert [effect.column for effect in effects] == [column.name for column in COLUMNS]
    assert [effect.is_curve for effect in effects] == [True, False, False, False]
    row = torch.zeros(2, model[0].width, dtype=torch.float64)
    # Two values of age and of job, all else alike: outputs differ by the effects.
    row[0, 0], row[1, 0] = -1.0, 1.0
    row[0, 2], row[1, 3] = 1.0, 1.0
    outputs = model(row).detach()
    outputs = outputs - outputs.mean(1, keepdim=True)
    age, job = effects[0].values, effects[1].values
    expected = age[-2] - age[0] + job[1] - job[0]
    np.testing.assert_allclose((outputs[1] - outputs[0]).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(age.sum(1), 0, atol=1e-9)
    assert np.isnan(effects[0].deviation).all()
