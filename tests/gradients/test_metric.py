"""Entries of a metric against their explicit matrix: bounds, factors moved from side to side,
inverses and devices.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dpkfc.linalg.metric import Eigenbasis, Elementwise, Kronecker, scale_metric
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank
from dpkfc.tensors import copy_to_device
from tests.models import randn

D_OUT, D_IN = 4, 5
F64 = torch.float64


def basis(d, k):
    torch.manual_seed(d)
    return torch.linalg.qr(randn(d, d)).Q[:, :k]


def dense(d):
    root = basis(d, d)
    values = torch.linspace(0.3, 2.0, d, dtype=F64)
    return Dense(root * values @ root.T, 2.0)


def low_rank(d, tail):
    return LowRank(basis(d, 2), torch.tensor([0.6, 1.5], dtype=F64), tail)


def sides(d):
    return {
        "identity": Identity(),
        "factor": Identity(1.7),
        "diagonal": Diagonal(torch.linspace(0.2, 1.4, d, dtype=F64)),
        "dense": dense(d),
        "low rank": low_rank(d, 0.4),
        "low rank below its tail": low_rank(d, 2.5),
        "low rank of no direction": LowRank(basis(d, 0), torch.ones(0, dtype=F64), 0.7),
    }


def partial_basis(rest):
    scale = torch.linspace(0.5, 1.9, D_OUT * 2, dtype=F64).view(D_OUT, 2)
    return Eigenbasis(scale, basis(D_IN, 2), basis(D_OUT, D_OUT), rest)


ENTRIES = {
    **{
        f"{a} and {b}": Kronecker(x, y)
        for a, x in sides(D_IN).items()
        for b, y in sides(D_OUT).items()
    },
    "basis": Eigenbasis(
        torch.linspace(0.5, 1.9, D_OUT * D_IN, dtype=F64).view(D_OUT, D_IN), basis(D_IN, D_IN)
    ),
    "part of a basis": partial_basis(0.4),
    "part of a basis below its rest": partial_basis(2.5),
}


def explicit(entry):
    """The map as a matrix over all entries of a gradient."""
    units = torch.eye(D_OUT * D_IN, dtype=F64).view(-1, D_OUT, D_IN)
    return entry.apply(units).reshape(len(units), -1).T


@pytest.mark.parametrize("name", ENTRIES)
def test_the_bound_is_the_operator_norm(name):
    entry = ENTRIES[name]
    assert entry.operator_norm == pytest.approx(
        float(torch.linalg.matrix_norm(explicit(entry), 2)), rel=1e-12
    )


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if isinstance(entry, Kronecker)]
)
def test_sides_are_multiplied_as_matrices_also_where_a_factor_moves(name):
    entry = ENTRIES[name]
    assert isinstance(entry, Kronecker)
    out = entry.output.apply(torch.eye(D_OUT, dtype=F64))
    into = entry.input.apply(torch.eye(D_IN, dtype=F64))
    g = randn(3, D_OUT, D_IN)
    for found in (entry, entry.merge_scalar()):
        for laid in (g, g.mT.contiguous().mT):
            assert_close(found.apply(laid), out @ g @ into, rtol=1e-12, atol=1e-12)
        assert found.operator_norm == pytest.approx(entry.operator_norm, rel=1e-12)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_inverse_and_a_factor_are_those_of_the_matrix(name):
    entry = ENTRIES[name]
    one = torch.eye(D_OUT * D_IN, dtype=F64)
    assert_close(explicit(entry.inverse()) @ explicit(entry), one, rtol=0, atol=1e-11)
    assert_close(explicit(entry.scale_by(0.3)), 0.3 * explicit(entry), rtol=1e-12, atol=1e-13)


def tensors_of(x):
    """All values of an entry by their place in it."""
    if dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            for place, value in tensors_of(getattr(x, field.name)):
                yield f"{type(x).__name__}.{field.name}{place}", value
    elif isinstance(x, dict):
        for key, value in x.items():
            yield f"[{key}]", value
    else:
        yield "", x


ROLES = Elementwise({"weight": torch.rand(D_OUT, D_IN), "bias": torch.rand(D_OUT)})


@pytest.mark.parametrize("name", [*ENTRIES, "roles"])
def test_all_of_an_entry_moves_to_a_device(name):
    entry = ROLES if name == "roles" else ENTRIES[name]
    before, moved = (
        dict(tensors_of(entry)),
        dict(tensors_of(copy_to_device(entry, torch.device("meta")))),
    )
    assert before.keys() == moved.keys()
    for place, value in before.items():
        if isinstance(value, Tensor):
            assert moved[place].device.type == "meta" and moved[place].shape == value.shape
        else:
            assert moved[place] == value


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_scale_is_refused(factor):
    with pytest.raises(ValueError, match="positive finite factor"):
        scale_metric({"layer": Kronecker()}, factor)
