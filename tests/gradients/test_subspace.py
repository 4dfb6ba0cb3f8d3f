"""Embedding, residual, their two clips and sums, against plain autograd over single examples and
dense matrices.
"""

import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dpkfc.clipping import SPLIT
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.probes import PublicData
from dpkfc.gradients.clip import Clip, clip_factors
from dpkfc.gradients.clipped_summer import ClippedSummer, Groups
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from dpkfc.linalg.blocks import PerExample
from dpkfc.linalg.magnitudes import product_error
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.subspace import EMBEDDING
from tests.gradients.cases import CASES, build, loss_fn
from tests.gradients.loop import record
from tests.gradients.whitened import flat, loop_gradients, stack_directions, trained
from tests.models import randn

CLOSE = {"rtol": 1e-7, "atol": 1e-11}


def basis_of(model, x, **settings):
    """A basis from 'public' gradients; for these tests any basis will do."""
    layers = find_layers(model)
    options = {
        "rank": 5,
        "groups": 2,
        "embedding_norm": 0.6,
        "residual_norm": 0.4,
        "chunk": 3,
        **settings,
    }
    gep = GEP(**{"probe": PublicData(x, provenance="random"), **options})
    rules = {layer.name: layer.rule for layer in layers}
    return gep.build(model, lambda m, loss: capture(m, layers, loss), 0, rules).metric


def stack_by_definition(g, matrix, basis):
    """One example's contribution by definition: (embedding, residual), scaled and clipped."""
    w = matrix.T @ g
    r = g - matrix @ w
    alpha = math.sqrt(2 * basis.share) if basis.residual_norm else 1.0
    first = (
        alpha
        * w
        / basis.embedding_norm
        * min(1.0, basis.embedding_norm / max(float(w.norm()), 1e-30))
    )
    if basis.residual_norm is None:
        return first, torch.zeros_like(r)
    beta = math.sqrt(2 * (1 - basis.share))
    return first, beta * r / basis.residual_norm * min(
        1.0, basis.residual_norm / max(float(r.norm()), 1e-30)
    )


def sum_in_parts(model, batch, basis, sizes, loss=loss_fn):
    """The clipped sum in micro-batches of the given sizes, and the norms."""
    layers, start, norms = find_layers(model), 0, []
    summer = ClippedSummer(layers, basis, Clip(1.0, basis.clipping))
    for size in sizes:
        part = tuple(x[start : start + size] for x in batch)
        calls = record(model, layers, partial(loss, model, part))
        norms.append(summer.add(calls, size))
        start += size
    return summer.result(), torch.cat(norms) if norms else torch.zeros(0)


def assert_sum_is(found, model, parts, **close):
    close = close or CLOSE
    assert_close(found[EMBEDDING].double(), torch.stack([w for w, _ in parts]).sum(0), **close)
    residual = flat({n: found[n] for n in trained(model)})
    assert_close(residual, torch.stack([r for _, r in parts]).sum(0), **close)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sums_and_norms_equal_a_loop(case):
    model, batch = build(case, n=6)
    basis = basis_of(model, batch[0])
    matrix, rows = (
        stack_directions(model, basis),
        [flat(g) for g in loop_gradients(model, batch, loss_fn)],
    )
    assert_close(matrix.T @ matrix, torch.eye(basis.width, dtype=torch.float64), rtol=0, atol=1e-12)
    found, norms = sum_in_parts(model, batch, basis, [4, 2])
    assert_sum_is(found, model, [stack_by_definition(g, matrix, basis) for g in rows])
    expected = [
        max((matrix.T @ g).norm() / 0.6, (g - matrix @ (matrix.T @ g)).norm() / 0.4) for g in rows
    ]
    assert_close(norms, torch.stack(expected), **CLOSE)


