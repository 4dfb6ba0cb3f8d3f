"""Sides too wide for a matrix that stay low-rank: from rows that are drawn, unbiased, with the
trace of what is left out.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from dpkfc.curvature import FeatureNoise, PreconditionerState
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator
from dpkfc.curvature.row_sampling import RowSubsampler
from dpkfc.linalg.blocks import Lookup, Outer, Tied
from dpkfc.linalg.sides import Diagonal, LowRank
from tests.curvature.toys import capture, dense_matrix, make_kfac, mlp
from tests.models import draw

F64 = torch.float64
WIDE, CAP = 9, 7


def positions(size, seed=0):
    return RowSubsampler(torch.Generator().manual_seed(seed), size, None)


def structure(cap=CAP, **fields):
    return FactorOptions(max_factor_size=cap, oversize="low_rank", **fields)


def head(block, rows):
    if isinstance(block, Tied):
        return Tied(head(block.lookup, rows), head(block.outer, rows))
    if isinstance(block, Lookup):
        return Lookup(block.ids[rows], block.b[rows], block.num_rows)
    wide = slice(rows.start * block.groups, rows.stop * block.groups)
    return Outer(block.a[wide], block.b[wide], block.groups, block.homogeneous)


def accumulate(
    block,
    how,
    seed=0,
    mask=None,
    cuts=(),
):
    n, held = block.batch_size, positions(block.batch_size, seed)
    layer = LayerAccumulator(block, how, None, held)
    for low, high in zip((0, *cuts), (*cuts, n), strict=True):
        held.start(slice(low, high), None if mask is None else mask[low:high])
        layer.add(head(block, slice(low, high)))
    return layer


# n examples of T positions: few, more rows than the cap, more examples than the cap.
SIZES = [(3, 2), (2, 6), (3, 4), (5, 1), (12, 1), (11, 3)]
CASES = [(n, t, groups) for n, t in SIZES for groups in (1, 2)]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("n", "t", "groups"), CASES)
def test_never_more_rows_than_may_be_kept_and_each_split_the_same(n, t, groups, sharing):
    block = Outer(draw(n * groups, t, WIDE), draw(n * groups, t, 10, seed=1), groups)
    whole = accumulate(block, structure(sharing=sharing))
    for side in whole.sides.values():
        assert 0 < side.row_count <= CAP and side.total is None and "low rank" in side.note
    for cuts in ((1,), tuple(range(1, n))):
        parts = accumulate(block, structure(sharing=sharing), cuts=cuts)
        for side, factor in parts.result().sides.items():
            assert_close(
                dense_matrix(factor),
                dense_matrix(whole.result().sides[side]),
                rtol=1e-10,
                atol=1e-12,
            )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "t", "groups"), CASES)
def test_the_drawn_rows_in_a_loop(n, t, groups, masked):
    """k positions of m pairs of an example and a group, each times what it stands for."""
    block = Outer(draw(n * groups, t, WIDE), draw(n * groups, t, 10, seed=1), groups)
    lengths = (
        torch.randint(1, t + 1, (n,), generator=torch.Generator().manual_seed(n))
        if masked
        else torch.full((n,), t)
    )
    mask = torch.arange(t) < lengths.unsqueeze(1)
    held = positions(n)
    held.start(slice(0, n), mask if masked else None)
    chosen = held.subsample(block.a, groups, WIDE, CAP)
    pairs, each = min(n * groups, CAP), max(1, CAP // (n * groups))
    index = range(n * groups * t) if chosen.index is None else chosen.index.tolist()
    counts = [0] * (n * groups)
    total_a, total_g = torch.zeros(WIDE, WIDE, dtype=F64), torch.zeros(10, 10, dtype=F64)
    for row in index:
        pair, position = divmod(row, t)
        length = int(lengths[pair // groups])
        assert position < length
        counts[pair] += 1
        weight = length / min(length, each) * (n * groups / pairs)
        total_a += weight * torch.outer(block.a[pair, position], block.a[pair, position])
        total_g += weight * torch.outer(block.b[pair, position], block.b[pair, position])
    assert sum(count > 0 for count in counts) == pairs
    assert all(count in (0, min(each, int(lengths[i // groups]))) for i, count in enumerate(counts))
    sides = accumulate(block, structure(), mask=mask if masked else None).result().sides
    assert_close(dense_matrix(sides["input"]), total_a / (n * groups), rtol=1e-10, atol=1e-12)
    assert_close(
        dense_matrix(sides["output"]),
        total_g / (int(lengths.sum()) * groups),
        rtol=1e-10,
        atol=1e-12,
    )
    for side, matrix in (
        ("input", total_a / (n * groups)),
        ("output", total_g / (int(lengths.sum()) * groups)),
    ):
        cut = accumulate(block, structure(), mask=mask if masked else None).sides[side].result(2)
        assert cut.trace == pytest.approx(float(matrix.trace()), rel=1e-9)  # whatever is left out


# -- averages over refreshes -----------------------------------------------------------------------


def sums(rows, cap=24):
    made = FactorAccumulator(rows.shape[1], max_size=cap, oversize="low_rank", decays=True)
    made.add(rows, len(rows))
    return made


def matrix(found):
    factor = found.result()
    assert isinstance(factor, Eigen)
    return dense_matrix(factor)


def test_an_average_keeps_first_directions_and_every_trace():
    """As many directions of the past as a quarter of the cap are exact; of more, the first ones and
    the trace of the rest.
    """
    share, old, new = 0.8, draw(5, 40), draw(9, 40, seed=1)
    past = sums(old)
    later = past.remember(past.result()).decay(share)
    later.merge(sums(new))
    exact = (share * old.T @ old + new.T @ new) / (share * 5 + 9)
    assert_close(matrix(later), exact, rtol=1e-9, atol=1e-11)

    old = draw(17, 40) * torch.linspace(3, 0.1, 40, dtype=F64)
    past = sums(old)
    later = past.remember(past.result()).decay(share)
    later.merge(sums(new))
    assert later.row_count == 24 // 4 + 9 <= 24
    exact = (share * old.T @ old + new.T @ new) / (share * 17 + 9)
    assert later.result().trace == pytest.approx(float(exact.trace()), rel=1e-12)
    vectors = torch.linalg.eigh(old.T @ old).eigenvectors.flip(1)[:, :6]
    along = vectors.T @ (share * old.T @ old / (share * 17 + 9)) @ vectors
    kept = later.rows[0].T @ later.rows[0] / (share * 17 + 9)
    assert_close(vectors.T @ kept @ vectors, along, rtol=1e-9, atol=1e-11)
    # Nothing was remembered: its directions are not known.
    assert sums(old).decay(0.5).row_count == 0


def test_the_place_of_the_past_is_left_free():
    for cap in (1, 3, 7, 24):
        made = FactorAccumulator(40, max_size=cap, oversize="low_rank", decays=True)
        assert 1 <= made.most_rows <= cap and (cap < 4 or made.most_rows + cap // 4 == cap)
        assert FactorAccumulator(40, max_size=cap, oversize="low_rank").most_rows == cap
    for settings in (
        {"max_size": 40},
        {"oversize": "diagonal"},
        {"shape": "diagonal"},
        {"shape": "isotropic"},
    ):
        assert (
            FactorAccumulator(40, **{"max_size": 8, "oversize": "low_rank", **settings}).most_rows
            is None
        )


# -- in a refresh ----------------------------------------------------------------------------------


def kfac(**fields):
    settings = {"probe": FeatureNoise(30), "probe_size": 64, "max_factor_size": 16, "decay": 0.0}
    return make_kfac(**{**settings, "oversize": "low_rank", "chunk": 64, **fields})


def test_a_wide_side_is_low_rank_and_was_a_diagonal():
    model = mlp(30, 20, 4).double()
    built = kfac().build(model, capture, 0)
    rows = {(row["layer"], row["side"]): row for row in built.report}
    for layer, side, dim in (("0", "input", 31), ("0", "output", 20), ("2", "input", 21)):
        row = rows[layer, side]
        assert (row["kind"], row["dim"]) == ("lowrank", dim) and row["rank"] <= 16
        assert "max_factor_size = 16: low rank" in row["note"]
        values = built.spectra[layer]["A" if side == "input" else "G"]
        assert float(values.sum()) == pytest.approx(row["trace"], rel=1e-9)
    assert not rows["2", "output"]["note"]
    assert isinstance(built.metric["0"].input, LowRank)
    assert isinstance(
        kfac(oversize="diagonal").build(model, capture, 0).metric["0"].input, Diagonal
    )
    narrow = kfac(max_factor_size=64, oversize="diagonal").build(model, capture, 0)
    same = kfac(max_factor_size=64).build(model, capture, 0)
    assert same.digest == narrow.digest  # nothing is drawn where every side has room


def test_averages_are_restored_with_the_trace_they_keep():
    model, settings = mlp(30, 20, 4).double(), kfac(decay=0.8)
    built = None
    for step in (0, 50, 100):
        built = settings.build(model, capture, step, previous=built)
    rest = [x.rest for layers in built.running for sides in layers.values() for x in sides.values()]
    assert sum(x > 0 for x in rest) == 3 and all(math.isfinite(x) for x in rest)
    restored = PreconditionerState.from_state_dict(built.state_dict())
    assert restored.digest == built.digest
    after = [settings.build(model, capture, 150, previous=of).digest for of in (built, restored)]
    assert after[0] == after[1]
