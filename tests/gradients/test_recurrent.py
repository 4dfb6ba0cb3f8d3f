"""Recurrent layers against a loop of autograd over single examples, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from tests.gradients.loop import assert_equals_a_loop, loss_fn, record_gradients
from tests.gradients.whitened import clip_in_library
from tests.models import randn

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn tanh": lambda *a, **k: nn.RNN(*a, **k, nonlinearity="tanh"),
    "rnn relu": lambda *a, **k: nn.RNN(*a, **k, nonlinearity="relu"),
}


class Reader(nn.Module):
    """A recurrent layer behind a linear one, read at every step and at the end."""

    def __init__(self, inner, states=""):
        super().__init__()
        self.first, self.inner, self.states = nn.Linear(2, 3), inner, states

    def forward(self, x, *state):
        # read as well, so that dead units do not hide every gradient
        first = x = self.first(x)
        x = x if self.inner.batch_first else x.transpose(0, 1)
        hx = tuple(s.transpose(0, 1).contiguous() for s in state)  # [N, layers, width] in the batch
        hx = () if not hx else (hx,) if len(hx) > 1 else hx
        out, last = self.inner(x, *hx)
        out = out if self.inner.batch_first else out.transpose(0, 1)
        last = last if isinstance(last, tuple) else (last,)
        ends = [s.transpose(0, 1).flatten(1) * (k + 2) for k, s in enumerate(last)]
        read = {"": [out.flatten(1), *ends], "out": [out.flatten(1)], "ends": ends}[self.states]
        return torch.cat([first.flatten(1), *read], 1)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    n=st.integers(1, 4),
    t=st.integers(1, 5),
    width=st.integers(1, 4),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    initial=st.booleans(),
    read=st.sampled_from(["", "out", "ends"]),
)
def test_any_shape_equals_a_loop(
    kind, n, t, width, layers, bidirectional, bias, batch_first, initial, read
):
    inner = KINDS[kind](
        3, width, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    )
    model = Reader(inner, read).double()
    batch = [randn(n, t, 2)]
    if initial:
        states = 2 if kind == "lstm" else 1
        batch += [randn(n, layers * (1 + bidirectional), width) for _ in range(states)]
    assert_equals_a_loop(model, tuple(batch))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_projected_states(bidirectional):
    model = Reader(
        nn.LSTM(3, 5, 2, proj_size=2, batch_first=True, bidirectional=bidirectional)
    ).double()
    assert_equals_a_loop(model, (randn(3, 4, 2),))


def test_a_layer_called_twice_and_partly_frozen():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.GRU(3, 3, batch_first=True)
            self.inner.weight_hh_l0.requires_grad_(False)
            self.inner.bias_ih_l0.requires_grad_(False)

        def forward(self, x):
            return self.inner(self.inner(x)[0])[0]

    assert_equals_a_loop(Twice().double(), (randn(3, 4, 3),))


def test_only_biases_train_and_the_state_comes_by_keyword():
    class Biases(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LSTM(3, 3, batch_first=True)
            for name, p in self.inner.named_parameters():
                p.requires_grad_("bias" in name)

        def forward(self, x):
            state = torch.ones(1, x.shape[0], 3, dtype=x.dtype)
            return self.inner(input=x, hx=(state, 2 * state))[0]

    assert_equals_a_loop(Biases().double(), (randn(3, 4, 3),))


@pytest.mark.parametrize("kind", ["lstm", "rnn relu"])
def test_a_broken_example_stays_alone(kind):
    model = Reader(KINDS[kind](3, 4, 2, batch_first=True)).double()
    layers, x = find_layers(model), randn(3, 4, 2)
    sums = []
    for rows in ([0, 1, 2], [0, 2]):
        part = x.clone()
        part[1, 2, 0] = float("nan")
        sums.append(clip_in_library(model, layers, (part[rows],), loss_fn, 0.5)[1])
    for name, total in sums[0].items():
        assert_close(total, sums[1][name], rtol=1e-12, atol=1e-13)


def test_dropout_between_layers_hides_the_batch_axis():
    model = Reader(nn.LSTM(3, 4, 2, dropout=0.5)).double()
    batch = (randn(3, 4, 2),)
    with pytest.raises(
        ValueError, match="LSTM hides the batch axis.*dropout is drawn between layers"
    ):
        record_gradients(model, loss_fn, batch, 3)
    model.eval()
    assert_equals_a_loop(model, batch)


def test_a_subclass_with_its_own_forward_takes_the_fallback():
    class Doubled(nn.GRU):
        def forward(self, x):
            return super().forward(2 * x)

    model = Reader(Doubled(3, 4, batch_first=True), "out").double()
    assert {layer.name: layer.rule for layer in find_layers(model)}["inner"] == "fallback"
    batch = (randn(3, 4, 2),)
    assert_equals_a_loop(model, batch)
    model.states = "ends"  # [layers, N, width]: the batch is not in front
    assert_equals_a_loop(model, batch)


class Last(nn.Module):
    """Reads the last state of a recurrent layer, whose batch is the first or the second axis."""

    def __init__(self, batch_first):
        super().__init__()
        self.inner, self.head, self.batch_first = (
            nn.LSTM(4, 5, batch_first=batch_first),
            nn.Linear(5, 3),
            batch_first,
        )

    def forward(self, x):
        out = self.inner(x if self.batch_first else x.transpose(0, 1))[0]
        return self.head(out[:, -1] if self.batch_first else out[-1])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_probe_shows_a_recurrent_layer_in_batches_of_any_size(batch_first, rows):
    model = Last(batch_first).double()
    x = randn(rows, 6, 4)
    blocks = capture(model, find_layers(model), lambda inner: inner(x).square().sum(1))
    for i in range(rows):
        wanted = torch.autograd.grad(model(x[i : i + 1]).square().sum(), model.inner.weight_ih_l0)[
            0
        ]
        assert_close(blocks["inner"].grads["weight_ih_l0"][i], wanted, rtol=1e-10, atol=1e-12)
