from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dpkfc.curvature import likelihood
from dpkfc.curvature.likelihood import ProbeRandomness, labels_fit, likelihood_loss, logits_of
from tests.models import randn


def _draws(total, seed=0):
    return ProbeRandomness(torch.Generator().manual_seed(seed), total)


def _loss(likelihood, output, labels="model", given=None, draws=None):
    n = logits_of(output).shape[0]
    return likelihood_loss(
        likelihood, output, labels=labels, given=given, draws=draws or _draws(n), rows=slice(0, n)
    )


def test_labels_come_from_the_models_own_distribution():
    """The gradient of the loss at the logits is p − onehot(y), which tells y; its covariance is the
    Fisher matrix.
    """
    logits = torch.tensor([2.0, 0.0, -1.0]).repeat(20_000, 1).requires_grad_()
    (b,) = torch.autograd.grad(_loss("categorical", logits).sum(), logits)
    p = torch.softmax(logits[0].detach(), -1)
    drawn = (p - b).argmax(1)
    counts = torch.bincount(drawn, minlength=3) / 20_000
    assert torch.allclose(counts, p, atol=0.01)
    fisher = torch.diag(p) - torch.outer(p, p)
    assert torch.allclose(b.T @ b / 20_000, fisher, atol=0.01)


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 4, 2, 3), (5, 4, 2, 3, 2)])
def test_given_labels_are_averaged_over_an_examples_positions(shape):
    logits = torch.randn(shape)
    classes_last = logits.movedim(1, -1) if logits.dim() >= 4 else logits
    target = torch.randint(4, classes_last.shape[:-1])
    picked = F.log_softmax(classes_last, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exact = -picked.reshape(5, -1).mean(1)
    assert torch.allclose(_loss("categorical", logits, "given", target), exact, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 4, 3, 5), (2, 4, 3, 5, 6)])
def test_labels_fit_where_every_position_has_a_class_of_the_output(shape):
    output = torch.randn(shape)
    places = (2, *shape[2:]) if output.dim() >= 4 else shape[:-1]
    classes = torch.full(places, 3)
    classes[0] = -100
    assert labels_fit("categorical", output, classes)
    assert not labels_fit("categorical", output, classes + 1)
    assert not labels_fit("categorical", output, classes.float())


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
    assert torch.allclose(
        _loss("gaussian", output, "given", target), 0.5 * (output - target).square().mean(1)
    )
    exact = F.binary_cross_entropy_with_logits(output, target, reduction="none").mean(1)
    assert torch.allclose(_loss("bernoulli", output, "given", target), exact)
    assert torch.allclose(
        _loss("gaussian", output[:, 0], "given", target[:, :1]),
        0.5 * (output - target)[:, 0].square(),
    )


