from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dpkfc.curvature.likelihood import Draws, likelihood_loss, logits_of


def _draws(total: int, seed: int = 0) -> Draws:
    return Draws(torch.Generator().manual_seed(seed), total)


def _loss(likelihood: str, output, labels: str = "model", given=None, draws: Draws | None = None) -> torch.Tensor:
    n = logits_of(output).shape[0]
    return likelihood_loss(likelihood, output, labels=labels, given=given, draws=draws or _draws(n), rows=slice(0, n))


def test_labels_come_from_the_models_own_distribution():
    """The gradient of the loss at the logits is p − onehot(y), which tells y; its covariance is the Fisher matrix."""
    logits = torch.tensor([2.0, 0.0, -1.0]).repeat(20_000, 1).requires_grad_()
    (b,) = torch.autograd.grad(_loss("categorical", logits).sum(), logits)
    p = torch.softmax(logits[0].detach(), -1)
    drawn = (p - b).argmax(1)
    counts = torch.bincount(drawn, minlength=3) / 20_000
    assert torch.allclose(counts, p, atol=0.01)
    fisher = torch.diag(p) - torch.outer(p, p)
    assert torch.allclose(b.T @ b / 20_000, fisher, atol=0.01)


def test_uniform_labels_ignore_the_model():
    logits = torch.tensor([9.0, 0.0, 0.0, 0.0]).repeat(8_000, 1).requires_grad_()
    (b,) = torch.autograd.grad(_loss("categorical", logits, "uniform").sum(), logits)
    drawn = (torch.softmax(logits.detach(), -1) - b).argmax(1)
    assert torch.allclose(torch.bincount(drawn, minlength=4) / 8_000, torch.full((4,), 0.25), atol=0.02)


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 4, 2, 3), (5, 4, 2, 3, 2)])
def test_given_labels_are_averaged_over_an_examples_positions(shape):
    logits = torch.randn(shape)
    classes_last = logits.movedim(1, -1) if logits.dim() >= 4 else logits
    target = torch.randint(4, classes_last.shape[:-1])
    picked = F.log_softmax(classes_last, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exact = -picked.reshape(5, -1).mean(1)
    assert torch.allclose(_loss("categorical", logits, "given", target), exact, atol=1e-6)


def test_ignored_positions_do_not_count():
    logits, target = torch.randn(2, 3, 4), torch.tensor([[1, -100, 2], [-100, -100, -100]])
    losses = _loss("categorical", logits, "given", target)
    exact = F.cross_entropy(logits[0, [0, 2]], target[0, [0, 2]])
    assert torch.allclose(losses, torch.stack([exact, torch.tensor(0.0)]))


def test_gaussian_and_bernoulli_draw_from_the_model():
    output = torch.randn(4_000, 2).requires_grad_()
    (b,) = torch.autograd.grad(_loss("gaussian", output).sum(), output)
    assert torch.allclose((2 * b).var(0), torch.ones(2), atol=0.1) and float(b.mean().abs()) < 0.03
    logits = torch.full((4_000,), 1.0).requires_grad_()
    (b,) = torch.autograd.grad(_loss("bernoulli", logits).sum(), logits)
    p = float(torch.sigmoid(torch.tensor(1.0)))
    assert float((b < 0).float().mean()) == pytest.approx(p, abs=0.03)
    (b,) = torch.autograd.grad(_loss("bernoulli", logits, "uniform").sum(), logits)
    assert float((b < 0).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_given_targets_of_gaussian_and_bernoulli():
    output, target = torch.randn(3, 2), torch.rand(3, 2)
    assert torch.allclose(_loss("gaussian", output, "given", target), 0.5 * (output - target).square().mean(1))
    exact = F.binary_cross_entropy_with_logits(output, target, reduction="none").mean(1)
    assert torch.allclose(_loss("bernoulli", output, "given", target), exact)
    assert torch.allclose(
        _loss("gaussian", output[:, 0], "given", target[:, :1]), 0.5 * (output - target)[:, 0].square()
    )


def test_numbers_belong_to_examples_not_to_micro_batches():
    whole = _draws(9).rows("uniform", (2,), slice(0, 9), torch.device("cpu"))
    parts = _draws(9)
    pieces = [parts.rows("uniform", (2,), slice(a, b), torch.device("cpu")) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert torch.equal(whole, torch.cat(pieces))
    with pytest.raises(ValueError, match="changed its shape"):
        parts.rows("uniform", (3,), slice(0, 9), torch.device("cpu"))


def test_outputs_of_other_libraries():
    logits = torch.randn(2, 3)
    assert logits_of(SimpleNamespace(logits=logits)) is logits and logits_of({"logits": logits}) is logits
    with pytest.raises(ValueError, match="tuple without `.logits`"):
        logits_of((logits,))


@pytest.mark.parametrize(
    ("likelihood", "output", "labels", "given", "message"),
    [
        ("categorical", torch.randn(3, 2), "given", None, "labels='given' needs a probe with labels"),
        (
            "categorical",
            torch.randn(3, 2),
            "given",
            torch.tensor([0, 1, 2]),
            "from 0 to 2, but the model has 2 classes",
        ),
        ("categorical", torch.randn(3, 2), "given", torch.tensor([0, -1, 1]), "from -1 to 1"),
        ("categorical", torch.randn(3, 2), "given", torch.zeros(3), "integer labels"),
        ("categorical", torch.randn(3, 2), "given", torch.zeros(3, 1).long(), "integer labels"),
        ("categorical", torch.randn(3), "model", None, "categorical likelihood needs logits"),
        ("categorical", torch.randn(3, 1), "model", None, "categorical likelihood needs logits"),
        ("gaussian", torch.randn(3, 2), "given", torch.zeros(3), "they must match"),
        ("gaussian", torch.tensor([[float("nan")]]), "model", None, "NaN or infinity"),
    ],
)
def test_what_does_not_fit_is_named(likelihood, output, labels, given, message):
    with pytest.raises(ValueError, match=message):
        likelihood_loss(likelihood, output, labels=labels, given=given, draws=_draws(3), rows=slice(0, output.shape[0]))


def test_an_output_of_another_batch_is_named():
    with pytest.raises(ValueError, match="the leading axis must be the batch"):
        likelihood_loss("categorical", torch.randn(4, 3), labels="model", given=None, draws=_draws(3), rows=slice(0, 3))
