"""Stochastic Lanczos quadrature of the whole Fisher matrix against the exact spectrum of tiny
models in float64.
"""

import pytest
import torch
from torch import nn

from dpkfc_papers.recipes.networks import VisionTransformer
from dpkfc_papers.spectral_density import density, fisher_product, lanczos

pytestmark = pytest.mark.slow


def tiny():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    return model, torch.randn(6, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def exact(model, inputs):
    """The Fisher matrix by a loop over examples and classes of plain gradients of log-likelihoods,
    each with its probability.
    """
    total = 0.0
    parameters = list(model.parameters())
    for x in inputs:
        logits = model(x[None])[0]
        chance = logits.detach().softmax(-1)
        for k in range(len(logits)):
            scalar = logits.log_softmax(-1)[k]
            gradient = torch.cat(
                [g.reshape(-1) for g in torch.autograd.grad(scalar, parameters, retain_graph=True)]
            )
            total = total + chance[k] * torch.outer(gradient, gradient)
    return total / len(inputs)


def test_a_product_is_that_of_the_exact_matrix():
    model, inputs = tiny()
    product, dim = fisher_product(model, inputs)
    assert dim == sum(p.numel() for p in model.parameters())
    vectors = torch.eye(dim, dtype=torch.float64)
    found = torch.stack([product(v) for v in vectors])
    assert torch.allclose(found, exact(model, inputs), atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_all_steps_of_lanczos_find_every_distinct_eigenvalue():
    model, inputs = tiny()
    fisher = exact(model, inputs)
    product, dim = fisher_product(model, inputs)
    nodes, weights = lanczos(product, torch.ones(dim, dtype=torch.float64), dim)
    expected = torch.linalg.eigvalsh(fisher).flip(0)
    positive = expected[expected > 1e-10]
    assert torch.allclose(nodes[: len(positive)], positive, rtol=1e-8)
    assert float(weights.sum()) == pytest.approx(1)


def test_the_density_has_the_moments_and_counts_of_the_exact_spectrum():
    model, inputs = tiny()
    product, dim = fisher_product(model, inputs)
    expected = torch.linalg.eigvalsh(exact(model, inputs)).flip(0)
    found = density(
        product,
        dim,
        steps=dim,
        starts=40,
        generator=torch.Generator().manual_seed(0),
    )
    assert found.trace == pytest.approx(float(expected.sum()), rel=0.15)
    assert float(dim * (found.nodes.square() * found.weights).sum()) == pytest.approx(
        float(expected.square().sum()), rel=0.25
    )
    for bound in (0.5 * float(expected[0]), 0.5 * float(expected[3])):
        counted = float((found.weights * (found.nodes > bound)).sum() * dim)
        assert counted == pytest.approx(float((expected > bound).sum()), rel=0.35)


def test_attention_is_differentiated_twice():
    model = (
        VisionTransformer((1, 4), patch=2, width=8, depth=1, heads=2, num_classes=3).double().eval()
    )
    inputs = torch.randn(
        2, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    product, dim = fisher_product(model, inputs)
    vector = torch.linspace(-1, 1, dim, dtype=torch.float64)
    assert torch.allclose(product(vector), exact(model, inputs) @ vector, atol=1e-10)
