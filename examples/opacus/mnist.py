"""A small CNN on MNIST, as in the first example of Opacus; one import has changed.

python examples/opacus/mnist.py --data-root DIR    (files of MNIST; without it, random images)
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from small_data import images
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from dpkfc.integrations.opacus import PrivacyEngine  # was: from opacus import PrivacyEngine


class SampleConvNet(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[n, 1, 28, 28]` to logits `[n, 10]`."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loader: DataLoader,
    optimizer: optim.Optimizer,
    engine: PrivacyEngine | None,
) -> None:
    """Train for one epoch."""
    model.train()
    criterion = nn.CrossEntropyLoss()
    for data, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
    if engine is not None:
        epsilon = engine.accountant.get_epsilon(delta=args.delta)
        print(f"(ε = {epsilon:.2f}, δ = {args.delta})")


def test(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy on public test images."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            correct += int((model(data).argmax(1) == target).sum())
    return correct / len(loader.dataset)


def main() -> None:
    """Parse the flags, train, test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("-n", "--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("-c", "--max-per-sample-grad_norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--secure-rng", action="store_true")
    parser.add_argument("--disable-dp", action="store_true")
    parser.add_argument("--data-root", default="")
    args = parser.parse_args()
    train_loader = DataLoader(images(args.data_root, True, (1, 28, 28)), args.batch_size)
    test_loader = DataLoader(images(args.data_root, False, (1, 28, 28)), 1024)
    model = SampleConvNet()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0)
    privacy_engine = None
    if not args.disable_dp:
        privacy_engine = PrivacyEngine(secure_mode=args.secure_rng)
        model, optimizer, train_loader = privacy_engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=train_loader,
            noise_multiplier=args.sigma,
            max_grad_norm=args.max_per_sample_grad_norm,
        )
    for _ in range(args.epochs):
        train(args, model, train_loader, optimizer, privacy_engine)
    print(f"test accuracy {100 * test(model, test_loader):.2f} %")


if __name__ == "__main__":
    main()