def record_blocks(model, layers, batch):
    calls = record(model, layers, lambda: loss_fn(model, batch))
    return [(layer, blocks_of(layer, calls[layer.name], len(batch[0]))) for layer in layers]


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "layer norm"])
def test_a_unit_of_two_rows_has_the_parts_of_their_sum(name):
    model, batch = build(next(case for case in CASES if case.name == name), n=7)
    basis, layers = basis_of(model, batch[0]), find_layers(model)
    matrix, rows = (
        stack_directions(model, basis),
        [flat(g) for g in loop_gradients(model, batch, loss_fn)],
    )
    summer, tape = ClippedSummer(layers, basis, Clip(1.0, basis.clipping)), Tape(model, layers)
    with tape:
        losses = loss_fn(model, batch)
    # the seventh row only fills the shape
    assert len(summer.add(tape.backward(losses), 7, Groups(3, 2))) == 3
    assert_sum_is(
        summer.result(),
        model,
        [stack_by_definition(rows[i] + rows[i + 1], matrix, basis) for i in (0, 2, 4)],
    )


def test_one_direction_splits_a_gradient_too():
    model, batch = build(CASES[0], n=4)
    basis = basis_of(model, batch[0], rank=1, groups=1)
    assert sum(span.size for span in basis.spans.values()) == sum(
        p.numel() for p in model.parameters()
    )
    matrix = stack_directions(model, basis)
    found, _ = sum_in_parts(model, batch, basis, [4])
    rows = [flat(g) for g in loop_gradients(model, batch, loss_fn)]
    assert_sum_is(found, model, [stack_by_definition(g, matrix, basis) for g in rows])


@pytest.fixture(name="mlp")
def _mlp():
    return build(CASES[0], n=6)


def test_an_empty_batch_has_a_sum_of_zeros_of_every_part(mlp):
    model, batch = mlp
    found = ClippedSummer(
        find_layers(model), basis_of(model, batch[0]), Clip(1.0, "embedding_residual")
    ).result()
    assert {n: x.shape for n, x in found.items()} == {EMBEDDING: (5,)} | {
        n: p.shape for n, p in trained(model).items()
    }
    assert all(bool((x == 0).all()) for x in found.values())


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "layer norm", "fallback"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_broken_example_contributes_zero(name, value):
    model, batch = build(next(case for case in CASES if case.name == name), n=4)
    basis = basis_of(model, batch[0], rank=4)

    def loss(model, batch):
        losses = loss_fn(model, batch[:2])
        return losses * torch.where(batch[2] > 0, losses.new_tensor(value), losses.new_ones(()))

    bad = torch.tensor([0, 0, 1, 0])
    found, norms = sum_in_parts(model, (*batch, bad), basis, [4], loss)
    kept = tuple(x[bad == 0] for x in batch)
    expected, _ = sum_in_parts(model, kept, basis, [3])
    assert torch.equal(torch.isfinite(norms), bad == 0)
    for n in expected:
        assert_close(found[n], expected[n], **CLOSE)


# -- sensitivity -----------------------------------------------------------------------------------


def _gradient(kind, matrix):
    inside, g = (
        matrix @ randn(matrix.shape[1]),
        randn(len(matrix)),
    )
    across = g - matrix @ (matrix.T @ g)
    return {
        "inside": 50 * inside,
        "across": 50 * across,
        "mixed": 50 * inside + 50 * across,
        "tiny residual": 1e4 * inside + 1e-3 * across,
        "huge": 1e6 * inside + across,
    }[kind]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("residual_norm", [0.4, None])
def test_two_clipped_parts_have_the_norm_that_a_plan_counts(share, residual_norm):
    """The squares of both sum to 2, `share` of it the embedding's; to 1 without a residual."""
    model = nn.Linear(6, 40, bias=False, dtype=torch.float64)
    settings = {"rank": 4, "groups": 1, "share": share, "residual_norm": residual_norm}
    basis = basis_of(model, torch.randn(8, 6), **settings)
    g = _gradient("mixed", stack_directions(model, basis))
    squares = [x.square().sum() for x in _positions(model, basis, g.view(1, 40, 6)).values()]
    exact = [2 * share, 2 - 2 * share] if residual_norm else [1.0]
    assert_close(torch.stack(squares), torch.tensor(exact).double(), rtol=1e-6, atol=0)


def _positions(model, basis, gradients):
    """The clipped sum of examples with these gradients `[N, 40, 6]`: six positions with unit
    vectors as inputs.
    """
    layers = find_layers(model)
    tape, summer = Tape(model, layers), ClippedSummer(layers, basis, Clip(1.0, basis.clipping))
    with tape:
        x = torch.eye(6, dtype=gradients.dtype).expand(len(gradients), 6, 6)
        losses = (model(x) * gradients.mT).sum((1, 2))
    summer.add(tape.backward(losses), len(gradients))
    return summer.result()