def test_numbers_belong_to_examples_not_to_micro_batches():
    whole = _draws(9).rows("uniform", (2,), slice(0, 9), torch.device("cpu"))
    parts = _draws(9)
    pieces = [
        parts.rows("uniform", (2,), slice(a, b), torch.device("cpu"))
        for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.equal(whole, torch.cat(pieces))
    with pytest.raises(ValueError, match="changed its shape"):
        parts.rows("uniform", (3,), slice(0, 9), torch.device("cpu"))


def test_outputs_of_other_libraries():
    logits = torch.randn(2, 3)
    assert (
        logits_of(SimpleNamespace(logits=logits)) is logits
        and logits_of({"logits": logits}) is logits
    )
    with pytest.raises(ValueError, match="tuple without `.logits`"):
        logits_of((logits,))


@pytest.mark.parametrize(
    ("likelihood", "output", "labels", "given", "message"),
    [
        (
            "categorical",
            torch.randn(3, 2),
            "given",
            None,
            "labels='given' needs a probe with labels",
        ),
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
        likelihood_loss(
            likelihood,
            output,
            labels=labels,
            given=given,
            draws=_draws(3),
            rows=slice(0, output.shape[0]),
        )


def test_an_output_of_another_batch_is_named():
    with pytest.raises(ValueError, match="the leading axis must be the batch"):
        likelihood_loss(
            "categorical",
            torch.randn(4, 3),
            labels="model",
            given=None,
            draws=_draws(3),
            rows=slice(0, 3),
        )


# -- sequences


def test_the_loss_of_a_text_is_the_mean_over_its_own_positions():
    """Labels that the model draws, at three texts of length 4, 1 and 0, against a loop over
    positions.
    """
    logits = randn(3, 4, 5).requires_grad_()
    lengths = (4, 1, 0)
    mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(1)
    losses = likelihood_loss(
        "categorical",
        logits,
        labels="model",
        given=None,
        draws=_draws(3, 7),
        rows=slice(0, 3),
        mask=mask,
    )
    (b,) = torch.autograd.grad(losses.sum(), logits)
    uniform = torch.rand(3, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for n, length in enumerate(lengths):
        for t in range(4):
            p = torch.softmax(logits[n, t].detach(), -1)
            drawn = int((p.cumsum(0) < uniform[n, t]).sum())
            onehot = F.one_hot(torch.tensor(drawn), 5)
            exact = (p - onehot) / length if t < length else torch.zeros(5, dtype=torch.float64)
            assert torch.allclose(b[n, t], exact, atol=1e-12)
    assert float(losses[2].detach()) == 0.0


@pytest.mark.parametrize("kind", ["categorical", "gaussian", "bernoulli"])
def test_padding_has_no_gradient_and_no_weight(kind):
    long = randn(2, 6, 3).requires_grad_()
    mask = torch.arange(6) < torch.tensor([[4], [2]])
    given = torch.randint(3, (2, 6)) if kind == "categorical" else torch.rand(2, 6, 3)
    losses = likelihood_loss(
        kind, long, labels="given", given=given, draws=_draws(2), rows=slice(0, 2), mask=mask
    )
    (b,) = torch.autograd.grad(losses.sum(), long)
    assert bool((b[~mask] == 0).all()) and bool((b[mask] != 0).any())
    for n, length in enumerate((4, 2)):
        short = _loss(kind, long[n : n + 1, :length].detach(), "given", given[n : n + 1, :length])
        assert float(losses[n].detach()) == pytest.approx(float(short), rel=1e-12)


def test_a_mask_is_read_for_sequences_alone_and_must_fit_them():
    logits, mask = torch.randn(2, 3), torch.tensor([[True, False, False]] * 2)
    pooled = likelihood_loss(
        "categorical",
        logits,
        labels="model",
        given=None,
        draws=_draws(2),
        rows=slice(0, 2),
        mask=mask,
    )
    assert torch.equal(pooled, _loss("categorical", logits))
    with pytest.raises(
        ValueError, match=r"mask of shape \(2, 3\).*your own loss\(output, generator\)"
    ):
        likelihood_loss(
            "categorical",
            torch.randn(2, 5, 4),
            labels="model",
            given=None,
            draws=_draws(2),
            rows=slice(0, 2),
            mask=mask,
        )


@pytest.mark.parametrize("shape", [(1, 2), (7, 5), (40, 3)])
def test_cross_entropy_in_pieces_is_that_of_torch(shape, monkeypatch):
    """Losses, gradients (of any upstream gradient) and draws, whatever the size of a piece."""
    logits = randn(shape).requires_grad_()
    target = torch.randint(shape[1], shape[:1])
    target[::3] = -100
    counted, upstream = target != -100, randn(shape[0])
    exact = F.cross_entropy(logits, target, reduction="none")
    (gradient,) = torch.autograd.grad(exact, logits, upstream)
    for piece in (1, 11, 1 << 20):
        monkeypatch.setattr(likelihood, "_PIECE", piece)
        losses = likelihood._CrossEntropy.apply(logits, target, counted)
        assert torch.allclose(losses, exact, atol=1e-14)
        assert torch.allclose(
            torch.autograd.grad(losses, logits, upstream)[0], gradient, atol=1e-14
        )
    whole, uniform = logits.detach(), torch.rand(shape[0], dtype=torch.float64)
    drawn = likelihood._draw_classes(whole, uniform, "model")
    monkeypatch.setattr(likelihood, "_PIECE", 4)
    assert torch.equal(drawn, likelihood._draw_classes(whole, uniform, "model"))
