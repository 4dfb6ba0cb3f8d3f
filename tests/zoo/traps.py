"""Sound and mixing models that look alike: equal lengths, public rows beside private ones, numbers
that leave torch.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tests.zoo.registry import (
    MIXING,
    SOUND,
    UNCLEAR,
    Network,
    add_architecture,
    classify,
    generator_of,
    mlp,
    normal,
    parameter,
    ragged,
    register,
    tensors,
    vectors,
    words,
)

VECTORS = vectors()
SQUARE = tensors((5, 5))
SEQUENCE = tensors((3, 4))


def _inner(change, width=6):
    """Build a perceptron whose hidden layer `[n, width]` goes through a function."""

    def build():
        return Network(
            lambda m, x: m.head(torch.tanh(change(m.body(x)))),
            body=nn.Linear(4, width),
            head=nn.Linear(width, 3),
        )

    return build


def _add(name, kind, change, width=6, *, is_random=False):
    name = f"mixes_{name}" if kind == MIXING else name
    size = 5 if kind == MIXING else None
    add_architecture(
        name,
        "traps",
        _inner(change, width),
        VECTORS,
        classify,
        kind=kind,
        size=size,
        is_random=is_random,
    )


# -- operations over the leading axis, one of which is harmless ------------------------------------

_add("flattened_and_viewed_back", SOUND, lambda h: (h.flatten() * 2 + 1).view_as(h))
_add("mean_of_everything", MIXING, lambda h: h - h.mean())
_add(
    "indexed_twice_back_to_the_identity",
    SOUND,
    lambda h: h[torch.arange(len(h)).roll(1)][torch.arange(len(h)).roll(-1)],
)
_add(
    "repeated_and_paired_alike",
    SOUND,
    lambda h: (h.repeat(3, 1) * h.repeat(3, 1)).view(3, -1, h.shape[1]).mean(0),
)
_add(
    "repeated_and_paired_otherwise",
    MIXING,
    lambda h: (h.repeat(3, 1) * h.repeat_interleave(3, 0)).view(3, -1, h.shape[1]).mean(0),
)
_add(
    "joined_and_unfolded_rightly",
    SOUND,
    lambda h: torch.cat([h, 2 * h]).view(2, -1, h.shape[1]).sum(0),
)
_add(
    "joined_and_unfolded_wrongly",
    MIXING,
    lambda h: torch.cat([h, 2 * h]).view(-1, 2, h.shape[1]).sum(1),
)
_add(
    "joined_and_halves_exchanged",
    MIXING,
    lambda h: torch.cat(torch.cat([h, 2 * h]).split([1, 2 * len(h) - 1])[::-1])[: len(h)],
)
_add("scalar_per_row_broadcast_along_features", MIXING, lambda h: h + h.sum(1), width=5)
_add("product_on_the_left", MIXING, lambda h: torch.eye(len(h), dtype=h.dtype).flip(0) @ h, width=5)
_add(
    "product_on_the_left_with_the_identity",
    UNCLEAR,
    lambda h: torch.eye(len(h), dtype=h.dtype) @ h,
    width=5,
)
_add("diagonal_of_all_products", UNCLEAR, lambda h: h * (h @ h.T).diagonal()[:, None])
_add(
    "attention_with_the_batch_as_time",
    MIXING,
    lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
)
_add(
    "masked_scatter_of_its_own_entries",
    UNCLEAR,
    lambda h: torch.zeros_like(h).masked_scatter(h > 0, h[h > 0]),
)
_add(
    "masked_scatter_of_all_entries",
    MIXING,
    lambda h: h + torch.zeros_like(h).masked_scatter(h > 0, h),
)
_add("zero_times_the_batch", UNCLEAR, lambda h: h + 0.0 * h.mean(0))
_add("batch_mean_added_and_taken_off", UNCLEAR, lambda h: (h + h.mean(0)) - h.mean(0))
_add("random_permutation_of_features", UNCLEAR, lambda h: h[:, torch.arange(6).flip(0)])

# -- numbers that leave torch ----------------------------------------------------------------------


def _rounded_by_numpy(h):
    return h + torch.from_numpy(h.detach().numpy().round(1))


def _mean_by_numpy(h):
    return h - torch.from_numpy(h.detach().numpy().mean(0))


def _mean_by_lists(h):
    rows = h.tolist()
    return h - torch.tensor(
        [sum(column) / len(rows) for column in zip(*rows, strict=True)], dtype=h.dtype
    )


def _scaled_by_items(h):
    """Each row is scaled by a Python number of its own."""
    return torch.stack([row / (1 + abs(row[0].item())) for row in h])


def _scaled_by_an_item_of_row_zero(h):
    return h / (1 + abs(h[0, 0].item()))


def _data_attribute(h):
    return h - h.data.mean(0)


def _storage(h):
    """All rows are read through the storage of the tensor."""
    flat = torch.as_strided(h, (h.numel(),), (1,))
    return h + 0.1 * flat.roll(1).view_as(h)


_add("rounded_by_numpy", SOUND, _rounded_by_numpy)
_add("mean_by_numpy", MIXING, _mean_by_numpy)
_add("mean_by_lists", MIXING, _mean_by_lists)
_add("scaled_by_items_of_its_own", SOUND, _scaled_by_items)
_add("scaled_by_an_item_of_row_zero", MIXING, _scaled_by_an_item_of_row_zero)
_add("mean_of_the_data_attribute", MIXING, _data_attribute)
_add("storage_read_across_rows", MIXING, _storage)


class _NumpyFunction(torch.autograd.Function):
    """An operation written in NumPy with a gradient of its own."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return torch.from_numpy(h.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        return 2 * h * g


