"""Hold a value that no public row has: each example counts as it does alone."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from tests.gradients.cases import sum_examples
from tests.integrations import opacus_cases

N, D = 4, 3
FAR = 500.0  # beyond every public row


def loss_fn(model, batch):
    return model(batch[0]).reshape(len(batch[0]), -1).sin().sum(1)


def sum_of(model, x):
    found, _ = sum_examples(model, (x,), 0.5, loss_fn)
    return torch.cat([found[name].flatten() for name, _ in model.named_parameters()])


def check_alone(make):
    x = torch.randn(N, D, dtype=torch.float64)
    x[1, 0] = 10 * FAR
    torch.manual_seed(1)
    model = make().double()
    alone = [sum_of(model, x[i : i + 1]) for i in range(N)]
    assert_close(sum_of(model, x), torch.stack(alone).sum(0))


def gate(x):
    """0 where any row is far, else 1."""
    return torch.where(x.abs().max() > FAR, 0.0, 1.0)


# -- memory that several tensors share -------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x)), x))


def rows_before(h, x):
    buffer = torch.zeros(2 * len(x), D, dtype=x.dtype)
    buffer[1 : len(x) + 1] = x
    return h * torch.where(buffer[: len(x), :1].abs() > FAR, 0.0, 1.0)


def entries_before(h, x):
    buffer = torch.zeros(2 * x.numel(), dtype=x.dtype)
    buffer[D : D + x.numel()].view(-1, D).copy_(x)
    before = buffer[: x.numel()].view(-1, D)
    return h * torch.where(before[:, :1].abs() > FAR, 0.0, 1.0)


def view_of_two_copies(h, x):
    buffer = torch.zeros(2 * len(x), D, dtype=x.dtype)
    after = buffer[1 : len(x) + 1]
    buffer[: len(x)] = x
    buffer[len(x) :] = x
    return h * torch.where(after[:, :1].abs() > FAR, 0.0, 1.0)


def read_by_array(h, x):
    array = np.zeros(x.shape)
    torch.from_numpy(array).copy_(x)
    return h * float(array.max() <= FAR)


@pytest.mark.parametrize("middle", [rows_before, entries_before, view_of_two_copies, read_by_array])
def test_rows_that_are_written_beside_their_places(middle):
    check_alone(lambda: Net(middle))


# -- backward passes -------------------------------------------------------------------------------


def save_by_hooks(h, x):
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda y: y * gate(y), lambda y: y)
    with hooks:
        return (h * x.clone()).sin() * h


def read_by_node(h, x):
    y = h * 1
    y.grad_fn.register_prehook(lambda g: (g[0] * gate(x),))  # type: ignore[union-attr]
    return y


def read_by_edge(h, x):
    y = h * 1
    node = torch.autograd.graph.get_gradient_edge(y).node
    node.register_prehook(lambda g: (g[0] * gate(x),))
    return y


@pytest.mark.parametrize("middle", [save_by_hooks, read_by_node, read_by_edge])
def test_hooks_that_change_gradients(middle):
    check_alone(lambda: Net(middle))


# -- sizes -----------------------------------------------------------------------------------------


def read_by_size(h, x):
    lengths = 1 + (x[:, 0] > FAR).long()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return h * (len(packed.data) <= len(x))


def test_sizes_of_packed_sequences():
    check_alone(lambda: Net(read_by_size))


# -- recurrent layers with a forward function of their own -----------------------------------------


class OwnLSTM(nn.LSTM):
    def forward(self, x):  # type: ignore[override]
        return super().forward(x * gate(x))[0]


class OwnCell(nn.GRUCell):
    def forward(self, x):  # type: ignore[override]
        return super().forward(x * gate(x), x)


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(D, 2)

    def forward(self, x):
        if isinstance(self.layer, nn.LSTM):
            return self.last(self.layer(x[:, None])[:, -1])
        return self.last(self.layer(x))


@pytest.mark.parametrize("layer", [partial(OwnLSTM, batch_first=True), OwnCell])
def test_recurrent_layers_with_a_forward_function_of_their_own(layer):
    check_alone(lambda: Recurrent(layer(D, D)))


# -- memory that the code of a model reaches -------------------------------------------------------

LARGEST = [FAR]


def largest_so_far(x):
    LARGEST[0] = max(LARGEST[0], x.abs().max().item())
    return FAR / LARGEST[0]


class ReachesAList(Net):
    def __init__(self):
        super().__init__(lambda h, x: h * largest_so_far(x))


class ByMethod(ReachesAList):
    largest = FAR

    def forward(self, x):
        ByMethod.largest = max(self.largest, x.abs().max().item())
        return self.last(torch.tanh(self.first(x)) * (FAR / self.largest))


class AddsToItsClass(ReachesAList):
    def forward(self, x):
        if float(x.abs().max()) > FAR:
            type(self).factor = 3.0
        return super().forward(x) * getattr(type(self), "factor", 1.0)


class AddsToAFunction(ReachesAList):
    def forward(self, x):
        if float(x.abs().max()) > FAR:
            gate.factor = 3.0  # type: ignore[attr-defined]
        return self.last(torch.tanh(self.first(x))) * getattr(gate, "factor", 1.0)


class ByDefault(ReachesAList):
    def forward(self, x, largest=[FAR]):  # noqa: B006
        largest[0] = max(largest[0], x.abs().max().item())
        return self.last(torch.tanh(self.first(x)) * (FAR / largest[0]))


@pytest.mark.parametrize(
    "kind", [ReachesAList, ByDefault, ByMethod, AddsToItsClass, AddsToAFunction]
)
def test_memory_that_the_code_of_a_model_reaches(kind):
    check_alone(kind)
    assert LARGEST == [FAR] and ByMethod.largest == FAR


class KeepsIt(ReachesAList):
    def forward(self, x):
        self.largest = max(getattr(self, "largest", FAR), x.abs().max().item())
        return self.last(torch.tanh(self.first(x)) * (FAR / self.largest))


def open_script(model, data):
    """Return model, optimizer and loader of an Opacus script without noise that moves nothing."""
    return opacus_cases.private(
        model,
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
        data_loader=DataLoader(data, batch_size=10),
        max_grad_norm=0.5,
    )[1:]


@pytest.mark.quick("KeepsIt", "ByMethod")
@pytest.mark.parametrize("kind", [KeepsIt, ReachesAList, ByMethod, AddsToItsClass])
def test_memory_of_the_model_of_an_opacus_script(kind):
    x = torch.randn(20, D)
    x[::3, 0] = 10 * FAR
    model = kind()
    alone = torch.stack([sum_of(model, row[None]) for row in x])
    model, optimizer, loader = open_script(model, TensorDataset(x, torch.arange(20)))
    for rows, places in loader:
        model(rows).sin().sum(1).mean().backward()
        optimizer.step()
        released = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert_close(10 * released, alone[places].sum(0), rtol=1e-4, atol=1e-5)


class CountsTexts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 2)

    def forward(self, x, texts):
        return self.layer(x) * len(set(texts))


def test_texts_that_an_opacus_script_hands_to_its_model():
    rows = [(torch.randn(D), "aeiou"[i % 5]) for i in range(20)]
    model, optimizer, loader = open_script(CountsTexts(), rows)
    x, texts = next(iter(loader))
    alone = torch.stack([sum_of(model.layer, row[None]) for row in x])
    model(x, texts).sin().sum(1).mean().backward()
    optimizer.step()
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close(10 * released, alone.sum(0), rtol=1e-4, atol=1e-5)
