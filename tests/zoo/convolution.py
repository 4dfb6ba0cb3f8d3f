"""Convolutional networks: kinds of convolutions, pooling, normalisation, and images folded into the
leading axis.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.registry import (
    Network,
    add_architecture,
    classify,
    parameter,
    register,
    tensors,
)

IMAGE = tensors((2, 6, 6))


def _pooled(layer, channels, *more):
    return nn.Sequential(
        layer, nn.ReLU(), *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)
    )


_LAYERS = {
    "strided": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), 4),
    "circular_padding": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), 4),
    "rectangular": (lambda: nn.Conv2d(2, 4, (1, 3), stride=(2, 1)), 4),
    "transposed_grouped": (lambda: nn.ConvTranspose2d(2, 4, 2, groups=2), 4),
}

for _name, (_build, _channels) in _LAYERS.items():
    add_architecture(
        f"conv2d_{_name}", "cnn", lambda b=_build, c=_channels: _pooled(b(), c), IMAGE, classify
    )


register_cnn = register("cnn", IMAGE, classify)


@register_cnn
def conv2d_functional():
    def forward(m, x):
        h = F.conv2d(x, m.kernel, m.bias, padding=1)
        return m.head(h.relu().mean((2, 3)))

    return Network(forward, kernel=parameter(4, 2, 3, 3), bias=parameter(4), head=nn.Linear(4, 3))


_NORMS = {
    "layer_norm": lambda: nn.LayerNorm([4, 4, 4]),
    "local_response_norm": lambda: nn.LocalResponseNorm(2),
}

for _name, _norm in _NORMS.items():
    add_architecture(
        f"cnn_{_name}", "cnn", lambda b=_norm: _pooled(nn.Conv2d(2, 4, 3), 4, b()), IMAGE, classify
    )


@register_cnn
def group_norm_by_batch_norm_trick():
    """Instance normalisation as torch computes it: examples folded into the channels of a batch
    norm.
    """

    def forward(m, x):
        h = m.conv(x)
        folded = h.reshape(1, -1, *h.shape[2:])
        h = F.batch_norm(folded, None, None, training=True).view_as(h)
        return m.head(h.relu().mean((2, 3)) * m.gain)

    return Network(forward, conv=nn.Conv2d(2, 4, 3), gain=parameter(4), head=nn.Linear(4, 3))


@register_cnn
def dynamic_convolution_by_groups():
    """Kernels of each example, applied by one grouped convolution with the batch folded into the
    channels.
    """

    def forward(m, x):
        n = x.shape[0]
        kernels = m.kernels(x.mean((2, 3))).view(n * 3, 2, 2, 2)
        h = F.conv2d(x.reshape(1, n * 2, 6, 6), kernels, groups=n).view(n, 3, 5, 5)
        return m.head(h.relu().mean((2, 3)))

    return Network(forward, kernels=nn.Linear(2, 24), head=nn.Linear(3, 3))


@register_cnn
def layers_run_on_a_learnt_image():
    """A generator branch whose input is public meets the examples by a product."""

    def forward(m, x):
        style = m.up(m.seed).relu()
        return m.head((m.conv(x) * style).mean((2, 3)))

    return Network(
        forward,
        seed=parameter(1, 2, 2, 2),
        up=nn.ConvTranspose2d(2, 4, 2, stride=2),
        conv=nn.Conv2d(2, 4, 3),
        head=nn.Linear(4, 3),
    )


# -- images folded into the leading axis -----------------------------------------------------------


register_folded = register("folded", tensors((3, 2, 5, 5)), classify)


@register_folded
def frames_folded_frame_first():
    def forward(m, x):
        n, frames = x.shape[:2]
        h = m.conv(x.transpose(0, 1).reshape(-1, 2, 5, 5)).relu().mean((2, 3))
        return m.head(h.view(frames, n, -1).amax(0))

    return Network(forward, conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3))


@register("folded", tensors((6,)), classify)
def inputs_expanded_for_candidates():
    def forward(m, x):
        n = x.shape[0]
        a = x[:, None].expand(n, 3, 6)
        b = m.candidates[None].expand(n, -1, -1)
        return m.score(torch.tanh(m.mix(torch.cat([a, b], -1)))).squeeze(-1)

    return Network(forward, candidates=parameter(3, 2), mix=nn.Linear(8, 5), score=nn.Linear(5, 1))


@register("folded", tensors((3, 3)), classify)
def fold_factor_equals_the_batch():
    """Three positions of three features: at some batch sizes every axis has one length."""

    def forward(m, x):
        n = x.shape[0]
        h = torch.tanh(m.up(x.transpose(0, 1).reshape(-1, 3)))
        return m.head(h.view(3, n, 3).transpose(0, 1).transpose(1, 2)).sum(1)

    return Network(forward, up=nn.Linear(3, 3), head=nn.Linear(3, 3))
