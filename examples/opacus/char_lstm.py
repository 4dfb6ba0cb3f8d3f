"""A character LSTM that tells the language of a name, as in Opacus's fourth example.

python examples/opacus/char_lstm.py    (random names)

The imports have changed, and the model packs: the loader gives padded ids and lengths, which
`pack_padded_sequence` takes inside of `forward`. The loader cannot pack, because a packed batch
does not show which entry belongs to which name.
"""

from __future__ import annotations

import argparse

import torch
from small_data import texts
from torch import Tensor, nn, optim

# was: from opacus.layers import DPLSTM
from torch.nn import LSTM as DPLSTM
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

from dpkfc.integrations.opacus import PrivacyEngine  # was: from opacus import PrivacyEngine

LANGUAGES = 4


class CharNNClassifier(nn.Module):
    """An embedding, an LSTM, and a linear layer on its last state."""

    def __init__(self, embedding_size: int, hidden_size: int, num_embeddings: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.lstm = DPLSTM(embedding_size, hidden_size, batch_first=True)
        self.out_layer = nn.Linear(hidden_size, LANGUAGES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Map padded ids `[n, T]` and lengths `[n]` to logits `[n, LANGUAGES]`."""
        x = self.embedding(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.out_layer(hidden[-1])


def padded_collate(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad names to the longest of a batch; name i stays in row i."""
    x = pad_sequence([ids for ids, _ in batch], batch_first=True)
    lengths = torch.tensor([len(ids) for ids, _ in batch])
    return x, lengths, torch.tensor([label for _, label in batch])


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the balanced accuracy on public test names."""
    model.eval()
    parts = [(model(x, lengths).argmax(1), label) for x, lengths, label in loader]
    found, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    recalls = [(found[labels == k] == k).double().mean() for k in range(LANGUAGES)]
    return float(torch.stack(recalls).mean())


def main() -> None:
    """Parse the flags, train, test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.5)
    parser.add_argument("--delta", type=float, default=8e-5)
    args = parser.parse_args()
    train_loader = DataLoader(texts(True, LANGUAGES), args.batch_size, collate_fn=padded_collate)
    test_loader = DataLoader(texts(False, LANGUAGES), args.batch_size, collate_fn=padded_collate)
    model = CharNNClassifier(16, 24, 100)
    optimizer = optim.SGD(model.parameters(), lr=args.learning_rate)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_per_sample_grad_norm,
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(args.epochs):
        model.train()
        for x, lengths, label in train_loader:
            optimizer.zero_grad()
            if len(label):  # no name may be drawn, and an LSTM takes no empty batch
                loss = criterion(model(x, lengths), label)
                loss.backward()
            optimizer.step()
        epsilon = privacy_engine.get_epsilon(delta=args.delta)
        print(f"accuracy {evaluate(model, test_loader):.3f} (ε = {epsilon:.2f}, δ = {args.delta})")


if __name__ == "__main__":
    main()
