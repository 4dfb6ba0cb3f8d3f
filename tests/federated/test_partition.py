"""Partitions are partitions, skewed as they say; and the picture of one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpkfc.app import plots
from dpkfc.app import plots as report_plots
from dpkfc.federated.simulation import dirichlet, iid, parts

LABELS = np.random.default_rng(0).integers(0, 10, 2000)


def skew(pieces) -> float:
    """Mean distance of a client's labels from those of all."""
    table, _ = plots.counts(LABELS, pieces)
    own = table / np.maximum(1, table.sum(1, keepdims=True))
    return float(np.abs(own - table.sum(0) / table.sum()).sum(1).mean() / 2)


@pytest.mark.parametrize(
    "pieces",
    [
        iid(2000, 7),
        dirichlet(LABELS, 7, 0.1),
        dirichlet(LABELS, 7, math.inf),
    ],
)
def test_every_record_goes_to_one_client(pieces):
    assert np.array_equal(np.sort(np.concatenate(pieces)), np.arange(2000))


def test_skew_follows_alpha():
    found = [skew(dirichlet(LABELS, 10, alpha, seed=1)) for alpha in (0.05, 0.5, 5.0, math.inf)]
    assert found == sorted(found, reverse=True) and found[0] > 0.6 and found[-1] < 0.02
    assert skew(iid(2000, 10)) < 0.15
    sizes = [len(piece) for piece in iid(2003, 10)]
    assert max(sizes) - min(sizes) == 1


def test_shares_of_a_label_are_those_of_the_draw():
    generator = np.random.default_rng(5)
    labels = np.zeros(1000, dtype=int)
    generator.permutation(1000)
    expected = generator.dirichlet(np.full(4, 0.5))
    sizes = [len(p) for p in dirichlet(labels, 4, 0.5, seed=5)]
    assert np.allclose(np.array(sizes) / 1000, expected, atol=2e-3)


def test_seeds_and_least():
    one, same, other = (dirichlet(LABELS, 5, 0.3, seed=s) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert min(len(p) for p in dirichlet(LABELS, 5, 0.2, least=50)) >= 50
    with pytest.raises(ValueError, match="lower least"):
        dirichlet(LABELS, 5, 0.2, least=401)


def test_parts_cut_every_tensor():
    cut = parts((torch.arange(4), torch.arange(4) * 2), [np.array([1]), np.array([0, 2])])
    assert cut[1][1].tolist() == [0, 4]


@pytest.mark.parametrize(
    "call",
    [lambda: iid(3, 4), lambda: dirichlet(LABELS, 5, 0.0)],
)
def test_bad_input_is_refused(call):
    with pytest.raises(ValueError, match="divided between|alpha must be positive"):
        call()


@pytest.mark.parametrize("clients", [3, 60])
def test_the_picture_of_a_partition(clients: int, tmp_path):
    pieces = dirichlet(LABELS, clients, 0.5)
    figure = plots.partition(LABELS, pieces, caption="Dirichlet(0.5)")
    path = report_plots.save(figure, tmp_path / "partition.png")
    assert path.stat().st_size > 5_000 and [p.name for p in tmp_path.iterdir()] == ["partition.png"]
    assert len(figure.axes) == 2
