"""The converted example programs of Opacus run as they stand, on small random data."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.integrations.opacus import PrivacyEngine

FOLDER = Path(__file__).parents[2] / "examples" / "opacus"


@pytest.mark.quick("mnist*", "char_lstm*")
@pytest.mark.parametrize(
    "name, flags",
    [
        ("mnist", ("--epochs", "1")),
        ("cifar10", ("--epochs", "1", "--clip-per-layer", "--optim", "RMSprop", "--lr", "0.01")),
        ("imdb", ("--epochs", "1")),
        ("char_lstm", ("--epochs", "1", "--batch-size", "32")),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_converted_program_of_opacus_runs(name, flags, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with torch.random.fork_rng():
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert re.search(r"\(ε = \d+\.\d\d, δ = ", capsys.readouterr().out)


def test_a_loader_that_packs_is_told_to_let_the_model_pack():
    def collate(rows):
        return pack_sequence([x for (x,) in rows], enforce_sorted=False)

    model = torch.nn.LSTM(3, 2, batch_first=True)
    loader = DataLoader(TensorDataset(torch.randn(8, 5, 3)), batch_size=2, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"in forward write pack_padded_sequence\(x, lengths, "):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
