"""Recurrent networks: batch first and second, cells, packed and sorted sequences, scans and
loops.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.registry import (
    Network,
    classify,
    next_token,
    parameter,
    ragged,
    register,
    tensors,
    texts,
)

SEQUENCE = tensors((4, 3))


@register("recurrent", SEQUENCE, classify)
def gru_with_learnt_first_state():
    def forward(m, x):
        first = m.first.expand(1, x.shape[0], 4).contiguous()
        return m.head(m.layer(x, first)[0][:, -1])

    return Network(
        forward,
        layer=nn.GRU(3, 4, batch_first=True),
        first=parameter(1, 1, 4),
        head=nn.Linear(4, 3),
    )


@register("recurrent", SEQUENCE, classify)
def lstm_cell_loop():
    def forward(m, x):
        state = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            state = m.cell(step, state)
        return m.head(state[0])

    return Network(forward, cell=nn.LSTMCell(3, 4), head=nn.Linear(4, 3))


@register("recurrent", SEQUENCE, classify)
def cell_that_begins_with_no_state():
    def forward(m, x):
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return m.head(state[0])

    return Network(forward, cell=nn.LSTMCell(3, 4), head=nn.Linear(4, 3))


def _with_inner(forward):
    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


register_ragged = register("recurrent", ragged(), classify)


@register_ragged
def packed_lstm():
    def forward(m, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = m.layer(packed)
        return m.head(h[-1])

    return Network(forward, layer=nn.LSTM(4, 4, batch_first=True), head=nn.Linear(4, 3))


@register_ragged
def packed_bidirectional_gru_padded_again():
    def forward(m, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return m.head(out.sum(1))

    return Network(
        forward,
        layer=nn.GRU(4, 3, batch_first=True, bidirectional=True, num_layers=2),
        head=nn.Linear(6, 3),
    )


@register_ragged
def sorted_by_hand_then_packed():
    def forward(m, x, lengths):
        ordered, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(x[order], ordered, batch_first=True)
        _, h = m.layer(packed)
        return m.head(h[0][order.argsort()])

    return Network(forward, layer=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 3))


@register_ragged
def rows_sorted_and_scattered_back():
    def forward(m, x, lengths):
        order = lengths.argsort()
        h = torch.tanh(m.inner(x.index_select(0, order))).mean(1)
        back = torch.zeros_like(h).index_copy(0, order, h)
        return m.head(back)

    return _with_inner(forward)


@register_ragged
def valid_positions_selected_by_mask():
    """Positions of all examples are gathered into `[sum of lengths, d]` and written back."""

    def forward(m, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        h = torch.tanh(m.inner(x[mask]))
        out = x.new_zeros(*x.shape[:2], 4)
        out[mask] = h
        return m.head(out.sum(1))

    return _with_inner(forward)


@register_ragged
def trimmed_to_the_longest_with_a_mask():
    """The batch decides the length, but masks keep every example apart."""

    def forward(m, x, lengths):
        x = x[:, : int(lengths.max())]
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return m.head((torch.tanh(m.inner(x)) * mask).sum(1) / lengths[:, None])

    return _with_inner(forward)


@register_ragged
def rows_shuffled_at_random_and_back():
    def forward(m, x, lengths):
        order = torch.randperm(len(x))
        h = torch.tanh(m.inner(x[order])).mean(1)
        return m.head(h[torch.argsort(order)])

    return _with_inner(forward)


@register("recurrent", texts(), next_token)
def lstm_language_model_tied_and_flattened():
    def forward(m, ids):
        out, _ = m.layer(m.embed(ids))
        logits = m.head(out.reshape(-1, 4))
        return logits.view(*ids.shape, -1)

    model = Network(
        forward,
        embed=nn.Embedding(11, 4),
        layer=nn.GRU(4, 4, batch_first=True),
        head=nn.Linear(4, 11),
    )
    model.head.weight = model.embed.weight
    return model
