"""A bag of embeddings on movie reviews, as in Opacus's third example.

python examples/opacus/imdb.py    (random texts)

Three lines have changed: the import, `poisson_sampling=False`, which has no certified ε and is left
out, and the mean over positions, which leaves padding out. Else the loss of a text would depend on
the longest text of its batch.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from small_data import texts
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from dpkfc.integrations.opacus import PrivacyEngine  # was: from opacus import PrivacyEngine


class SampleNet(nn.Module):
    """The mean of embeddings, and two linear layers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab_size, 16)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids `[n, T]` to logits `[n, 2]`."""
        mask = (x > 0).unsqueeze(2)
        # was: self.pool(self.emb(x).transpose(1, 2)).squeeze(), a mean over padding too
        x = (self.emb(x) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.fc2(F.relu(self.fc1(x)))


def padded_collate(batch: list[tuple[Tensor, int]], padding_idx: int = 0) -> tuple[Tensor, Tensor]:
    """Pad texts to the longest of a batch."""
    x = pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=padding_idx)
    return x, torch.tensor([label for _, label in batch])


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy on public test texts."""
    model.eval()
    hits = [model(data).argmax(1) == label for data, label in loader]
    return float(torch.cat(hits).double().mean())


def main() -> None:
    """Parse the flags, train, test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("-n", "--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--sigma", type=float, default=0.56)
    parser.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    args = parser.parse_args()
    train_loader = DataLoader(
        texts(True, 2), args.batch_size, shuffle=True, collate_fn=padded_collate
    )
    test_loader = DataLoader(texts(False, 2), args.batch_size, collate_fn=padded_collate)
    model = SampleNet(100)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=args.sigma,
        max_grad_norm=args.max_per_sample_grad_norm,
        # was: poisson_sampling=False
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(args.epochs):
        model.train()
        for data, label in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), label)
            loss.backward()
            optimizer.step()
        epsilon = privacy_engine.get_epsilon(delta=args.delta)
        print(f"accuracy {evaluate(model, test_loader):.3f} (ε = {epsilon:.2f}, δ = {args.delta})")


if __name__ == "__main__":
    main()
