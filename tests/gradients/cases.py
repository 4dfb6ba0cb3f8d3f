"""Small models for every layer rule, each with a batch and a per-example loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.data.loading import Part, layout
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_sum import clipped_sum
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.metric import Metric


class Reuse(nn.Module):
    """One linear layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class UnreadTable(nn.Module):
    """A table that is called on no position, as for texts without a suffix."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.suffixes = nn.Embedding(6, 4), nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1) + self.suffixes(ids[:, 9:]).sum(1))


class TwinLinear(nn.Module):
    """Two linear modules that share weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Scaled(nn.Module):
    """A raw parameter used by its owner only: covered by the fallback."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gain) + self.shift


class ClassToken(nn.Module):
    """A root module that owns a token and position embedding, like a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 4, 4))
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        x = x + torch.tanh(self.mix(x)) * x.mean(1, keepdim=True)
        return self.head(x[:, 0])


class Residual(nn.Module):
    """In-place activations after covered layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x), inplace=True)
        y = F.relu(self.norm(y), inplace=True)
        return self.head(y.mean((2, 3)))


class Attention(nn.Module):
    """torch's own multi-head attention: parameters of a child used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]


def _mean(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules, nn.Flatten(), nn.LazyLinear(3))


def _make_channels_last(c_in: int, c_out: int, kernel: int, **settings: int) -> nn.Module:
    return nn.Conv2d(c_in, c_out, kernel, **settings).to(memory_format=torch.channels_last)


def _x(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def _ids(t: int, v: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, v, (n, t))


CASES = [
    Case("linear", lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), _x(5)),
    Case("linear on sequences", lambda: _mean(nn.Linear(5, 7), nn.Tanh()), _x(4, 5)),
    Case("linear with in-place ReLU", lambda: _mean(nn.Linear(5, 7), nn.ReLU(True)), _x(4, 5)),
    Case("linear on long sequences", lambda: _mean(nn.Linear(2, 3), nn.Tanh()), _x(40, 2)),
    Case("conv1d", lambda: _mean(nn.Conv1d(3, 5, 3, stride=2, padding=1), nn.Tanh()), _x(3, 11)),
    Case(
        "conv2d",
        lambda: _mean(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3)),
        _x(2, 6, 7),
    ),
    Case("conv2d wide", lambda: _mean(nn.Conv2d(6, 8, 3, padding=1), nn.Tanh()), _x(6, 3, 4)),
    Case("conv2d large", lambda: _mean(nn.Conv2d(6, 4, 3, padding=1), nn.Tanh()), _x(6, 9, 8)),
    Case(
        "conv2d grouped",
        lambda: _mean(nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False), nn.Tanh()),
        _x(4, 7, 8),
    ),
    Case(
        "conv2d grouped with bias",
        lambda: _mean(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh()),
        _x(4, 5, 6),
    ),
    Case(
        "conv2d same",
        lambda: _mean(nn.Conv2d(2, 4, (4, 3), padding="same"), nn.Tanh()),
        _x(2, 6, 7),
    ),
    Case(
        "conv2d reflect",
        lambda: _mean(nn.Conv2d(2, 4, 3, padding=2, padding_mode="reflect"), nn.Tanh()),
        _x(2, 6, 7),
    ),
    Case(
        "conv2d channels last",
        lambda: _mean(
            _make_channels_last(2, 4, 3, padding=1), nn.Tanh(), _make_channels_last(4, 5, 3)
        ),
        _x(2, 6, 7),
    ),
    Case("conv3d", lambda: _mean(nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), nn.Tanh()), _x(2, 3, 5, 4)),
    Case("embedding", lambda: _mean(nn.Embedding(6, 4, padding_idx=0), nn.Tanh()), _ids(9, 6)),
    Case("embedding of no position", UnreadTable, _ids(9, 6)),
    Case("layer norm", lambda: _mean(nn.Linear(5, 6), nn.LayerNorm(6)), _x(3, 5)),
    Case("rms norm", lambda: _mean(nn.Linear(5, 6), nn.RMSNorm(6)), _x(3, 5)),
    Case("group norm", lambda: _mean(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), _x(2, 5, 6)),
    Case(
        "instance norm",
        lambda: _mean(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
        _x(2, 5, 6),
    ),
    Case(
        "frozen batch norm",
        lambda: _mean(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4).eval()),
        _x(2, 5, 6),
    ),
    Case("fallback", lambda: nn.Sequential(nn.Linear(5, 6), Scaled(6), nn.Linear(6, 3)), _x(5)),
    Case("class token", ClassToken, _x(3, 4)),
    Case("attention", Attention, _x(3, 4)),
    Case(
        "transposed convolution", lambda: _mean(nn.ConvTranspose2d(2, 3, 2), nn.Tanh()), _x(2, 3, 4)
    ),
    Case("layer used twice", Reuse, _x(6)),
    Case("layers that share parameters", TwinLinear, _x(6)),
    Case("in-place activations", Residual, _x(2, 5, 6)),
]


def build(
    case: Case, n: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model in `dtype` and a batch (inputs, labels) of n examples."""
    torch.default_generator.manual_seed(seed)
    model, x = case.model(), case.batch(n)
    model(x[:1]) if x.is_floating_point() else model(x[:1])
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    return model, (x, torch.randint(0, 3, (n,)))


def reader(batch: tuple[Tensor, ...]) -> Callable[[int], tuple[Tensor, ...]]:
    """The function from the number of a record to a batch of that record alone."""
    return lambda i: tuple(x[i : i + 1] for x in batch)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each example, twice weighted so that losses differ."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none") * 2


def sum_examples(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    bound: float,
    loss: Callable[..., Tensor] = loss_fn,
    *,
    parts: Sequence[Part] | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the clipped sum of a batch and the norms, in one micro-batch or in several parts."""
    parts = layout(range(len(batch[0]))) if parts is None else parts
    return clipped_sum(
        model,
        find_layers(model),
        metric or {},
        Clip(bound),
        loss_fn=loss,
        micro_batches=[(tuple(x[part.records] for x in batch), part) for part in parts],
        one_record=reader(batch),
        **settings,
    )
