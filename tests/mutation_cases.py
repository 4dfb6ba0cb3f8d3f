"""What the tests of planted bugs share: a tiny task, and an optimizer that keeps what it is
handed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dpkfc.config import Plan, PrivacyConfig
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.session import Session
from tests.models import mlp

N, B, WIDTH = 40, 8, 6


def data(
    n: int = N, *, width: int = WIDTH, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (n,), generator=generator)


def net(*last: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(*mlp(dtype=dtype), *last)


def plan(noise: float = 1.0, **settings: object) -> Plan:
    values = {"expected_batch_size": B, "steps": 6, "test_mode_seed": 5, **settings}
    return PrivacyConfig(**values).with_noise(noise, 1e-3, N)


def kfac(width: int = WIDTH, **settings: object) -> KFAC:
    return KFAC(
        **{"sides": "both", "probe": FeatureNoise(width), "probe_size": 32, "every": 2, **settings}
    )


class Handed(torch.optim.SGD):
    """SGD that keeps a copy of every gradient at the moment it is applied."""

    def __init__(self, model: nn.Module, lr: float = 0.1, **options: object) -> None:
        super().__init__(model.parameters(), lr, **options)
        self.names = {p: name for name, p in model.named_parameters()}
        self.handed: list[dict[str, Tensor]] = []

    def step(self, closure: object = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.handed.append({self.names[p]: p.grad.clone() for p in held})
        super().step()


def session(
    p: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: object
) -> Session:
    options = {"dataset": data(), **options}
    return Session(p, model, optimizer or Handed(model), **options)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def weights(model: nn.Module) -> Tensor:
    return flat(model.parameters()).clone()
