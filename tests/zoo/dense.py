"""Multilayer perceptrons, activations, heads, and parameters that no layer of torch owns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.registry import (
    UNCLEAR,
    Network,
    add_architecture,
    classify,
    parameter,
    register,
    regress,
    square,
    targets,
    tensors,
    vectors,
)

# -- multilayer perceptrons ------------------------------------------------------------------------

ACTIVATIONS = {
    "relu_in_place": nn.ReLU(inplace=True),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu_in_place": nn.SiLU(inplace=True),
    "mish": nn.Mish(),
    "elu": nn.ELU(),
    "selu": nn.SELU(),
    "celu": nn.CELU(),
    "softplus": nn.Softplus(),
    "softsign": nn.Softsign(),
    "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(),
    "hardsigmoid": nn.Hardsigmoid(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "logsigmoid": nn.LogSigmoid(),
    "tanhshrink": nn.Tanhshrink(),
    "softshrink": nn.Softshrink(),
    "hardshrink": nn.Hardshrink(),
    "relu6": nn.ReLU6(),
    "threshold": nn.Threshold(0.1, 0.0),
    "softmax": nn.Softmax(dim=-1),
    "softmin": nn.Softmin(dim=1),
    "log_softmax": nn.LogSoftmax(dim=-1),
}


def _activated(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))


for _name, _activation in ACTIVATIONS.items():
    add_architecture(
        f"mlp_{_name}", "activations", lambda a=_activation: _activated(a), vectors(), classify
    )


@register("activations", vectors(), classify)
def prelu_per_channel() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 3))


@register("activations", vectors(), classify)
def glu_module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 3))


@register("activations", vectors(), classify)
def swiglu() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        a, b = m.up(x).chunk(2, dim=-1)
        return m.down(F.silu(a) * b)

    return Network(forward, up=nn.Linear(4, 12), down=nn.Linear(6, 3))


@register("activations", vectors(), classify)
def maxout() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(m.up(x).unflatten(-1, (6, 2)).amax(-1))

    return Network(forward, up=nn.Linear(4, 12), head=nn.Linear(6, 3))


@register("activations", vectors(), classify)
def snake_with_learnt_frequency() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        return m.head(h + torch.sin(m.a * h).square() / m.a)

    return Network(
        forward, up=nn.Linear(4, 6), head=nn.Linear(6, 3), a=nn.Parameter(torch.ones(6) + 0.3)
    )


@register("mlp", vectors(), classify)
def logistic_regression() -> nn.Module:
    return nn.Linear(4, 3)


@register("mlp", vectors(), classify)
def bottleneck_of_width_one() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3))


@register("mlp", vectors(d=5), classify)
def width_equals_batch() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


@register("mlp", tensors((2, 3)), classify)
def flatten_by_view() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.up(x.view(x.size(0), -1))))

    return Network(forward, up=nn.Linear(6, 5), head=nn.Linear(5, 3))


@register("mlp", vectors(), classify)
def residual_in_place() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        h += torch.tanh(m.mid(h.clone()))
        h *= 0.5
        h.add_(1.0)
        return m.head(h)

    return Network(forward, up=nn.Linear(4, 5), mid=nn.Linear(5, 5), head=nn.Linear(5, 3))


@register("mlp", vectors(), classify)
def layer_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))


@register("mlp", vectors(), classify)
def rms_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.ReLU(), nn.Linear(6, 3))


@register("mlp", vectors(), classify)
def rms_norm_by_hand() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + m.gain)
        return m.head(h)

    return Network(forward, up=nn.Linear(4, 6), head=nn.Linear(6, 3), gain=parameter(6))


@register("mlp", vectors(), classify)
def frozen_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[1].eval().requires_grad_(False)
    return model


@register("mlp", vectors(), classify)
def batch_norm_in_eval_mode_with_gain() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[1].eval()
    return model


@register("mlp", vectors(), classify, is_random=True)
def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


@register("mlp", vectors(), classify, is_random=True)
def stochastic_depth() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        kept = (torch.rand(h.shape[0], 1) < 0.8).to(h)
        return m.head(h + kept * torch.tanh(m.mid(h)) / 0.8)

    return Network(forward, up=nn.Linear(4, 5), mid=nn.Linear(5, 5), head=nn.Linear(5, 3))


@register("mlp", vectors(), classify, is_random=True)
def gaussian_noise_layer() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        return m.head(torch.tanh(h + 0.1 * torch.randn_like(h)))

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register("mlp", targets((4,), (4,)), regress, is_random=True)
def variational_autoencoder() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        mean, log_variance = m.encode(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return m.decode(z)

    return Network(forward, encode=nn.Linear(4, 6), decode=nn.Linear(3, 4))


@register("mlp", vectors(), classify)
def frozen_backbone() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


@register("mlp", vectors(), classify)
def frozen_in_the_middle_bias_only() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


@register("mlp", vectors(), classify)
def backbone_without_gradient() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(m.body(x))
        return m.head(h)

    model = Network(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 3))
    model.body.requires_grad_(False)
    return model


@register("mlp", vectors(), classify, kind=UNCLEAR)
def unused_parameters() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(x)

    return Network(forward, head=nn.Linear(4, 3), unused=nn.Linear(3, 3), spare=parameter(2))


@register("mlp", vectors(), classify)
def float32_inside() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        scale = h.float().abs().mean(-1, keepdim=True).clamp(min=0.1)
        return m.head(h / scale.double())

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register("mlp", vectors(), classify)
def normalised_weights_by_hand() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(m.weight, dim=1), m.bias)

    return Network(forward, weight=parameter(3, 4), bias=parameter(3))


@register("mlp", vectors(), classify)
def cosine_head() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = F.normalize(torch.tanh(m.up(x)), dim=-1)
        return m.scale.exp() * h @ F.normalize(m.classes, dim=-1).T

    return Network(
        forward, up=nn.Linear(4, 5), classes=parameter(3, 5), scale=nn.Parameter(torch.tensor(0.3))
    )


@register("mlp", vectors(), classify)
def bilinear_module() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.pair(x[:, :2], torch.tanh(m.up(x)))

    return Network(forward, up=nn.Linear(4, 3), pair=nn.Bilinear(2, 3, 3))


@register("mlp", vectors(), classify)
def bilinear_by_einsum() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return torch.einsum("ni,kij,nj->nk", x, m.w, torch.tanh(x))

    return Network(forward, w=parameter(3, 4, 4))


@register("mlp", vectors(), classify)
def low_rank_products() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return x @ (m.a @ m.b) + m.bias

    return Network(forward, a=parameter(4, 2), b=parameter(2, 3), bias=parameter(3))


@register("mlp", vectors(), classify)
def addmm_layers() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = torch.addmm(m.b1, x, m.w1).tanh()
        return torch.addmm(m.b2, h, m.w2, beta=0.5, alpha=2.0)

    return Network(
        forward, w1=parameter(4, 5), b1=parameter(5), w2=parameter(5, 3), b2=parameter(3)
    )


@register("mlp", vectors(), classify)
def matrix_on_the_left() -> nn.Module:
    """Features first inside: weights `[d, d]` times inputs `[d, n]`."""

    def forward(m: Network, x: Tensor) -> Tensor:
        h = torch.tanh(m.w1 @ x.T + m.b1[:, None])
        return (m.w2 @ h).T

    return Network(forward, w1=parameter(5, 4), b1=parameter(5), w2=parameter(3, 5))


@register("mlp", vectors(), classify)
def tensordot_layers() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = torch.tensordot(x.view(-1, 2, 2), m.w, dims=([1, 2], [1, 2]))
        return torch.tensordot(h.tanh(), m.v, dims=1)

    return Network(forward, w=parameter(5, 2, 2), v=parameter(5, 3))


@register("mlp", vectors(), classify)
def outer_products() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        return m.head((h.unsqueeze(2) * h.unsqueeze(1)).flatten(1))

    return Network(forward, up=nn.Linear(4, 3), head=nn.Linear(9, 3))


@register("mlp", vectors(), classify)
def factorisation_machine() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        pairs = ((x @ m.v).square() - x.square() @ m.v.square()).sum(1, keepdim=True)
        return m.linear(x) + 0.5 * pairs * m.w

    return Network(forward, v=parameter(4, 3), w=parameter(3), linear=nn.Linear(4, 3))


@register("mlp", vectors(), classify)
def fourier_features() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        angles = 2 * torch.pi * x @ m.frequencies
        return m.head(torch.cat([angles.sin(), angles.cos()], -1))

    return Network(forward, {"frequencies": torch.randn(4, 5)}, head=nn.Linear(10, 3))


@register("mlp", vectors(), classify)
def learnt_fourier_features() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        angles = x @ m.frequencies
        return m.head(torch.cat([angles.sin(), angles.cos()], -1))

    return Network(forward, frequencies=parameter(4, 5), head=nn.Linear(10, 3))


@register("mlp", vectors(), classify)
def radial_basis_functions() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        distances = torch.cdist(x, m.centres)
        return m.head(torch.exp(-distances.square() * m.width.exp()))

    return Network(
        forward, centres=parameter(5, 4), width=nn.Parameter(torch.zeros(5)), head=nn.Linear(5, 3)
    )


@register("mlp", vectors(), classify)
def splines_as_in_kan() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        basis = torch.relu(1 - (x.unsqueeze(-1) - m.knots).abs() / 0.8)
        splines = torch.einsum("nik,oik->no", basis, m.coefficients)
        return splines + F.silu(x) @ m.base.T

    knots = torch.linspace(-2, 2, 6)
    return Network(forward, {"knots": knots}, coefficients=parameter(3, 4, 6), base=parameter(3, 4))


@register("mlp", vectors(), classify)
def mixture_of_softmaxes() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        weights = m.gate(x).softmax(-1)
        parts = m.heads(x).view(-1, 2, 3).softmax(-1)
        return (weights.unsqueeze(-1) * parts).sum(1).log()

    return Network(forward, gate=nn.Linear(4, 2), heads=nn.Linear(4, 6))


@register("mlp", vectors(), classify)
def shared_layer_thrice() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = torch.tanh(m.shared(h)) + x
        return m.head(h)

    return Network(forward, shared=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("mlp", vectors(), classify)
def one_parameter_in_two_modules() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


@register("mlp", targets((6,), (6,)), regress)
def tied_autoencoder() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(m.encode(x)), m.encode.weight.t(), m.bias)

    return Network(forward, encode=nn.Linear(6, 3), bias=parameter(6))


@register("mlp", vectors(), classify)
def highway() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        gate = torch.sigmoid(m.gate(x))
        return m.head(torch.lerp(x, torch.tanh(m.change(x)), gate))

    return Network(forward, gate=nn.Linear(4, 4), change=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("mlp", vectors(), classify)
def skip_by_learnt_scalar() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(x + m.alpha * torch.tanh(m.body(x)))

    return Network(
        forward, alpha=nn.Parameter(torch.tensor(0.4)), body=nn.Linear(4, 4), head=nn.Linear(4, 3)
    )


@register("mlp", vectors(), classify)
def scalar_temperature_of_shape_one() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(x) * m.temperature + m.shift.squeeze()

    return Network(forward, head=nn.Linear(4, 3), temperature=parameter(1), shift=parameter(1, 1))


@register("mlp", vectors(), classify)
def ensemble_by_batched_products() -> nn.Module:
    """Several members at once: weights `[members, d, k]`, inputs expanded over members."""

    def forward(m: Network, x: Tensor) -> Tensor:
        h = torch.baddbmm(m.b1, x.expand(3, -1, -1), m.w1).tanh()
        return torch.bmm(h, m.w2).mean(0)

    return Network(forward, w1=parameter(3, 4, 5), b1=parameter(3, 1, 5), w2=parameter(3, 5, 3))


@register("mlp", vectors(), classify)
def deep_ensemble_stack() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in m.members]).mean(0)

    return Network(forward, members=nn.ModuleList(nn.Linear(4, 3) for _ in range(3)))


@register("mlp", vectors(), classify)
def gated_by_argmax() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        best = F.one_hot(h.argmax(-1), 6).to(h)
        return m.head(h * best)

    return Network(forward, up=nn.Linear(4, 6), head=nn.Linear(6, 3))


@register("mlp", vectors(d=6), classify)
def features_sorted() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        values, _ = m.up(x).sort(dim=1, descending=True)
        return m.head(values)

    return Network(forward, up=nn.Linear(6, 6), head=nn.Linear(6, 3))


@register("mlp", vectors(d=6), classify)
def features_topk_and_scatter() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        values, places = h.topk(2, dim=-1)
        sparse = torch.zeros_like(h).scatter(-1, places, values)
        return m.head(sparse)

    return Network(forward, up=nn.Linear(6, 6), head=nn.Linear(6, 3))


@register("mlp", vectors(d=6), classify)
def features_by_where_and_mask() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        h = torch.where(x > 0, h, 0.1 * h)
        return m.head(h.masked_fill(x < -1, 0.0))

    return Network(forward, up=nn.Linear(6, 6), head=nn.Linear(6, 3))


@register("mlp", vectors(d=6), classify)
def pieces_by_split_unbind_stack() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        a, b = x.split([2, 4], dim=1)
        b1, b2 = b.view(-1, 2, 2).unbind(1)
        h = torch.stack([m.one(a), m.two(b1), m.one(b2)], dim=1)
        return m.head(h.sum(1))

    return Network(forward, one=nn.Linear(2, 3), two=nn.Linear(2, 3), head=nn.Linear(3, 3))


@register("mlp", vectors(d=6), classify)
def written_into_an_empty_tensor() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 5)
        out[:, :2] = m.one(x)
        out[:, 2:] = m.two(x)
        return m.head(out)

    return Network(forward, one=nn.Linear(6, 2), two=nn.Linear(6, 3), head=nn.Linear(5, 3))


@register("mlp", vectors(d=6), classify)
def gathered_by_arange() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x).view(-1, 3, 2)
        chosen = h[torch.arange(len(x)), x[:, :3].argmax(1)]
        return m.head(chosen)

    return Network(forward, up=nn.Linear(6, 6), head=nn.Linear(2, 3))


@register("mlp", vectors(d=6), classify)
def cumulative_features() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        return m.head(h.cumsum(1) + torch.logcumsumexp(h, 1) + h.flip(1).roll(1, dims=1))

    return Network(forward, up=nn.Linear(6, 6), head=nn.Linear(6, 3))


@register("mlp", vectors(d=6), classify)
def quantised_straight_through() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        h = h + (h.round() - h).detach()
        return m.head(h)

    return Network(forward, up=nn.Linear(6, 6), head=nn.Linear(6, 3))


@register("mlp", vectors(d=6), classify)
def vector_quantisation() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        nearest = torch.cdist(h, m.codes.weight).argmin(1)
        q = m.codes(nearest)
        return m.head(h + (q - h).detach()) + 0.1 * (q - h.detach()).square().sum(1, keepdim=True)

    return Network(forward, up=nn.Linear(6, 4), codes=nn.Embedding(5, 4), head=nn.Linear(4, 3))


@register("mlp", vectors(d=6), classify)
def prototypes_soft_assignment() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.up(x)
        scores = -(h[:, None] - m.prototypes[None]).square().sum(-1)
        return scores.softmax(-1) @ m.values

    return Network(forward, up=nn.Linear(6, 4), prototypes=parameter(5, 4), values=parameter(5, 3))


@register("mlp", vectors(d=6), classify)
def complex_spectrum() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(m.up(x), dim=-1)
        filtered = spectrum * torch.view_as_complex(m.filter)
        return m.head(torch.fft.irfft(filtered, n=6, dim=-1))

    return Network(forward, up=nn.Linear(6, 6), filter=parameter(4, 2), head=nn.Linear(6, 3))


@register("mlp", vectors(d=4), classify)
def neural_ode_loop() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h, dt = x, 0.25
        for _ in range(4):
            k1 = m.field(h)
            k2 = m.field(h + 0.5 * dt * k1)
            h = h + dt * k2
        return m.head(h)

    return Network(forward, field=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), head=nn.Linear(4, 3))


@register("mlp", vectors(d=4), classify)
def deep_equilibrium_loop() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(5):
            z = torch.tanh(0.5 * m.inner(z) + m.outer(x))
        return m.head(z)

    return Network(forward, inner=nn.Linear(4, 4), outer=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("mlp", targets((2,), (2,)), square, inputs=lambda batch: batch)
def normalising_flow_coupling() -> nn.Module:
    def forward(m: Network, x: Tensor, _: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        s, t = m.net(a).chunk(2, 1)
        return torch.cat([a, b * s.exp() + t, s], 1)

    return Network(forward, net=nn.Linear(1, 2))


@register("mlp", vectors(d=4), classify)
def matrix_functions_per_example() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        a = m.up(x).view(-1, 2, 2)
        a = a @ a.transpose(1, 2) + 2 * torch.eye(2, dtype=a.dtype)
        solved = torch.linalg.solve(a, x.view(-1, 2, 2))
        return m.head(
            torch.cat(
                [solved.flatten(1), torch.logdet(a)[:, None], torch.linalg.cholesky(a).flatten(1)],
                1,
            )
        )

    return Network(forward, up=nn.Linear(4, 4), head=nn.Linear(9, 3))


# -- parametrizations ------------------------------------------------------------------------------


@register("parametrized", vectors(), classify)
def weight_norm_new() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


@register("parametrized", vectors(), classify)
def orthogonal_weights() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


@register("parametrized", vectors(), classify)
def spectral_norm_in_eval_mode() -> nn.Module:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)
    )
    return model.eval()


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@register("parametrized", vectors(), classify)
def symmetric_weights() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


@register("parametrized", vectors(), classify)
def masked_weights_by_subclass() -> nn.Module:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias)

    return nn.Sequential(Masked(4, 4), nn.ReLU(), nn.Linear(4, 3))


@register("parametrized", vectors(), classify)
def lora_by_hand() -> nn.Module:
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = (
                nn.Linear(base.in_features, 2, bias=False),
                nn.Linear(2, base.out_features, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 0.5 * self.b(self.a(x))

    return nn.Sequential(LoRA(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


@register("parametrized", vectors(), classify)
def lora_merged_weight() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(F.linear(x, m.base + m.b @ m.a))

    frozen = torch.randn(5, 4)
    return Network(
        forward, {"base": frozen}, a=parameter(2, 4), b=parameter(5, 2), head=nn.Linear(5, 3)
    )


@register("parametrized", vectors(), classify)
def dora_by_hand() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        w = m.base + m.b @ m.a
        return m.head(F.linear(x, m.magnitude[:, None] * w / w.norm(dim=1, keepdim=True)))

    base = torch.randn(5, 4)
    return Network(
        forward,
        {"base": base},
        a=parameter(2, 4),
        b=parameter(5, 2),
        magnitude=parameter(5),
        head=nn.Linear(5, 3),
    )


@register("parametrized", vectors(), classify)
def child_weight_read_by_parent() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(torch.tanh(F.linear(x, m.fc.weight, m.fc.bias)))

    return Network(forward, fc=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register("parametrized", vectors(), classify)
def child_called_and_its_weight_read() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.fc(x)) @ m.fc.weight)

    return Network(forward, fc=nn.Linear(4, 5), head=nn.Linear(4, 3))


@register("parametrized", vectors(), classify)
def weight_decay_in_the_loss_of_each_example() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.fc(x) + 0.1 * m.fc.weight.square().sum()

    return Network(forward, fc=nn.Linear(4, 3))
