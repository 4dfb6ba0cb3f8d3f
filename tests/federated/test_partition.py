"""Partitions are partitions, skewed as they say."""

import math

import numpy as np
import pytest
import torch

from dpkfc.federated.partition import dirichlet, iid, parts

LABELS = np.random.default_rng(0).integers(0, 10, 2000)


def skew(pieces):
    """Mean distance of a client's labels from those of all."""
    table = np.stack([np.bincount(LABELS[piece], minlength=10) for piece in pieces])
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


def test_a_seed_repeats_a_partition():
    one, same, other = (dirichlet(LABELS, 5, 0.3, seed=s) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


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
