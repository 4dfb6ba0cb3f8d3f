"""A convolutional network on CIFAR-10, as in Opacus's second example; two imports have changed.

python examples/opacus/cifar10.py --epochs 2    (random images)
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from small_data import images
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

# was: from opacus import PrivacyEngine
#      from opacus.utils.batch_memory_manager import BatchMemoryManager
#      from opacus.validators import ModuleValidator
from dpkfc.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine


def convnet(num_classes: int) -> nn.Module:
    """Return a network with BatchNorm, which `ModuleValidator.fix` replaces by GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


def train(args: argparse.Namespace, parts: Any, engine: PrivacyEngine | None) -> None:
    """Train for one epoch, with physical batches that fit into memory."""
    model, optimizer, loader = parts
    model.train()
    criterion = nn.CrossEntropyLoss()

    def run(batches: DataLoader) -> None:
        for x, target in batches:
            optimizer.zero_grad()
            loss = criterion(model(x), target)
            loss.backward()
            optimizer.step()

    if engine is None:
        run(loader)
        return
    with BatchMemoryManager(
        data_loader=loader,
        max_physical_batch_size=args.max_physical_batch_size,
        optimizer=optimizer,
    ) as batches:
        run(batches)
    print(f"(ε = {engine.get_epsilon(args.delta):.2f}, δ = {args.delta})")


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy on public test images."""
    model.eval()
    hits: list[Tensor] = [model(x).argmax(1) == target for x, target in loader]
    return float(torch.cat(hits).double().mean())


def main() -> None:
    """Parse the flags, train, test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-physical-batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--sigma", type=float, default=1.5)
    parser.add_argument("--max-per-sample-grad-norm", type=float, default=10.0)
    parser.add_argument("--clip-per-layer", action="store_true")
    parser.add_argument("--grad-sample-mode", default="hooks")
    parser.add_argument("--lr-schedule", choices=("constant", "cos"), default="cos")
    parser.add_argument("--optim", choices=("SGD", "Adam", "RMSprop"), default="SGD")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--disable-dp", action="store_true")
    args = parser.parse_args()
    loader = DataLoader(images("", True, (3, 16, 16)), args.batch_size, shuffle=True)
    test_loader = DataLoader(images("", False, (3, 16, 16)), 256)
    model = convnet(10)
    if not args.disable_dp:
        model = ModuleValidator.fix(model)
    settings = {"momentum": args.momentum} if args.optim != "Adam" else {}
    optimizer = getattr(optim, args.optim)(model.parameters(), lr=args.lr, **settings)
    engine = None
    if not args.disable_dp:
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=args.sigma,
            max_grad_norm=args.max_per_sample_grad_norm,
            clipping="per_layer" if args.clip_per_layer else "flat",
            grad_sample_mode=args.grad_sample_mode,
        )
    for epoch in range(args.epochs):
        if args.lr_schedule == "cos":
            lr = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
            for group in optimizer.param_groups:
                group["lr"] = lr
        train(args, (model, optimizer, loader), engine)
    print(f"test accuracy {100 * accuracy(model, test_loader):.2f} %")


if __name__ == "__main__":
    main()
