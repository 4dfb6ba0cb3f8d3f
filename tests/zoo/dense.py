"""Multilayer perceptrons, activations, heads, and parameters that no layer of torch owns."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.registry import (
    UNCLEAR,
    Network,
    add_architecture,
    classify,
    parameter,
    register,
    regress,
    targets,
    vectors,
)

# -- multilayer perceptrons ------------------------------------------------------------------------


@register("activations", vectors(), classify)
def prelu_per_channel():
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 3))


@register("activations", vectors(), classify, is_random=True)
def rrelu_of_random_slopes():
    return nn.Sequential(nn.Linear(4, 6), nn.RReLU(), nn.Linear(6, 3))


register_mlp = register("mlp", vectors(), classify)


@register_mlp
def frozen_batch_norm():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[1].eval().requires_grad_(False)
    return model


@register("mlp", vectors(), classify, is_random=True)
def stochastic_depth():
    def forward(m, x):
        h = m.up(x)
        kept = (torch.rand(h.shape[0], 1) < 0.8).to(h)
        return m.head(h + kept * torch.tanh(m.mid(h)) / 0.8)

    return Network(forward, up=nn.Linear(4, 5), mid=nn.Linear(5, 5), head=nn.Linear(5, 3))


@register("mlp", vectors(), classify, kind=UNCLEAR)
def unused_parameters():
    def forward(m, x):
        return m.head(x)

    return Network(forward, head=nn.Linear(4, 3), unused=nn.Linear(3, 3), spare=parameter(2))


@register_mlp
def float32_inside():
    def forward(m, x):
        h = m.up(x)
        scale = h.float().abs().mean(-1, keepdim=True).clamp(min=0.1)
        return m.head(h / scale.double())

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register_mlp
def bilinear_module():
    def forward(m, x):
        return m.pair(x[:, :2], torch.tanh(m.up(x)))

    return Network(forward, up=nn.Linear(4, 3), pair=nn.Bilinear(2, 3, 3))


@register_mlp
def addmm_layers():
    def forward(m, x):
        h = torch.addmm(m.b1, x, m.w1).tanh()
        return torch.addmm(m.b2, h, m.w2, beta=0.5, alpha=2.0)

    return Network(
        forward, w1=parameter(4, 5), b1=parameter(5), w2=parameter(5, 3), b2=parameter(3)
    )


@register_mlp
def matrix_on_the_left():
    """Features first inside: weights `[d, d]` times inputs `[d, n]`."""

    def forward(m, x):
        h = torch.tanh(m.w1 @ x.T + m.b1[:, None])
        return (m.w2 @ h).T

    return Network(forward, w1=parameter(5, 4), b1=parameter(5), w2=parameter(3, 5))


@register("mlp", targets((6,), (6,)), regress)
def tied_autoencoder():
    def forward(m, x):
        return F.linear(torch.tanh(m.encode(x)), m.encode.weight.t(), m.bias)

    return Network(forward, encode=nn.Linear(6, 3), bias=parameter(6))


@register_mlp
def scalar_temperature_of_shape_one():
    def forward(m, x):
        return m.head(x) * m.temperature + m.shift.squeeze()

    return Network(forward, head=nn.Linear(4, 3), temperature=parameter(1), shift=parameter(1, 1))


@register_mlp
def ensemble_by_batched_products():
    """Several members at once: weights `[members, d, k]`, inputs expanded over members."""

    def forward(m, x):
        h = torch.baddbmm(m.b1, x.expand(3, -1, -1), m.w1).tanh()
        return torch.bmm(h, m.w2).mean(0)

    return Network(forward, w1=parameter(3, 4, 5), b1=parameter(3, 1, 5), w2=parameter(3, 5, 3))


register_wide_mlp = register("mlp", vectors(d=6), classify)


@register_wide_mlp
def vector_quantisation():
    def forward(m, x):
        h = m.up(x)
        nearest = torch.cdist(h, m.codes.weight).argmin(1)
        q = m.codes(nearest)
        return m.head(h + (q - h).detach()) + 0.1 * (q - h.detach()).square().sum(1, keepdim=True)

    return Network(forward, up=nn.Linear(6, 4), codes=nn.Embedding(5, 4), head=nn.Linear(4, 3))


# -- parametrizations ------------------------------------------------------------------------------


register_parametrized = register("parametrized", vectors(), classify)


@register_parametrized
def orthogonal_weights():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


@register_parametrized
def spectral_norm_in_eval_mode():
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)
    )
    return model.eval()


def _old(function, *args):
    """Apply a function that torch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return function(*args)


_COMPUTED = {
    "old_weight_norm": lambda: _old(nn.utils.weight_norm, nn.Linear(4, 4)),
    "old_spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)).eval(),
    "pruned_weights": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "parametrized_norm": lambda: parametrize.register_parametrization(
        nn.LayerNorm(4), "weight", nn.Tanh()
    ),
}
for _name, _build in _COMPUTED.items():
    add_architecture(
        _name,
        "parametrized",
        lambda b=_build: nn.Sequential(b(), nn.Tanh(), nn.Linear(4, 3)),
        vectors(),
        classify,
    )


@register_parametrized
def lora_merged_weight():
    def forward(m, x):
        return m.head(F.linear(x, m.base + m.b @ m.a))

    frozen = torch.randn(5, 4)
    return Network(
        forward, {"base": frozen}, a=parameter(2, 4), b=parameter(5, 2), head=nn.Linear(5, 3)
    )


@register_parametrized
def child_called_and_its_weight_read():
    def forward(m, x):
        return m.head(torch.tanh(m.fc(x)) @ m.fc.weight)

    return Network(forward, fc=nn.Linear(4, 5), head=nn.Linear(4, 3))


@register_parametrized
def weight_decay_in_the_loss_of_each_example():
    def forward(m, x):
        return m.fc(x) + 0.1 * m.fc.weight.square().sum()

    return Network(forward, fc=nn.Linear(4, 3))