_add("own_function_in_numpy", SOUND, _NumpyFunction.apply)


def _mixes_now_and_then(h):
    return h + 0.3 * h.roll(1, 0) if float(torch.rand(())) < 0.125 else h


def _partner_with_small_probability(h):
    return h + (torch.rand(len(h), 1) < 0.02) * h.roll(1, 0)


def _mixes_where_a_feature_is_large(h):
    """Mixes only in batches that hold a rare row."""
    return h - 0.5 * h.mean(0) if float(h.max()) > 2.5 else h


# A batch of one mixes nothing here, so the exact way is right too.
_add("mixing_now_and_then", UNCLEAR, _mixes_now_and_then, is_random=True)
_add("mixing_with_small_probability", UNCLEAR, _partner_with_small_probability)


# -- equal lengths ---------------------------------------------------------------------------------


def _square(name, kind, forward):
    name = f"mixes_{name}" if kind == MIXING else name
    size = 5 if kind == MIXING else None
    build = lambda: Network(forward, body=nn.Linear(5, 5), head=nn.Linear(5, 3))  # noqa: E731
    add_architecture(name, "traps", build, SQUARE, classify, kind=kind, size=size)


_square(
    "square_transposed_twice",
    SOUND,
    lambda m, x: m.head(torch.tanh(m.body(x.transpose(0, 1))).transpose(0, 1).mean(1)),
)
_square("square_mean_over_examples", MIXING, lambda m, x: m.head(torch.tanh(m.body(x)).mean(0)))
_square(
    "square_transposed_once",
    MIXING,
    lambda m, x: m.head(torch.tanh(m.body(x.transpose(0, 1))).mean(1)),
)
_square(
    "square_axes_permuted",
    MIXING,
    lambda m, x: m.head(torch.tanh(m.body(x.permute(2, 1, 0))).mean(1)),
)
_square("square_last_example", MIXING, lambda m, x: m.head(torch.tanh(m.body(x))[-1]))
_square(
    "square_product_across_examples",
    MIXING,
    lambda m, x: m.head(torch.einsum("nij,ijk->nik", m.body(x), x).sum(1)),
)
_square(
    "square_diagonal_across_examples",
    MIXING,
    lambda m, x: m.head(torch.diagonal(m.body(x), dim1=0, dim2=1).T),
)
_square(
    "square_diagonal_within_examples",
    SOUND,
    lambda m, x: m.head(torch.diagonal(m.body(x), dim1=1, dim2=2)),
)


