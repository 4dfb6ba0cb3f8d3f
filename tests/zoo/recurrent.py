"""Recurrent networks: batch first and second, cells, packed and sorted sequences, scans and
loops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.registry import (
    Network,
    add_architecture,
    classify,
    next_token,
    parameter,
    ragged,
    register,
    tensors,
    texts,
)

SEQUENCE = tensors((4, 3))

_LAYERS = {
    "rnn": lambda **k: nn.RNN(3, 4, **k),
    "rnn_relu": lambda **k: nn.RNN(3, 4, nonlinearity="relu", **k),
    "gru": lambda **k: nn.GRU(3, 4, **k),
    "lstm": lambda **k: nn.LSTM(3, 4, **k),
    "lstm_projected": lambda **k: nn.LSTM(3, 6, proj_size=4, **k),
    "lstm_without_bias": lambda **k: nn.LSTM(3, 4, bias=False, **k),
}


def _batch_first(layer: nn.Module, width: int = 4) -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(m.layer(x)[0].mean(1))

    return Network(forward, layer=layer, head=nn.Linear(width, 3))


def _sequence_first(layer: nn.Module, width: int = 4) -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        return m.head(m.layer(x.transpose(0, 1))[0][-1])

    return Network(forward, layer=layer, head=nn.Linear(width, 3))


for _name, _layer in _LAYERS.items():
    add_architecture(
        f"{_name}_batch_first",
        "recurrent",
        lambda b=_layer: _batch_first(b(batch_first=True)),
        SEQUENCE,
        classify,
    )
    add_architecture(
        f"{_name}_sequence_first",
        "recurrent",
        lambda b=_layer: _sequence_first(b()),
        SEQUENCE,
        classify,
    )

for _name in ("gru", "lstm"):
    _layer = _LAYERS[_name]
    add_architecture(
        f"{_name}_bidirectional",
        "recurrent",
        lambda b=_layer: _batch_first(b(batch_first=True, bidirectional=True, num_layers=2), 8),
        SEQUENCE,
        classify,
    )
    add_architecture(
        f"{_name}_bidirectional_sequence_first",
        "recurrent",
        lambda b=_layer: _sequence_first(b(bidirectional=True, num_layers=2), 8),
        SEQUENCE,
        classify,
    )


@register("recurrent", SEQUENCE, classify)
def lstm_last_hidden_state() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        _, (h, c) = m.layer(x)
        return m.head(torch.cat([h.transpose(0, 1).flatten(1), c[-1]], 1))

    return Network(
        forward, layer=nn.LSTM(3, 4, num_layers=2, batch_first=True), head=nn.Linear(12, 3)
    )


@register("recurrent", SEQUENCE, classify)
def gru_with_learnt_first_state() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        first = m.first.expand(1, x.shape[0], 4).contiguous()
        return m.head(m.layer(x, first)[0][:, -1])

    return Network(
        forward,
        layer=nn.GRU(3, 4, batch_first=True),
        first=parameter(1, 1, 4),
        head=nn.Linear(4, 3),
    )


@register("recurrent", SEQUENCE, classify)
def gru_state_from_the_example() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        first = torch.tanh(m.begin(x[:, 0])).unsqueeze(0)
        return m.head(m.layer(x, first)[0][:, -1])

    return Network(
        forward, layer=nn.GRU(3, 4, batch_first=True), begin=nn.Linear(3, 4), head=nn.Linear(4, 3)
    )


@register("recurrent", SEQUENCE, classify)
def encoder_decoder_lstm_sequence_first() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2)
        _, state = m.encoder(x)
        out, _ = m.decoder(x.flip(0), state)
        return m.head(out.mean(0))

    return Network(forward, encoder=nn.LSTM(3, 4), decoder=nn.LSTM(3, 4), head=nn.Linear(4, 3))


def _cell_loop(cell: nn.Module, has_memory: bool) -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        c = torch.zeros_like(h)
        for t in range(x.shape[1]):
            if has_memory:
                h, c = m.cell(x[:, t], (h, c))
            else:
                h = m.cell(x[:, t], h)
        return m.head(h)

    return Network(forward, cell=cell, head=nn.Linear(4, 3))


add_architecture(
    "lstm_cell_loop", "recurrent", lambda: _cell_loop(nn.LSTMCell(3, 4), True), SEQUENCE, classify
)
add_architecture(
    "gru_cell_loop", "recurrent", lambda: _cell_loop(nn.GRUCell(3, 4), False), SEQUENCE, classify
)
add_architecture(
    "rnn_cell_loop", "recurrent", lambda: _cell_loop(nn.RNNCell(3, 4), False), SEQUENCE, classify
)


@register("recurrent", SEQUENCE, classify)
def cell_that_begins_with_no_state() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return m.head(state[0])

    return Network(forward, cell=nn.LSTMCell(3, 4), head=nn.Linear(4, 3))


@register("recurrent", SEQUENCE, classify)
def lstm_by_hand() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 4)
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (x[:, t] @ m.wx + h @ m.wh + m.b).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return m.head(torch.stack(outputs).mean(0))

    return Network(
        forward, wx=parameter(3, 16), wh=parameter(4, 16), b=parameter(16), head=nn.Linear(4, 3)
    )


@register("recurrent", ragged(), classify)
def packed_lstm() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = m.layer(packed)
        return m.head(h[-1])

    return Network(forward, layer=nn.LSTM(4, 4, batch_first=True), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def packed_bidirectional_gru_padded_again() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return m.head(out.sum(1))

    return Network(
        forward,
        layer=nn.GRU(4, 3, batch_first=True, bidirectional=True, num_layers=2),
        head=nn.Linear(6, 3),
    )


@register("recurrent", ragged(), classify)
def packed_sequence_first_rnn() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
        _, h = m.layer(packed)
        return m.head(h[0])

    return Network(forward, layer=nn.RNN(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def sorted_by_hand_then_packed() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        ordered, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(x[order], ordered, batch_first=True)
        _, h = m.layer(packed)
        return m.head(h[0][order.argsort()])

    return Network(forward, layer=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def linear_on_packed_data() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=torch.tanh(m.inner(packed.data)))
        out, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return m.head(out.sum(1))

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def rows_sorted_inside_forward() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        h = torch.tanh(m.inner(x[order]))
        return m.head(h[order.argsort()].mean(1))

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def rows_sorted_and_scattered_back() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort()
        h = torch.tanh(m.inner(x.index_select(0, order))).mean(1)
        back = torch.zeros_like(h).index_copy(0, order, h)
        return m.head(back)

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def valid_positions_selected_by_mask() -> nn.Module:
    """Positions of all examples are gathered into `[sum of lengths, d]` and written back."""

    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        h = torch.tanh(m.inner(x[mask]))
        out = x.new_zeros(*x.shape[:2], 4)
        out[mask] = h
        return m.head(out.sum(1))

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def loop_over_examples_in_python() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        rows = [torch.tanh(m.inner(x[i, : int(lengths[i])])).mean(0) for i in range(len(x))]
        return m.head(torch.stack(rows))

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def state_masked_by_length() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            alive = (lengths > t).unsqueeze(1)
            h = torch.where(alive, m.cell(x[:, t], h), h)
        return m.head(h)

    return Network(forward, cell=nn.GRUCell(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def trimmed_to_the_longest_with_a_mask() -> nn.Module:
    """The batch decides the length, but masks keep every example apart."""

    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : int(lengths.max())]
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return m.head((torch.tanh(m.inner(x)) * mask).sum(1) / lengths[:, None])

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def rows_shuffled_at_random_and_back() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        h = torch.tanh(m.inner(x[order])).mean(1)
        return m.head(h[torch.argsort(order)])

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("recurrent", ragged(), classify)
def last_valid_step_by_gather() -> nn.Module:
    def forward(m: Network, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = m.layer(x)
        index = (lengths - 1)[:, None, None].expand(-1, 1, out.shape[-1])
        return m.head(out.gather(1, index).squeeze(1))

    return Network(forward, layer=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 3))


@register("recurrent", SEQUENCE, classify)
def linear_recurrence_by_cumsum() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        decay = torch.sigmoid(m.decay)
        powers = decay ** torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        h = (m.inner(x) / powers).cumsum(1) * powers
        return m.head(h[:, -1])

    return Network(forward, inner=nn.Linear(3, 4), decay=parameter(4), head=nn.Linear(4, 3))


@register("recurrent", SEQUENCE, classify)
def retention_with_decay_matrix() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1])
        distance = (t[:, None] - t[None, :]).clamp(min=0).to(x)
        decay = torch.sigmoid(m.rate) ** distance * (t[:, None] >= t[None, :])
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.head((torch.einsum("nid,njd->nij", q, k) * decay) @ v).mean(1)

    return Network(forward, qkv=nn.Linear(3, 12), rate=parameter(1), head=nn.Linear(4, 3))


@register("recurrent", SEQUENCE, classify)
def selective_scan_as_in_mamba() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        u, gate = m.into(x).chunk(2, -1)
        u = F.silu(m.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c, dt = m.select(u).split([2, 2, 4], -1)
        dt = F.softplus(dt + m.dt_bias)
        a = -m.log_a.exp()
        h, outputs = x.new_zeros(x.shape[0], 4, 2), []
        for t in range(x.shape[1]):
            h = (
                torch.exp(dt[:, t, :, None] * a) * h
                + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            )
            outputs.append((h * c[:, t, None]).sum(-1) + m.skip * u[:, t])
        return m.head((torch.stack(outputs, 1) * F.silu(gate)).mean(1))

    return Network(
        forward,
        into=nn.Linear(3, 8),
        conv=nn.Conv1d(4, 4, 2, padding=1, groups=4),
        select=nn.Linear(4, 8, bias=False),
        dt_bias=parameter(4),
        log_a=parameter(4, 2),
        skip=parameter(4),
        head=nn.Linear(4, 3),
    )


@register("recurrent", SEQUENCE, classify)
def state_space_model_by_convolution() -> nn.Module:
    """A kernel from learnt matrices alone, applied by Fourier transforms."""

    def forward(m: Network, x: Tensor) -> Tensor:
        t = x.shape[1]
        powers = torch.exp(-m.rate.exp()[:, None] * torch.arange(t, dtype=x.dtype))
        kernel = (m.c * m.b) @ powers
        u = m.inner(x).transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * t) * torch.fft.rfft(kernel, n=2 * t), n=2 * t)[
            ..., :t
        ]
        return m.head(y.mean(-1))

    return Network(
        forward,
        inner=nn.Linear(3, 4),
        rate=parameter(2),
        b=parameter(4, 2),
        c=parameter(4, 2),
        head=nn.Linear(4, 3),
    )


@register("recurrent", SEQUENCE, classify)
def neural_turing_machine_loop() -> nn.Module:
    def forward(m: Network, x: Tensor) -> Tensor:
        n = x.shape[0]
        memory = m.memory.expand(n, -1, -1)
        h = x.new_zeros(n, 4)
        for t in range(x.shape[1]):
            key = torch.tanh(m.key(h))
            w = torch.einsum("nsd,nd->ns", memory, key).softmax(-1)
            read = torch.einsum("ns,nsd->nd", w, memory)
            h = m.cell(torch.cat([x[:, t], read], 1), h)
            memory = memory * (1 - w.unsqueeze(-1) * torch.sigmoid(m.erase(h)).unsqueeze(1))
            memory = memory + w.unsqueeze(-1) * m.add(h).unsqueeze(1)
        return m.head(h)

    return Network(
        forward,
        memory=parameter(1, 3, 2),
        key=nn.Linear(4, 2),
        cell=nn.GRUCell(5, 4),
        erase=nn.Linear(4, 2),
        add=nn.Linear(4, 2),
        head=nn.Linear(4, 3),
    )


@register("recurrent", texts(), next_token)
def character_lstm_sequence_first() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        out, _ = m.layer(m.embed(ids.t()))
        return m.head(out).transpose(0, 1)

    return Network(forward, embed=nn.Embedding(11, 4), layer=nn.LSTM(4, 5), head=nn.Linear(5, 11))


@register("recurrent", texts(), next_token)
def lstm_language_model_tied_and_flattened() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
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


@register("recurrent", texts(), next_token)
def teacher_forced_decoder_with_attention() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        memory, h = m.encoder(m.embed(ids.flip(1)))
        h, outputs = h[0], []
        for t in range(ids.shape[1]):
            scores = m.score(torch.tanh(m.query(h).unsqueeze(1) + m.keys(memory))).squeeze(-1)
            context = torch.bmm(scores.softmax(1).unsqueeze(1), memory).squeeze(1)
            h = m.cell(torch.cat([m.embed(ids[:, t]), context], 1), h)
            outputs.append(m.head(h))
        return torch.stack(outputs, dim=1)

    return Network(
        forward,
        embed=nn.Embedding(11, 4),
        encoder=nn.GRU(4, 4, batch_first=True),
        query=nn.Linear(4, 4),
        keys=nn.Linear(4, 4, bias=False),
        score=nn.Linear(4, 1),
        cell=nn.GRUCell(8, 4),
        head=nn.Linear(4, 11),
    )


@register("recurrent", SEQUENCE, classify, is_random=True)
def lstm_with_dropout_between_layers() -> nn.Module:
    return _batch_first(nn.LSTM(3, 6, num_layers=2, dropout=0.3, batch_first=True), 6)
