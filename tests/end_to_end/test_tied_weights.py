"""Tied input and output embeddings: one gradient, one norm, one noise; tied before, tied after."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.state import _check_covered
from dpkfc.session import Session
from tests.gradients.loop import assert_equals_a_loop
from tests.gradients.whitened import clipped, example_rows, looped

V, D, T, N = 13, 6, 5, 12


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(ids))))


def model_and_data() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tied().double(), torch.randint(0, V, (N, T))


def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    ids = batch[0]
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def test_the_norm_is_that_of_the_sum_not_of_the_parts() -> None:
    """Clipping each use on its own would let an example through with up to twice its share."""
    model, ids = model_and_data()
    model.requires_grad_(False)
    model.table.weight.requires_grad_(True)
    layers = find_layers(model)
    assert [layer.rule for layer in layers] == ["tied"]
    rows = looped(model, (ids,), loss_fn)
    exact = torch.stack([row["table.weight"].norm() for row in rows])
    norms, total = clipped(model, layers, (ids,), loss_fn, float(exact.min()) / 2)
    torch.testing.assert_close(norms, exact)
    torch.testing.assert_close(
        total["table.weight"],
        sum(row["table.weight"] / n * exact.min() / 2 for row, n in zip(rows, exact, strict=True)),
    )


def test_neighbouring_batches_differ_by_at_most_the_bound() -> None:
    model, ids = model_and_data()
    layers = find_layers(model)
    for left_out in range(N):
        whole = clipped(model, layers, (ids,), loss_fn, 0.1)[1]
        less = clipped(model, layers, (ids[torch.arange(N) != left_out],), loss_fn, 0.1)[1]
        assert float(torch.sqrt(sum((whole[n] - less[n]).square().sum() for n in whole))) <= 0.1 * (
            1 + 1e-9
        )


def test_a_session_keeps_the_tie_and_the_names() -> None:
    model, ids = model_and_data()
    keys = list(model.state_dict())
    config = PrivacyConfig(expected_batch_size=6, steps=3, test_mode_seed=5, max_grad_norm=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.table.weight.detach().clone()
    with Session(config.with_noise(1.0, 1e-3, N), model, optimizer, (ids,)) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
    assert model.head.weight is model.table.weight
    assert not torch.equal(model.table.weight, before)
    assert list(model.state_dict()) == keys


def test_a_use_that_no_module_makes_counts() -> None:
    class Leaky(Tied):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + F.linear(self.table(ids), self.table.weight)

    torch.manual_seed(0)
    model, ids = Leaky().double(), torch.randint(0, V, (2, T))
    assert_equals_a_loop(model, loss_fn, (ids,), [example_rows((ids,), [i]) for i in range(2)])


def test_a_frozen_tied_weight_costs_nothing() -> None:
    model, ids = model_and_data()
    model.table.weight.requires_grad_(False)
    layers = find_layers(model)
    assert [(layer.name, list(layer.parameters)) for layer in layers] == [
        ("mix", ["weight", "bias"]),
        ("head", ["bias"]),
    ]
    _, total = clipped(model, layers, (ids,), loss_fn, 0.1)
    assert set(total) == {"mix.weight", "mix.bias", "head.bias"}


def test_untying_after_the_layers_were_found_is_noticed() -> None:
    model, _ = model_and_data()
    layers = find_layers(model)
    _check_covered(model, layers)
    model.head.weight = nn.Parameter(model.table.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"'head.weight' is trainable but in no covered layer"):
        _check_covered(model, layers)


def test_an_adapter_and_thawed_or_frozen_parameters_are_noticed() -> None:
    model, _ = model_and_data()
    model.mix.bias.requires_grad_(False)
    layers = find_layers(model)
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="'adapter.weight' is trainable but"):
        _check_covered(model, layers)
    del model.adapter
    _check_covered(model, layers)
    model.mix.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'mix.bias' is trainable but"):
        _check_covered(model, layers)
    model.mix.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'mix.weight' was frozen"):
        _check_covered(model, layers)
    model.mix = nn.Identity()
    with pytest.raises(RuntimeError, match=r"'mix.weight' was frozen or taken out"):
        _check_covered(model, layers)
