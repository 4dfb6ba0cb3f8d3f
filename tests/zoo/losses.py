"""Losses of all kinds, each of which gives one number an example."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.registry import (
    UNCLEAR,
    Network,
    add_architecture,
    generator_of,
    mlp,
    normal,
    parameter,
    register,
    targets,
    vectors,
)

VECTORS = vectors()


def _cross_entropy_smoothed(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none", label_smoothing=0.1)


def _nll_by_arange(model, batch):
    x, y = batch
    return -model(x).log_softmax(-1)[torch.arange(len(y)), y]


def _looped(model, batch):
    """A mean-reduced loss applied to one row after the other."""
    x, y = batch
    logits = model(x)
    return torch.stack([F.cross_entropy(logits[i : i + 1], y[i : i + 1]) for i in range(len(y))])


def _ignored_label(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y.masked_fill(y == 0, -100), reduction="none")


for _loss in (
    _cross_entropy_smoothed,
    _nll_by_arange,
    _looped,
    _ignored_label,
):
    add_architecture(f"loss{_loss.__name__}", "losses", mlp, VECTORS, _loss)


def _squeezed(model, batch):
    x, y = batch
    return (model(x).squeeze() - y).square()


def _squeezed_strictly(model, batch):
    x, y = batch
    return F.binary_cross_entropy_with_logits(
        model(x).squeeze(), torch.sigmoid(y), reduction="none"
    )


def _squeezed_last(model, batch):
    x, y = batch
    return F.binary_cross_entropy_with_logits(
        model(x).squeeze(-1), torch.sigmoid(y), reduction="none"
    )


add_architecture(
    "loss_squeezed_last_axis", "losses", lambda: mlp(classes=1), targets((4,), ()), _squeezed_last
)
add_architecture(
    "loss_squeezed_all_axes", "losses", lambda: mlp(classes=1), targets((4,), ()), _squeezed
)
add_architecture(
    "loss_squeezed_strictly",
    "losses",
    lambda: mlp(classes=1),
    targets((4,), ()),
    _squeezed_strictly,
    kind=UNCLEAR,
)


def _column_of_losses(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y, reduction="none")


add_architecture(
    "loss_of_shape_n_by_one",
    "losses",
    lambda: mlp(classes=1),
    targets((4,), (1,)),
    _column_of_losses,
    kind=UNCLEAR,
)


def _distribution_validated(model, batch):
    x, y = batch
    mean, raw = model(x).unbind(-1)
    return -torch.distributions.Normal(mean, F.softplus(raw) + 0.1).log_prob(y)


add_architecture(
    "loss_of_a_validated_distribution",
    "losses",
    lambda: mlp(classes=2),
    targets((4,), ()),
    _distribution_validated,
)


def _gaussian(model, batch):
    x, y = batch
    mean, raw = model(x).unbind(-1)
    return F.gaussian_nll_loss(mean, y, F.softplus(raw), reduction="none", full=True)


add_architecture(
    "loss_of_a_gaussian", "losses", lambda: mlp(classes=2), targets((4,), ()), _gaussian
)


def _label_sets(n):
    labels = torch.tensor([[1, -1, 0], [2, 0, -1], [0, 1, 2]])
    return vectors()(n)[0], labels[torch.randint(3, (n,), generator=generator_of(n))]


def _multilabel_margin(model, batch):
    return F.multilabel_margin_loss(model(batch[0]), batch[1], reduction="none")


add_architecture("loss_of_sets_of_labels", "losses", mlp, _label_sets, _multilabel_margin)


def _tasks(n):
    g = generator_of(n)
    return normal(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g), normal(n, generator=g)


def _multi_task(model, batch):
    x, labels, values = batch
    h = torch.tanh(model.body(x))
    one = F.cross_entropy(model.classes(h), labels, reduction="none")
    two = (model.value(h).squeeze(1) - values).square()
    s = model.log_variances
    return torch.exp(-s[0]) * one + torch.exp(-s[1]) * two + s.sum()


@register("losses", _tasks, _multi_task)
def loss_of_tasks_with_learnt_weights():
    return Network(
        lambda m, x: m.body(x),
        body=nn.Linear(4, 5),
        classes=nn.Linear(5, 3),
        value=nn.Linear(5, 1),
        log_variances=parameter(2),
    )


def _triplets(n):
    g = generator_of(n)
    return tuple(normal(n, 4, generator=g) for _ in range(3))


def _triplet(model, batch):
    a, p, q = (model(x) for x in batch)
    return F.triplet_margin_loss(a, p, q, margin=2.0, reduction="none")


add_architecture("loss_of_triplets", "losses", mlp, _triplets, _triplet)


def _tags(n):
    g = generator_of(n)
    return (
        normal(n, 4, 4, generator=g),
        torch.randint(0, 3, (n, 4), generator=g),
        torch.randint(1, 5, (n,), generator=g),
    )


def _tokens_in_one_row(model, batch):
    """Losses of all tokens in one call on `[n * t, k]`, then the mean over each example's own
    tokens.
    """
    x, tags, lengths = batch
    logits = model(x)
    losses = F.cross_entropy(logits.view(-1, 3), tags.view(-1), reduction="none").view(len(x), -1)
    mask = torch.arange(4) < lengths[:, None]
    return (losses * mask).sum(1) / mask.sum(1)


add_architecture("loss_of_tokens_flattened_and_masked", "losses", mlp, _tags, _tokens_in_one_row)


# -- double backward -------------------------------------------------------------------------------


def _gradient_penalty(model, batch):
    x, y = batch
    x = x.detach().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y, reduction="none") + (slope.norm(dim=1) - 1).square()


add_architecture("gradient_penalty", "double backward", mlp, VECTORS, _gradient_penalty)


@register(
    "double backward",
    VECTORS,
    lambda model, batch: model(batch[0]).squeeze(-1) + 0.5 * batch[0][:, 0],
)
def forces_from_an_energy():
    """The forward pass itself differentiates: outputs are gradients of an inner energy."""

    def forward(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = m.inner(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().sum(1, keepdim=True)

    return Network(forward, inner=nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 1)))
