"""Models divided with FSDP2, and what a session makes of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpkfc.config import PrivacyConfig
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.curvature.refined import Refined
from dpkfc.postprocess import DiSK, WeightEMA
from dpkfc.session import Session
from tests.distributed.cases import ids, public_words
from tests.test_session import N, data, kfac, loss_fn, net


class Scale(nn.Module):
    """A module without a rule, whose gradients are taken by running it again."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.gain * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """Attention with one head and a small MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = (
            Scale(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.gate = nn.Linear(width, 1)  # of which the second process holds nothing
        self.after, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width)),
        )

    def forward(self, x):
        x = x + self.out(F.scaled_dot_product_attention(*self.qkv(self.norm(x)).chunk(3, -1)))
        return x + self.gate(x) * self.mlp(self.after(x))


class Transformer(nn.Module):
    """Words and positions, two blocks, and a head that may be the table of words."""

    def __init__(self, *, tied=False, again=False):
        super().__init__()
        self.again = again
        self.words, self.positions = nn.Embedding(7, 5), nn.Embedding(8, 5)
        self.blocks, self.head = (
            nn.ModuleList(Block(5) for _ in range(2)),
            nn.Linear(5, 7, bias=False),
        )
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]).unsqueeze(0))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x.mean(1))


def transformer(*, tied=False, frozen=False, again=False):
    """With a head that is the table of words, with frozen parts, with activations that are computed
    again.
    """
    torch.manual_seed(0)
    model = Transformer(tied=tied, again=again).double()
    for part in (model.words, model.blocks[0]) if frozen else ():
        part.requires_grad_(False)
    return model


def shard(model, **options):
    """Each block on its own (of a plain network each linear layer), then what is left."""
    from torch.distributed.fsdp import fully_shard

    parts = (
        list(model.blocks)
        if isinstance(model, Transformer)
        else [m for m in model.children() if isinstance(m, nn.Linear)]
    )
    for part in [*parts, model]:
        fully_shard(part, **options)
    return model


def full(x):
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def weights(model):
    return torch.cat([full(p).flatten() for p in model.parameters()])


def adam(parameters):
    return torch.optim.Adam(parameters, 0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


@dataclass(frozen=True)
class Run:
    """One run, divided or not."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = net
    dataset: Callable[[], Any] = data
    optimizer: Callable[[Iterator[Tensor]], torch.optim.Optimizer] = momentum
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluated: bool = False

    def plan(self):
        settings = {"expected_batch_size": 6, "steps": 3, "test_mode_seed": 3, **self.settings}
        return PrivacyConfig(**settings).with_noise(1.0, 1e-3, N)

    def open(self, *, divided, ledger=None, check=True):
        model = shard(self.model(), **self.options) if divided else self.model()
        if self.evaluated:
            with torch.no_grad():
                model(self.dataset()[0][:3])
        optimizer = self.optimizer(model.parameters())
        return Session(
            self.plan(), model, optimizer, self.dataset(), ledger_path=ledger, verify=check
        )

    def train(self, *, divided):
        """Weights, and averaged ones where they are kept."""
        with self.open(divided=divided) as s:
            for batch in s.batches():
                s.step(batch, loss_fn)
                with torch.no_grad():
                    s.model(self.dataset()[0][:3])  # an evaluation between steps, on every process
            found = {"weights": weights(s.model)}
            if s.plan.config.weight_average is not None:
                with s.averaged_weights():
                    found["averaged"] = weights(s.model)
                found["back"] = weights(s.model)
        return found


RUNS = {
    "SGD with momentum": Run(),
    "gathered once a pass": Run(options={"reshard_after_forward": False}),
    "Adam": Run(optimizer=adam, options={"reshard_after_forward": True}, evaluated=True),
    "shares that are empty": Run({"expected_batch_size": 1, "steps": 6}),
    "micro-batches": Run({"max_physical_batch_size": 2}),
    "views": Run({"augmentations": 2, "max_physical_batch_size": 4}),
    "DP-KFC, average of the weights": Run(
        {"preconditioner": kfac(probe_size=12), "weight_average": WeightEMA(0.9)}
    ),
    "DiSK": Run({"postprocess": (DiSK(),), "preconditioner": kfac(probe_size=12)}, optimizer=sgd),
    "DP-KFC of inputs, most of them not differentiated": Run(
        {"preconditioner": kfac(sides="input", probe_size=70, chunk=9)}
    ),
    "DP-KFC, refined inputs": Run(
        {"preconditioner": kfac(probe=Refined(FeatureNoise(6), 2), probe_size=12, chunk=5)}
    ),
    "transformer, DP-KFC and DiSK": Run(
        {
            "preconditioner": kfac(probe=public_words(), probe_size=12),
            "postprocess": (DiSK(),),
            "max_physical_batch_size": 3,
        },
        transformer,
        ids,
        sgd,
        {"reshard_after_forward": True},
    ),
    "frozen parts, activations computed again": Run(
        {}, lambda: transformer(frozen=True, again=True), ids, adam
    ),
    "tied": Run({"weight_average": WeightEMA()}, lambda: transformer(tied=True), ids),
}