# -- public rows beside private ones ---------------------------------------------------------------


register_trap = register("traps", VECTORS, classify)


@register_trap
def public_support_set_in_another_call():
    """Prototypes are means of encoded public rows; the encoder is shared with the private rows."""

    def forward(m, x):
        prototypes = m.encode(m.support).view(3, 2, 4).mean(1)
        return -torch.cdist(m.encode(x), prototypes).square()

    return Network(
        forward, {"support": torch.randn(6, 4)}, encode=nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    )


@register_trap
def public_support_set_in_the_same_call():
    def forward(m, x):
        h = m.encode(torch.cat([m.support, x]))
        prototypes = h[:6].view(3, 2, 4).mean(1)
        return h[6:] @ prototypes.T

    return Network(
        forward, {"support": torch.randn(6, 4)}, encode=nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    )


@register_trap
def public_sparse_matrix():
    def forward(m, x):
        return m.head(torch.tanh(torch.sparse.mm(m.graph, m.body(x).T).T))

    graph = torch.tensor([[1.0, 0, 0, 2], [0, 0, 1, 0], [0, 3, 0, 0]]).to_sparse()
    return Network(forward, {"graph": graph}, body=nn.Linear(4, 4), head=nn.Linear(3, 3))


@register_trap
def parameter_that_reaches_the_loss_twice():
    def forward(m, x):
        h = F.linear(x, m.w) + m.w.sum(1)
        return F.linear(torch.tanh(h), m.w.T)[:, :3] + m.w.diagonal()[:3]

    return Network(forward, w=parameter(5, 4))