FLOAT32 = ["linear", "linear on long sequences", "conv2d wide", "conv1d", "embedding", "layer norm"]


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5])
def test_float32_residuals_that_cancel_stay_below_the_bound(name, scale):
    """The basis of the very gradients that are split: what is left of them is rounding, far above a
    small clip norm.
    """
    model, batch = build(
        next(case for case in CASES if case.name == name), n=5, dtype=torch.float32
    )
    own = {
        "probe": PublicData(batch[0], batch[1], provenance="the same"),
        "labels": "given",
        "residual_norm": 1e-4,
    }
    basis, layers = basis_of(model, batch[0], rank=5, groups=1, **own), find_layers(model)
    for i in range(5):
        one = tuple(x[i : i + 1] for x in batch)
        found, _ = sum_in_parts(model, one, basis, [1], lambda m, b: loss_fn(m, b) * scale)
        residual = torch.cat([found[n].double().flatten() for n in trained(model)])
        assert float(residual.norm()) <= 1 + 1e-5
        assert float(found[EMBEDDING].double().norm()) <= 1 + 1e-6
    defect = stack_directions(model, basis).T @ stack_directions(model, basis) - torch.eye(
        5, dtype=torch.float64
    )
    assert float(torch.linalg.matrix_norm(defect, 2)) <= basis.defect * (1 + 1e-6) + 1e-12
    for layer, block in record_blocks(model, layers, batch):
        span = basis.spans[layer.name]
        error = (block.inner_products(span) - _widen(block, span)).norm(dim=1)
        norms = per_example_norms(block, None).norms.double()
        assert bool((error <= product_error(block, span, norms, 1 + basis.defect) + 1e-30).all())


def test_a_basis_that_is_not_quite_orthonormal_keeps_the_bound():
    """With L a little too long the difference of squares is negative, and what is left of a
    gradient is not zero.
    """
    model, x = nn.Linear(6, 40, bias=False, dtype=torch.float64), torch.randn(8, 6)
    basis = basis_of(
        model, x, rank=4, groups=1, loss=lambda output, g: (output * 0.7 + 1).square().mean(1)
    )
    matrix = stack_directions(model, basis)
    spans = {
        n: replace(s, vectors={r: v * 1.01 for r, v in s.vectors.items()})
        for n, s in basis.spans.items()
    }
    longer = replace(basis, spans=spans, defect=2 * (1.01**2 - 1))
    found = _positions(model, longer, _gradient("inside", matrix).view(1, 40, 6))
    assert 0 < float(found["weight"].norm()) <= 1
    honest = _positions(
        model, replace(longer, defect=0.0), _gradient("inside", matrix).view(1, 40, 6)
    )
    # what the test would look like if the defect were not counted
    assert float(honest["weight"].norm()) > 1


def _widen(block, span):
    def wide(value):
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(block, PerExample):
        block = PerExample({role: g.double() for role, g in block.grads.items()})
    else:
        block = replace(block, **{f.name: wide(getattr(block, f.name)) for f in fields(block)})
    return block.inner_products(
        replace(span, vectors={role: v.double() for role, v in span.vectors.items()})
    )


# -- what does not go together ---------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["flat", "embedding"])
def test_another_clipping_than_that_of_the_basis_is_refused(mlp, clipping):
    model, batch = mlp
    with pytest.raises(ValueError, match="clipping='embedding_residual'"):
        ClippedSummer(find_layers(model), basis_of(model, batch[0]), Clip(1.0, clipping))


@pytest.mark.parametrize("clipping", SPLIT)
def test_split_clipping_without_a_basis_is_refused(mlp, clipping):
    with pytest.raises(ValueError, match="GEP"):
        ClippedSummer(find_layers(mlp[0]), {}, Clip(1.0, clipping))
    with pytest.raises(ValueError, match="no rule for one factor"):
        clip_factors(torch.ones(2), 1.0, clipping)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ValueError, match="max_grad_norm must be positive and finite"):
        clip_factors(torch.ones(2), bound, "flat")
    with pytest.raises(ValueError, match="automatic_gamma must be positive and finite"):
        clip_factors(torch.ones(2), 1.0, "automatic", bound)
