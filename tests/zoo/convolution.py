"""Convolutional networks: kinds of convolutions, pooling, normalisation, and images folded into the
leading axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.registry import (
    Network,
    add_architecture,
    classify,
    parameter,
    register,
    regress,
    targets,
    tensors,
)

IMAGE = tensors((2, 6, 6))
SERIES = tensors((3, 8))
VOLUME = tensors((1, 4, 4, 4))


def _pooled(layer: nn.Module, channels: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(
        layer, nn.ReLU(), *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)
    )


_LAYERS = {
    "plain": (lambda: nn.Conv2d(2, 4, 3), 4),
    "strided": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), 4),
    "dilated": (lambda: nn.Conv2d(2, 4, 2, dilation=2), 4),
    "grouped": (lambda: nn.Conv2d(2, 4, 3, groups=2), 4),
    "depthwise": (lambda: nn.Conv2d(2, 6, 3, groups=2, bias=False), 6),
    "pointwise": (lambda: nn.Conv2d(2, 4, 1), 4),
    "same_padding": (lambda: nn.Conv2d(2, 4, 3, padding="same"), 4),
    "circular_padding": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), 4),
    "reflect_padding": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), 4),
    "rectangular": (lambda: nn.Conv2d(2, 4, (1, 3), stride=(2, 1)), 4),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), 4),
    "transposed_grouped": (lambda: nn.ConvTranspose2d(2, 4, 2, groups=2), 4),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), 4),
}

for _name, (_build, _channels) in _LAYERS.items():
    add_architecture(
        f"conv2d_{_name}", "cnn", lambda b=_build, c=_channels: _pooled(b(), c), IMAGE, classify
    )


@register("cnn", SERIES, classify)
def conv1d_stack() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(2),
        nn.Conv1d(4, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


@register("cnn", SERIES, classify)
def conv1d_transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose1d(3, 2, 3, stride=2), nn.ELU(), nn.Flatten(), nn.Linear(34, 3)
    )


@register("cnn", SERIES, classify)
def causal_convolutions() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        for layer, d in zip(m.layers, (1, 2), strict=True):
            x = x + torch.tanh(layer(F.pad(x, (d, 0))))
        return m.head(x[..., -1])

    layers = nn.ModuleList(nn.Conv1d(3, 3, 2, dilation=d) for d in (1, 2))
    return Network(forward, layers=layers, head=nn.Linear(3, 3))


@register("cnn", VOLUME, classify)
def conv3d_stack() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 3, 2), nn.ReLU(), nn.AvgPool3d(3), nn.Flatten(), nn.Linear(3, 3)
    )


@register("cnn", VOLUME, classify)
def conv3d_transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose3d(1, 2, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(2, 3),
    )


@register("cnn", IMAGE, classify)
def conv2d_functional() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = F.conv2d(x, m.kernel, m.bias, padding=1)
        return m.head(h.relu().mean((2, 3)))

    return Network(forward, kernel=parameter(4, 2, 3, 3), bias=parameter(4), head=nn.Linear(4, 3))


class _Standardised(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        flat = w.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-3)
        return flat.view_as(w)


@register("cnn", IMAGE, classify)
def weight_standardisation_parametrized() -> nn.Module:
    layer = nn.Conv2d(2, 4, 3)
    parametrize.register_parametrization(layer, "weight", _Standardised())
    return _pooled(layer, 4, nn.GroupNorm(2, 4))


@register("cnn", IMAGE, classify)
def weight_standardisation_by_subclass() -> nn.Module:
    class StandardisedConv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-3)
            return F.conv2d(x, w, self.bias)

    return _pooled(StandardisedConv(2, 4, 3), 4, nn.GroupNorm(2, 4))


_NORMS = {
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer_norm": lambda: nn.LayerNorm([4, 4, 4]),
    "local_response_norm": lambda: nn.LocalResponseNorm(2),
    "batch_norm_eval": lambda: nn.BatchNorm2d(4).eval(),
}

for _name, _norm in _NORMS.items():
    add_architecture(
        f"cnn_{_name}", "cnn", lambda b=_norm: _pooled(nn.Conv2d(2, 4, 3), 4, b()), IMAGE, classify
    )


@register("cnn", IMAGE, classify)
def group_norm_by_hand() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, h = x.shape[0], m.conv(x)
        g = h.reshape(n, 2, -1)
        g = (g - g.mean(-1, keepdim=True)) / torch.sqrt(
            g.var(-1, keepdim=True, unbiased=False) + 1e-5
        )
        h = g.reshape_as(h) * m.gain[None, :, None, None]
        return m.head(h.relu().amax((2, 3)))

    return Network(forward, conv=nn.Conv2d(2, 4, 3), gain=parameter(4), head=nn.Linear(4, 3))


@register("cnn", IMAGE, classify)
def group_norm_by_batch_norm_trick() -> nn.Module:
    """Instance normalisation as torch computes it: examples folded into the channels of a batch
    norm.
    """

    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.conv(x)
        folded = h.reshape(1, -1, *h.shape[2:])
        h = F.batch_norm(folded, None, None, training=True).view_as(h)
        return m.head(h.relu().mean((2, 3)) * m.gain)

    return Network(forward, conv=nn.Conv2d(2, 4, 3), gain=parameter(4), head=nn.Linear(4, 3))


@register("cnn", IMAGE, classify)
def spatial_layer_norm_as_in_convnext() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.stem(x)
        r = m.depthwise(h).permute(0, 2, 3, 1)
        r = m.down(F.gelu(m.up(m.norm(r)))) * m.scale
        h = h + r.permute(0, 3, 1, 2)
        return m.head(h.mean([-2, -1]))

    return Network(
        forward,
        stem=nn.Conv2d(2, 4, 2, stride=2),
        depthwise=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        norm=nn.LayerNorm(4),
        up=nn.Linear(4, 8),
        down=nn.Linear(8, 4),
        scale=parameter(4),
        head=nn.Linear(4, 3),
    )


@register("cnn", IMAGE, classify)
def squeeze_and_excite() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.conv(x).relu()
        gate = torch.sigmoid(m.excite(F.relu(m.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        return m.head((h * gate).flatten(2).sum(-1))

    return Network(
        forward,
        conv=nn.Conv2d(2, 4, 3),
        squeeze=nn.Conv2d(4, 2, 1),
        excite=nn.Conv2d(2, 4, 1),
        head=nn.Linear(4, 3),
    )


@register("cnn", IMAGE, classify)
def wide_residual_block() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = F.relu(m.norm1(m.stem(x)))
        out = m.conv2(F.relu(m.norm2(m.conv1(h))))
        out += m.shortcut(h)
        return m.head(F.avg_pool2d(out, 3).view(-1, 4))

    return Network(
        forward,
        stem=nn.Conv2d(2, 3, 3, padding=1),
        norm1=nn.GroupNorm(1, 3),
        conv1=nn.Conv2d(3, 4, 3, stride=2, padding=1),
        norm2=nn.GroupNorm(2, 4),
        conv2=nn.Conv2d(4, 4, 3, padding=1),
        shortcut=nn.Conv2d(3, 4, 1, stride=2),
        head=nn.Linear(4, 3),
    )


@register("cnn", IMAGE, classify)
def dense_connections() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return m.head(x.mean((2, 3)))

    layers = nn.ModuleList(nn.Conv2d(2 + 2 * i, 2, 3, padding=1) for i in range(3))
    return Network(forward, layers=layers, head=nn.Linear(8, 3))


@register("cnn", IMAGE, classify)
def channel_shuffle_and_inverted_residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 1),
        nn.ReLU6(),
        nn.ChannelShuffle(2),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.ReLU6(),
        nn.Conv2d(8, 4, 1),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@register("cnn", IMAGE, classify)
def inception_branches() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = torch.cat([m.one(x), m.three(x), m.pooled(F.max_pool2d(x, 3, 1, 1))], dim=1)
        return m.head(F.relu(h).flatten(1))

    return Network(
        forward,
        one=nn.Conv2d(2, 2, 1),
        three=nn.Conv2d(2, 2, 3, padding=1),
        pooled=nn.Conv2d(2, 1, 1),
        head=nn.Linear(180, 3),
    )


@register("cnn", targets((1, 8, 8), (1, 8, 8)), regress)
def u_net() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        a = F.relu(m.a(x))
        b = F.relu(m.b(F.max_pool2d(a, 2)))
        up = m.up(b)
        return m.out(torch.cat([a, up], 1))

    return Network(
        forward,
        a=nn.Conv2d(1, 2, 3, padding=1),
        b=nn.Conv2d(2, 3, 3, padding=1),
        up=nn.ConvTranspose2d(3, 2, 2, stride=2),
        out=nn.Conv2d(4, 1, 1),
    )


@register("cnn", targets((1, 6, 6), (1, 6, 6)), regress)
def bilinear_upsampling() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = F.relu(m.down(x))
        h = F.interpolate(h, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return m.out(h) + F.interpolate(m.side(h)[..., ::2, ::2], scale_factor=2, mode="nearest")

    return Network(
        forward,
        down=nn.Conv2d(1, 3, 2, stride=2),
        out=nn.Conv2d(3, 1, 3, padding=1),
        side=nn.Conv2d(3, 1, 1),
    )


@register("cnn", targets((1, 4, 4), (1, 8, 8)), regress)
def pixel_shuffle_super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.PixelShuffle(2)
    )


@register("cnn", IMAGE, classify)
def pixel_unshuffle_stem() -> nn.Module:
    return nn.Sequential(
        nn.PixelUnshuffle(2), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)
    )


@register("cnn", targets((1, 6, 6), (1, 6, 6)), regress)
def unfold_and_fold() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1)
        patches = torch.tanh(m.mix(patches.transpose(1, 2))).transpose(1, 2)
        return F.fold(patches, (6, 6), 3, padding=1)

    return Network(forward, mix=nn.Linear(9, 9))


@register("cnn", IMAGE, classify)
def tensor_unfold_patches() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        patches = x.unfold(2, 3, 3).unfold(3, 3, 3)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(x.shape[0], 4, -1)
        return m.head(F.relu(m.embed(patches)).mean(1))

    return Network(forward, embed=nn.Linear(18, 5), head=nn.Linear(5, 3))


@register("cnn", targets((1, 6, 6), (1, 6, 6)), regress)
def max_pooling_with_indices_and_unpooling() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h, places = F.max_pool2d(m.a(x), 2, return_indices=True)
        return m.b(F.max_unpool2d(torch.tanh(h), places, 2))

    return Network(forward, a=nn.Conv2d(1, 2, 3, padding=1), b=nn.Conv2d(2, 1, 3, padding=1))


@register("cnn", IMAGE, classify)
def adaptive_pooling_pyramid() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = F.relu(m.conv(x))
        levels = [
            F.adaptive_avg_pool2d(h, 2).flatten(1),
            F.adaptive_max_pool2d(h, (1, 3)).flatten(1),
        ]
        levels.append(F.lp_pool2d(h.abs() + 0.1, 2, 4).flatten(1))
        return m.head(torch.cat(levels, 1))

    return Network(forward, conv=nn.Conv2d(2, 3, 3), head=nn.Linear(24, 3))


@register("cnn", IMAGE, classify)
def anti_aliased_by_frozen_kernel() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = F.relu(m.conv(x))
        h = F.conv2d(h, m.blur.expand(4, 1, 2, 2), stride=2, groups=4)
        return m.head(h.flatten(1))

    return Network(
        forward,
        {"blur": torch.full((1, 1, 2, 2), 0.25)},
        conv=nn.Conv2d(2, 4, 3),
        head=nn.Linear(16, 3),
    )


@register("cnn", IMAGE, classify)
def spatial_transformer() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        theta = m.locate(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return m.head(F.relu(m.conv(F.grid_sample(x, grid, align_corners=False))).mean((2, 3)))

    return Network(forward, locate=nn.Linear(72, 6), conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3))


@register("cnn", IMAGE, classify)
def dynamic_convolution_by_groups() -> nn.Module:
    """Kernels of each example, applied by one grouped convolution with the batch folded into the
    channels.
    """

    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        kernels = m.kernels(x.mean((2, 3))).view(n * 3, 2, 2, 2)
        h = F.conv2d(x.reshape(1, n * 2, 6, 6), kernels, groups=n).view(n, 3, 5, 5)
        return m.head(h.relu().mean((2, 3)))

    return Network(forward, kernels=nn.Linear(2, 24), head=nn.Linear(3, 3))


@register("cnn", IMAGE, classify)
def conditional_kernels_mixed_by_routing() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        routing = torch.sigmoid(m.route(x.mean((2, 3))))
        parts = torch.stack([conv(x) for conv in m.experts], 1)
        return m.head((parts * routing[:, :, None, None, None]).sum(1).relu().mean((2, 3)))

    return Network(
        forward,
        route=nn.Linear(2, 2),
        experts=nn.ModuleList(nn.Conv2d(2, 3, 3) for _ in range(2)),
        head=nn.Linear(3, 3),
    )


@register("cnn", IMAGE, classify)
def coordinate_channels() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        ys = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
        xs = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(n, 1, h, w)
        return m.head(F.relu(m.conv(torch.cat([x, ys, xs], 1))).mean((2, 3)))

    return Network(forward, conv=nn.Conv2d(4, 4, 3), head=nn.Linear(4, 3))


@register("cnn", IMAGE, classify)
def learnt_position_image() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.conv(x) + m.positions + m.refine(m.positions)
        return m.head(h.relu().mean((2, 3)))

    return Network(
        forward,
        conv=nn.Conv2d(2, 4, 3),
        positions=parameter(1, 4, 4, 4),
        refine=nn.Conv2d(4, 4, 1),
        head=nn.Linear(4, 3),
    )


@register("cnn", IMAGE, classify)
def layers_run_on_a_learnt_image() -> nn.Module:
    """A generator branch whose input is public meets the examples by a product."""

    def forward(m: Network, x: Tensor) -> Tensor:
        style = m.up(m.seed).relu()
        return m.head((m.conv(x) * style).mean((2, 3)))

    return Network(
        forward,
        seed=parameter(1, 2, 2, 2),
        up=nn.ConvTranspose2d(2, 4, 2, stride=2),
        conv=nn.Conv2d(2, 4, 3),
        head=nn.Linear(4, 3),
    )


@register("cnn", IMAGE, classify)
def wavelet_by_slices() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        a, b = x[..., ::2, :], x[..., 1::2, :]
        h = torch.cat([a + b, a - b], 1)
        return m.head(F.relu(m.conv(h)).flatten(1))

    return Network(forward, conv=nn.Conv2d(4, 3, 3), head=nn.Linear(12, 3))


@register("cnn", IMAGE, classify)
def fourier_neural_operator() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(m.lift(x))
        weight = torch.view_as_complex(m.weight)
        low = torch.einsum("nixy,ioxy->noxy", spectrum[..., :2, :2], weight)
        out = torch.zeros(x.shape[0], 3, 6, 4, dtype=low.dtype)
        out[..., :2, :2] = low
        return m.head(F.gelu(torch.fft.irfft2(out, s=(6, 6))).mean((2, 3)))

    return Network(
        forward, lift=nn.Conv2d(2, 3, 1), weight=parameter(3, 3, 2, 2, 2), head=nn.Linear(3, 3)
    )


@register("cnn", IMAGE, classify, is_random=True)
def spatial_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


@register("cnn", IMAGE, classify)
def channels_last_network() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = m.conv(x.contiguous(memory_format=torch.channels_last)).relu()
        return m.head(h.permute(0, 2, 3, 1).reshape(x.shape[0], -1))

    return Network(forward, conv=nn.Conv2d(2, 3, 3), head=nn.Linear(48, 3))


# -- images folded into the leading axis -----------------------------------------------------------


@register("folded", tensors((3, 2, 5, 5)), classify)
def frames_folded_into_the_batch() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, frames = x.shape[:2]
        h = m.conv(x.flatten(0, 1)).relu().mean((2, 3))
        return m.head(h.view(n, frames, -1).mean(1))

    return Network(forward, conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3))


@register("folded", tensors((3, 2, 5, 5)), classify)
def frames_folded_frame_first() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, frames = x.shape[:2]
        h = m.conv(x.transpose(0, 1).reshape(-1, 2, 5, 5)).relu().mean((2, 3))
        return m.head(h.view(frames, n, -1).amax(0))

    return Network(forward, conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3))


@register("folded", tensors((3, 2, 5, 5)), classify)
def frames_with_temporal_shift() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        h = m.conv(x.reshape(n * t, 2, 5, 5))
        h = h.view(n, t, 4, 3, 3)
        shifted = torch.zeros_like(h)
        shifted[:, :-1, :2] = h[:, 1:, :2]
        shifted[:, 1:, 2:] = h[:, :-1, 2:]
        out = m.mix(shifted.view(n * t, 4, 3, 3)).relu().mean((2, 3))
        return m.head(out).view(n, t, -1).mean(1)

    return Network(forward, conv=nn.Conv2d(2, 4, 3), mix=nn.Conv2d(4, 4, 3), head=nn.Linear(4, 3))


@register("folded", tensors((2, 4, 4)), classify)
def channels_folded_into_the_batch() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = m.conv(x.reshape(n * c, 1, h, w)).relu()
        return m.head(y.view(n, -1))

    return Network(forward, conv=nn.Conv2d(1, 2, 3), head=nn.Linear(16, 3))


@register("folded", tensors((1, 6, 6)), classify)
def patches_folded_into_the_batch() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        patches = x.view(n, 1, 2, 3, 2, 3).permute(0, 2, 4, 1, 3, 5).reshape(-1, 1, 3, 3)
        h = m.conv(patches).relu().flatten(1)
        return m.head(h).reshape(n, 4, 3).sum(1)

    return Network(forward, conv=nn.Conv2d(1, 2, 2), head=nn.Linear(8, 3))


@register("folded", tensors((2, 6)), classify)
def rows_of_a_siamese_pair_as_batch() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = torch.tanh(m.tower(x.view(-1, 6))).view(-1, 2, 4)
        return m.head((h[:, 0] - h[:, 1]).abs())

    return Network(forward, tower=nn.Linear(6, 4), head=nn.Linear(4, 3))


@register("folded", tensors((6,)), classify)
def inputs_repeated_for_candidates() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        candidates = m.candidates.repeat(n, 1)
        pairs = torch.cat([x.repeat_interleave(3, dim=0), candidates], 1)
        return m.score(torch.tanh(m.mix(pairs))).view(n, 3)

    return Network(forward, candidates=parameter(3, 2), mix=nn.Linear(8, 5), score=nn.Linear(5, 1))


@register("folded", tensors((6,)), classify)
def inputs_expanded_for_candidates() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        a = x[:, None].expand(n, 3, 6)
        b = m.candidates[None].expand(n, -1, -1)
        return m.score(torch.tanh(m.mix(torch.cat([a, b], -1)))).squeeze(-1)

    return Network(forward, candidates=parameter(3, 2), mix=nn.Linear(8, 5), score=nn.Linear(5, 1))


@register("folded", tensors((4, 4, 2)), classify)
def rows_then_columns_as_batch() -> nn.Module:
    """Axial mixing: lines and then columns of a grid are folded into the leading axis."""

    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        lines, _ = m.lines(x.reshape(n * 4, 4, 2))
        h = lines.view(n, 4, 4, 3).transpose(1, 2).reshape(n * 4, 4, 3)
        columns, _ = m.columns(h)
        return m.head(columns[:, -1].view(n, 4, 3).mean(1))

    return Network(
        forward,
        lines=nn.GRU(2, 3, batch_first=True),
        columns=nn.GRU(3, 3, batch_first=True),
        head=nn.Linear(3, 3),
    )


@register("folded", tensors((4, 3)), classify)
def positions_folded_with_the_batch() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n, t, d = x.shape
        h = F.gelu(m.up(x.reshape(-1, d)))
        h = m.norm(m.down(h) + x.reshape(-1, d))
        return m.head(h.view(n, t, d).mean(1))

    return Network(
        forward,
        up=nn.Linear(3, 6),
        down=nn.Linear(6, 3),
        norm=nn.LayerNorm(3),
        head=nn.Linear(3, 3),
    )


@register("folded", tensors((3, 3)), classify)
def fold_factor_equals_the_batch() -> nn.Module:
    """Three positions of three features: at some batch sizes every axis has one length."""

    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        h = torch.tanh(m.up(x.transpose(0, 1).reshape(-1, 3)))
        return m.head(h.view(3, n, 3).transpose(0, 1).transpose(1, 2)).sum(1)

    return Network(forward, up=nn.Linear(3, 3), head=nn.Linear(3, 3))
