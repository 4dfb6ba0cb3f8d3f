"""Sides that keep as many eigenpairs as they are told, whatever the rule by widths says."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc import KFAC, PrivacyConfig
from dpkfc.curvature import PublicData
from dpkfc.linalg.sides import Dense, LowRank
from tests.curvature.toys import capture

WIDTH = 24


class Branches(nn.Module):
    """Two layers that read the same tensor, so that their input factors are decomposed once, and a
    head.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(WIDTH, 6),
            nn.Linear(WIDTH, 6),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + self.second(x))


def _kfac(**fields):
    inputs = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probe = PublicData(inputs, provenance="random numbers")
    given = {
        "probe_size": 60,
        "chunk": 60,
        "scale": "raw",
        "rank_tolerance": 0.0,
        "max_rank": 12,
        **fields,
    }
    return KFAC(probe=probe, **given)


def _build_metric(**fields):
    torch.manual_seed(1)
    return _kfac(**fields).build(Branches().double(), capture, 0).metric


def _exact(rank, damping=0.1):
    """The damped root of the input factor whose eigenvalues beyond the first `rank` are replaced by
    their mean.
    """
    kfac = _kfac()
    x = kfac.probe.sample(60, torch.Generator())[0].double()
    rows = torch.cat([x, torch.ones(60, 1, dtype=x.dtype)], 1)
    values, vectors = torch.linalg.eigh(rows.T @ rows / 60)
    mean = values.mean()
    if rank:
        values[:-rank] = values[:-rank].mean()
    return (vectors * (values + damping * mean).pow(-0.5)) @ vectors.T


def _matrix(side):
    return side.apply(torch.eye(WIDTH + 1, dtype=torch.float64))


def test_a_side_keeps_what_it_is_told_and_the_others_what_the_rule_says():
    metric = _build_metric(ranks={"first.A": 5})
    assert isinstance(metric["first"].input, LowRank) and metric["first"].input.vectors.shape == (
        WIDTH + 1,
        5,
    )
    assert isinstance(metric["second"].input, Dense)  # 25 wide, not four times max_rank = 12
    assert_close(_matrix(metric["first"].input), _exact(5), rtol=1e-9, atol=1e-9)
    assert_close(_matrix(metric["second"].input), _exact(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("ranks", "kept"), [({}, 8), ({"0.A": 20}, 20), ({"0.A": 0}, None)])
def test_of_a_side_that_is_cut_when_it_is_decomposed_as_many_are_found(ranks, kept):
    """From 640 columns on the first eigenpairs alone are looked for; a side that keeps more needs
    more of them.
    """
    inputs = torch.randn(720, 650, generator=torch.Generator().manual_seed(0))
    probe = PublicData(inputs, provenance="random numbers")
    kfac = KFAC(
        probe=probe,
        probe_size=720,
        chunk=720,
        sides="both",
        scale="raw",
        rank_tolerance=0.0,
        max_rank=8,
        ranks=ranks,
    )
    torch.manual_seed(1)
    side = kfac.build(nn.Sequential(nn.Linear(650, 3)), capture, 0).metric["0"].input
    if kept is None:
        assert isinstance(side, Dense)
        values = torch.linalg.eigvalsh(side.root.double())
        # the eigenvalues of all pairs, not the first few and a mean
        assert torch.unique(values).numel() > 600
    else:
        assert isinstance(side, LowRank) and side.vectors.shape == (651, kept)


def test_output_sides_have_ranks_of_their_own():
    metric = _build_metric(sides="both", ranks={"first.G": 2})
    assert (
        isinstance(metric["first"].output, LowRank) and metric["first"].output.vectors.shape[1] == 2
    )
    assert isinstance(metric["first"].input, Dense) and isinstance(metric["second"].output, Dense)


def test_a_side_that_is_not_there_is_named_before_any_release():
    with pytest.raises(ValueError, match=r"sides that the model does not have: third\.A"):
        _build_metric(ranks={"third.A": 3})


@pytest.mark.parametrize(
    "wrong",
    [{"first": 3}, {"first.A": -1}, {"first.A": 2.0}, {"first.A": True}, {3: 3}, {"first.B": 3}],
)
def test_what_is_no_rank_of_a_side_is_refused(wrong):
    with pytest.raises(ValueError, match="ranks maps sides, such as"):
        _kfac(ranks=wrong)


def test_ranks_are_part_of_the_plan_and_silent_where_there_are_none():
    def plan(kfac):
        return PrivacyConfig(expected_batch_size=4, steps=1, preconditioner=kfac).with_noise(
            1.0, 1e-5, 40
        )

    assert "ranks" not in _kfac().describe() and _kfac(ranks={"first.A": 5}).describe()[
        "ranks"
    ] == {"first.A": 5}
    assert plan(_kfac()).hash != plan(_kfac(ranks={"first.A": 5})).hash
    given = {"first.A": 5}
    kept = replace(_kfac(), ranks=given)
    given["first.A"] = 6
    assert kept.ranks == {"first.A": 5} and isinstance(hash(kept), int)
