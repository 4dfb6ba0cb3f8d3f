"""Small models, data and a training loop as an Opacus script has them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.integrations.opacus import BatchMemoryManager, PrivacyEngine
from tests.models import mlp

N, B = 40, 8
# of Rényi divergences; Opacus tries 150
FEW_ORDERS = [
    1.4,
    1.6,
    1.8,
    2.0,
    2.2,
    2.5,
    3.0,
    3.5,
    4.0,
    5.0,
    6.0,
]


def data(n=N, dtype=torch.float64, shape=(6,)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, *shape, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def loader(n=N, **settings):
    return DataLoader(data(n), **{"batch_size": B, "shuffle": True, **settings})


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 5, 2, stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    ).double()


class Scaled(nn.Module):
    """Owns a parameter directly, so that autograd computes a raw gradient for it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.gain)


def make_scaled():
    torch.manual_seed(0)
    return Scaled().double()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def private(model=None, engine=None, **settings):
    """(engine, model, optimizer, loader) with a repeatable Poisson order and, by default, no
    noise.
    """
    engine = engine or PrivacyEngine()
    model = model or mlp()
    chosen = {
        "data_loader": loader(),
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "test_mode_seed": 3,
        **settings,
    }
    return (
        engine,
        *engine.make_private(
            module=model, optimizer=chosen.pop("optimizer", None) or sgd(model), **chosen
        ),
    )


def train(model, optimizer, batches, steps=None, criterion=None):
    """The loop of every script; the number of optimizer steps."""
    criterion = criterion or nn.CrossEntropyLoss()
    done = 0
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == steps:
            break
    return done


def backward(model, batch):
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def make_private(engine=None, model=None, **settings):
    """(engine, model, optimizer, loader) for two passes."""
    engine, model = engine or PrivacyEngine(accountant="rdp"), model or mlp()
    chosen = {
        "data_loader": loader(),
        "target_epsilon": 5.0,
        "target_delta": 1e-3,
        "epochs": 2,
        "max_grad_norm": 1.0,
    }
    return (
        engine,
        *engine.make_private_with_epsilon(
            module=model, optimizer=sgd(model), **(chosen | settings)
        ),
    )


def clipped_sum(model, batch, bound):
    """Return the sum of the clipped gradients of single examples, by plain autograd."""
    rows = []
    for x, y in zip(*batch, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in found]))
    return sum(row * (bound / row.norm()).clamp(max=1) for row in rows)


def cut(batches, optimizer, size):
    return BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=size, optimizer=optimizer
    )
