"""A refresh that several processes share: what each adds up, joined, is what one adds up alone."""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator
from dpkfc.curvature.refresh_group import (
    assign_owners,
    check_same_probe,
    rows_of_process,
)
from dpkfc.linalg.blocks import Lookup, Outer, PerExample
from dpkfc.tensors import copy_to_device
from tests.curvature.toys import dense_matrix


class Member:
    """One of a team, for what needs to know no more than its place."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


def rows(n, d, scale=1.0):
    return scale * torch.randn(
        n, d, generator=torch.Generator().manual_seed(n + d), dtype=torch.float64
    )


def matrix_of(accumulator):
    found = accumulator.result()
    return dense_matrix(found) if isinstance(found, Eigen) else found.values.double()


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("size", "world"), [(10, 1), (10, 3), (2, 4), (64, 8)])
def test_every_example_is_run_once_in_order(size, world, first):
    parts = [
        range(size + first)[rows_of_process(Member(rank, world), size + first, first)]
        for rank in range(world)
    ]
    assert [i for part in parts for i in part] == list(range(first, size + first))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# Rows of each process against d = 6: kept rows, sums, both, and a side that is too wide for a
# matrix.
@pytest.mark.parametrize("counts", [(2, 3), (2, 5), (9, 8), (8, 2), (2, 8), (3, 1, 1, 4)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_size": 4},
        {"max_size": 4, "oversize": "identity"},
        {"shape": "diagonal"},
        {"shape": "isotropic"},
    ],
)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-20, 1e3), (1e3, 1e-20), (0.0, 1.0), (0.0, 0.0)])
def test_parts_of_a_factor_add_up(counts, settings, scales):
    pieces = [rows(n, 6, scales[i % 2]) for i, n in enumerate(counts)]
    whole, parts = (
        FactorAccumulator(6, **settings),
        [FactorAccumulator(6, **settings) for _ in pieces],
    )
    for piece, part in zip(pieces, parts, strict=True):
        whole.add(piece, len(piece))
        part.add(piece, len(piece))
    joined = parts[0].detached_copy()
    for part in parts[1:]:
        joined.merge(part)
    assert joined.note == whole.note
    assert_close(matrix_of(joined), matrix_of(whole), rtol=1e-12, atol=1e-300)


def blocks(n):
    ids = torch.randint(0, 5, (n, 3), generator=torch.Generator().manual_seed(n))
    return {
        "outer": Outer(rows(2 * n, 4).view(n, 2, 4), rows(2 * n, 3).view(n, 2, 3), 1, True),
        "lookup": Lookup(ids, rows(3 * n, 2).view(n, 3, 2), 5),
        "elementwise": PerExample({"weight": rows(n, 6)}),
    }


@pytest.mark.parametrize("kind", ["outer", "lookup", "elementwise"])
def test_parts_of_a_layer_add_up(kind):
    pieces = [blocks(n)[kind] for n in (2, 5, 1)]
    whole = LayerAccumulator(pieces[0], FactorOptions())
    parts = [LayerAccumulator(piece, FactorOptions()) for piece in pieces]
    for piece, part in zip(pieces, parts, strict=True):
        whole.add(piece)
        part.add(piece)
    joined = parts[0].detached_copy()
    for part in parts[1:]:
        joined.merge(part)
    expected = whole.result()
    for side, factor in joined.result().sides.items():
        assert_close(factor.spectrum, expected.sides[side].spectrum, rtol=1e-10, atol=1e-12)


def test_layers_are_divided_by_cost_in_their_order():
    owners = assign_owners([{"a": 1.0, "b": 1.0, "c": 6.0}, {"c": 8.0, "d": 1.0, "e": 5.0}])
    assert list(owners) == ["a", "b", "c", "d", "e"]
    assert list(owners.values()) == sorted(owners.values()) == [0, 0, 0, 1, 1]
    assert set(assign_owners([{"a": 0.0}, {}]).values()) == {0}


def test_what_is_shared_stays_one_object_when_it_is_moved():
    shared = torch.ones(2)
    value = {
        "a": Eigen(shared, torch.ones(1)),
        "b": (shared, [1, "text", None]),
        "device": torch.device("cuda"),
    }
    moved = copy_to_device(value, torch.device("cpu"))
    assert moved["a"].vectors is moved["b"][0]
    assert moved["device"] == torch.device("cpu") and moved["b"][1] == [1, "text", None]


def test_a_probe_that_differs_is_named():
    check_same_probe(["x", "x"])
    with pytest.raises(
        RuntimeError, match="the probe returns other inputs on rank 2 than on rank 0"
    ):
        check_same_probe(["x", "x", "y"])