@register_trap
def layer_called_on_one_public_row():
    """The first row of every intermediate result is public: a batch of one beside a batch of n."""

    def forward(m, x):
        start = torch.tanh(m.body(m.start))
        return m.head(torch.tanh(m.body(x)) + start) + m.head(start)

    return Network(forward, start=parameter(1, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register("traps", SEQUENCE, classify)
def recurrent_layer_on_a_public_sequence():
    def forward(m, x):
        context = m.layer(m.public)[1][0]
        return m.head(m.layer(x)[1][0] + context)

    return Network(
        forward,
        public=parameter(1, 3, 4),
        layer=nn.GRU(4, 4, batch_first=True),
        head=nn.Linear(4, 3),
    )


@register("traps", SEQUENCE, classify)
def convolution_of_a_public_tensor():
    def forward(m, x):
        waves = m.conv(m.waves.unsqueeze(0))
        return m.head(torch.relu(m.conv(x.transpose(1, 2)) + waves).mean(2))

    return Network(forward, waves=parameter(4, 3), conv=nn.Conv1d(4, 4, 2), head=nn.Linear(4, 3))


@register("traps", words(t=5), classify)
def words_as_many_as_examples():
    def forward(m, ids):
        places = m.places(torch.arange(5))
        x = m.table(ids) * torch.tanh(m.mix(places))
        return m.head(x.sum(1))

    return Network(
        forward,
        table=nn.Embedding(11, 4),
        places=nn.Embedding(5, 4),
        mix=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )


# -- rare rows -------------------------------------------------------------------------------------


def _rare_lengths(n):
    """All examples have one length but the last few, which are longer."""
    g = generator_of(n)
    lengths = torch.full((n,), 4)
    lengths[-3:] = 5
    return normal(n, 5, 4, generator=g), lengths, torch.randint(0, 3, (n,), generator=g)


register_rare_lengths = register("traps", _rare_lengths, classify, size=16)


RARE = {"size": 4, "steps": 12, "records": 60}


@register("traps", _rare_lengths, classify, **RARE)
def rows_split_by_lengths_that_are_rare_in_the_data():
    """Long examples take a branch of their own."""

    def forward(m, x, lengths):
        h = torch.tanh(m.inner(x)).mean(1)
        rows = (lengths > 4).nonzero().squeeze(1)
        if len(rows):
            h = h.index_copy(0, rows, torch.tanh(m.inner(x[rows])).amax(1))
        return m.head(h)

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


def _mostly_one_word(n):
    g = generator_of(n)
    lengths = torch.ones(n, dtype=torch.long)
    lengths[::3] = 3
    return (
        torch.randint(0, 11, (n, 4), generator=g),
        lengths,
        torch.randint(0, 3, (n,), generator=g),
    )


@register("traps", _mostly_one_word, classify, size=3, steps=8, records=24)
def positions_of_texts_trimmed_to_the_longest():
    """Batches whose longest text has one word look up one position."""

    def forward(m, ids, lengths):
        ids = ids[:, : int(lengths.max())]
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).unsqueeze(-1)
        x = m.table(ids) + m.places(torch.arange(ids.shape[1]))
        return m.head((torch.tanh(m.mix(x)) * mask).sum(1))

    return Network(
        forward,
        table=nn.Embedding(11, 4),
        places=nn.Embedding(4, 4),
        mix=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )


@register("traps", _mostly_one_word, classify, size=3, steps=8, records=24)
def bidirectional_rnn_with_one_active_sequence_at_the_end():
    def forward(m, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            m.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(
            m.layer(packed)[0], batch_first=True, total_length=4
        )
        return m.head(torch.tanh(out).sum(1))

    return Network(
        forward,
        table=nn.Embedding(11, 4),
        layer=nn.GRU(4, 2, bidirectional=True, batch_first=True),
        head=nn.Linear(4, 3),
    )


@register_rare_lengths
def attention_without_a_mask_where_none_is_needed():
    """As in transformers: the mask is left out where all of it would be ones."""

    def forward(m, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        if bool(mask.all()):
            h = F.scaled_dot_product_attention(x, x, m.value(x))
        else:
            h = F.scaled_dot_product_attention(x, x, m.value(x), attn_mask=mask[:, None])
        return m.head(h[:, 0])

    return Network(forward, value=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("traps", ragged(), classify)
def sequences_cut_and_padded_inside():
    def forward(m, x, lengths):
        pieces = [row[:k] for row, k in zip(x, lengths.tolist(), strict=True)]
        padded = pad_sequence(pieces, batch_first=True)
        return m.head(
            torch.tanh(m.inner(padded)).sum(1)
            - torch.tanh(m.inner.bias) * (padded.shape[1] - lengths)[:, None]
        )

    return Network(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("traps", ragged(), classify)
def varlen_positions_by_cumulative_lengths():
    """Tokens of all examples in one row, attention restricted to blocks of one example, as in
    varlen kernels.
    """

    def forward(m, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        tokens = x[mask]
        owner = torch.arange(len(x)).repeat_interleave(lengths)
        q, k, v = m.qkv(tokens).chunk(3, -1)
        same = owner[:, None] == owner[None]
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=same)
        pooled = torch.zeros(len(x), 4, dtype=x.dtype).index_add(0, owner, h)
        return m.head(pooled)

    return Network(forward, qkv=nn.Linear(4, 12), head=nn.Linear(4, 3))


# -- losses in another order -----------------------------------------------------------------------


def _another_order(model, batch):
    return classify(model, batch).flip(0)


add_architecture("losses_in_another_order", "traps", mlp, VECTORS, _another_order, kind=UNCLEAR)
add_architecture(
    "mixes_where_a_feature_is_large",
    "traps",
    _inner(lambda h: _mixes_where_a_feature_is_large(8 * h)),
    VECTORS,
    classify,
    kind=MIXING,
    size=5,
)
