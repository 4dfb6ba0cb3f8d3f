"""Language models written by hand: embeddings, tying, prompts, flattening and language losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.attention import Attention
from tests.zoo.registry import (
    Batch,
    Network,
    classify,
    generator_of,
    next_token,
    parameter,
    register,
    texts,
    words,
)

TEXT = texts()
WORDS = words()


class Block(nn.Module):
    """One pre-norm block of attention and a perceptron."""

    def __init__(self, d: int = 4, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, causal=causal)
        self.up, self.down = nn.Linear(d, 6), nn.Linear(6, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@register("language", TEXT, next_token)
def gpt_with_positions_by_arange() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids) + m.wpe(torch.arange(ids.shape[1]))
        return m.head(m.block(x))

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        wpe=nn.Embedding(8, 4),
        block=Block(),
        head=nn.Linear(4, 11, bias=False),
    )


@register("language", texts(t=1), next_token)
def gpt_on_texts_of_length_one() -> nn.Module:
    return gpt_with_positions_by_arange()


@register("language", TEXT, next_token)
def nano_gpt_tied_by_product() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids) + m.wpe(torch.arange(ids.shape[1]))[None]
        return m.block(x) @ m.wte.weight.T

    return Network(forward, wte=nn.Embedding(11, 4), wpe=nn.Embedding(8, 4), block=Block())


@register("language", TEXT, next_token)
def gpt_tied_by_parameter() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return m.head(m.block(m.wte(ids) + m.wpe[: ids.shape[1]]))

    model = Network(
        forward,
        wte=nn.Embedding(11, 4),
        wpe=parameter(8, 4),
        block=Block(),
        head=nn.Linear(4, 11, bias=False),
    )
    model.head.weight = model.wte.weight
    return model


class ScaledEmbedding(nn.Embedding):
    """An embedding that multiplies what it returns, as those of Gemma and BART do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


@register("language", TEXT, next_token)
def gemma_like_scaled_embedding_tied() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return m.head(m.block(m.wte(ids)))

    model = Network(
        forward, wte=ScaledEmbedding(11, 4), block=Block(), head=nn.Linear(4, 11, bias=False)
    )
    model.head.weight = model.wte.weight
    return model


class LearnedPositions(nn.Embedding):
    """Positions with an offset, computed from the shape of the ids, as in BART."""

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        return super().forward(places + 2)


@register("language", TEXT, next_token)
def bart_like_positions_and_tied_embedding() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.norm(m.wte(ids) + m.positions(ids))
        return F.linear(m.block(x), m.wte.weight, m.bias)

    return Network(
        forward,
        wte=ScaledEmbedding(11, 4),
        positions=LearnedPositions(10, 4),
        norm=nn.LayerNorm(4),
        block=Block(),
        bias=parameter(1, 11),
    )


@register("language", TEXT, next_token)
def opt_like_flattened_perceptron() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids)
        x = x + m.attention(m.norm1(x))
        shape = x.shape
        x = x.reshape(-1, x.size(-1))
        r = m.down(F.relu(m.up(m.norm2(x))))
        x = (x + r).view(shape)
        return m.head(x)

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        norm1=nn.LayerNorm(4),
        attention=Attention(causal=True),
        norm2=nn.LayerNorm(4),
        up=nn.Linear(4, 6),
        down=nn.Linear(6, 4),
        head=nn.Linear(4, 11),
    )


@register("language", TEXT, next_token)
def sequence_first_throughout() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        ids = ids.t()
        x = m.wte(ids) + m.wpe(torch.arange(ids.shape[0])).unsqueeze(1)
        x = x + m.mlp(m.norm(x))
        x = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None]
        return m.head(x).transpose(0, 1)

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        wpe=nn.Embedding(8, 4),
        norm=nn.LayerNorm(4),
        mlp=nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)),
        head=nn.Linear(4, 11),
    )


@register("language", TEXT, next_token)
def albert_like_one_block_thrice() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.widen(m.wte(ids))
        for _ in range(3):
            x = m.block(x)
        return F.linear(m.narrow(x), m.wte.weight)

    return Network(
        forward,
        wte=nn.Embedding(11, 2),
        widen=nn.Linear(2, 4),
        block=Block(),
        narrow=nn.Linear(4, 2),
    )


@register("language", WORDS, classify)
def prompt_tuning() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        n = ids.shape[0]
        prompt = m.prompt(torch.arange(2).unsqueeze(0).expand(n, -1))
        x = torch.cat([prompt, m.wte(ids)], dim=1)
        return m.head(m.block(x)[:, -1])

    model = Network(
        forward,
        wte=nn.Embedding(11, 4),
        prompt=nn.Embedding(2, 4),
        block=Block(),
        head=nn.Linear(4, 3),
    )
    model.wte.requires_grad_(False)
    model.block.requires_grad_(False)
    return model


@register("language", WORDS, classify)
def p_tuning_prefix_by_perceptron() -> nn.Module:
    """Virtual tokens go through an embedding and a perceptron before they are repeated."""

    def forward(m: Network, ids: Tensor) -> Tensor:
        prompt = m.encode(m.prompt(torch.arange(2)))
        x = torch.cat([prompt.unsqueeze(0).repeat(ids.shape[0], 1, 1), m.wte(ids)], dim=1)
        return m.head(m.block(x).mean(1))

    model = Network(
        forward,
        wte=nn.Embedding(11, 4),
        prompt=nn.Embedding(2, 4),
        encode=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)),
        block=Block(),
        head=nn.Linear(4, 3),
    )
    model.wte.requires_grad_(False)
    model.block.requires_grad_(False)
    return model


@register("language", WORDS, classify)
def p_tuning_prefix_by_lstm() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        prompt, _ = m.encode(m.prompt.weight.unsqueeze(0))
        x = torch.cat([prompt.expand(ids.shape[0], -1, -1), m.wte(ids)], dim=1)
        return m.head(m.block(x).mean(1))

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        prompt=nn.Embedding(2, 4),
        encode=nn.LSTM(4, 2, bidirectional=True, batch_first=True),
        block=Block(),
        head=nn.Linear(4, 3),
    )


@register("language", WORDS, classify)
def prefix_tuning_of_keys_and_values() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        n = ids.shape[0]
        x = m.wte(ids)
        q, k, v = m.qkv(x).chunk(3, -1)
        past = m.project(m.prefix(torch.arange(2).expand(n, -1)))
        pk, pv = past.chunk(2, -1)
        k, v = torch.cat([pk, k], 1), torch.cat([pv, v], 1)
        return m.head(((q @ k.mT).softmax(-1) @ v).mean(1))

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        qkv=nn.Linear(4, 12),
        prefix=nn.Embedding(2, 4),
        project=nn.Linear(4, 8),
        head=nn.Linear(4, 3),
    )


@register("language", WORDS, classify)
def token_types_from_zeros() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        types = torch.zeros_like(ids)
        x = m.wte(ids) + m.types(types) + m.wpe(m.places[:, : ids.shape[1]])
        return m.head(torch.tanh(m.pool(m.block(m.norm(x))[:, 0])))

    places = torch.arange(8).unsqueeze(0)
    return Network(
        forward,
        {"places": places},
        wte=nn.Embedding(11, 4, padding_idx=0),
        types=nn.Embedding(2, 4),
        wpe=nn.Embedding(8, 4),
        norm=nn.LayerNorm(4),
        block=Block(causal=False),
        pool=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )


@register("language", WORDS, classify)
def types_of_shape_one() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids) + m.types(torch.zeros(1, 1, dtype=torch.long))
        return m.head(m.block(x).mean(1))

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        types=nn.Embedding(2, 4),
        block=Block(),
        head=nn.Linear(4, 3),
    )


@register("language", WORDS, classify)
def positions_from_the_mask_as_in_roberta() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        mask = ids.ne(0).long()
        places = mask.cumsum(1) * mask
        x = m.wte(ids) + m.wpe(places)
        bias = (1.0 - mask[:, None, None].to(x)) * -1e9
        q, k, v = (z.unflatten(-1, (2, 2)).transpose(1, 2) for z in m.qkv(x).chunk(3, -1))
        h = (q @ k.mT + bias).softmax(-1) @ v
        return m.head(h.transpose(1, 2).flatten(2)[:, 0])

    return Network(
        forward,
        wte=nn.Embedding(11, 4, padding_idx=0),
        wpe=nn.Embedding(9, 4, padding_idx=0),
        qkv=nn.Linear(4, 12),
        head=nn.Linear(4, 3),
    )


@register("language", WORDS, classify)
def mean_over_true_tokens() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        mask = (ids > 2).unsqueeze(-1)
        x = m.wte(ids) * mask
        return m.head(x.sum(1) / mask.sum(1).clamp(min=1))

    return Network(forward, wte=nn.Embedding(11, 4), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def bag_of_words_module() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return m.head(torch.tanh(m.bag(ids)))

    return Network(forward, bag=nn.EmbeddingBag(11, 4), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def bag_of_words_with_offsets() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        offsets = torch.arange(0, ids.numel(), ids.shape[1])
        return m.head(m.bag(ids.flatten(), offsets))

    return Network(forward, bag=nn.EmbeddingBag(11, 4, mode="sum"), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def bag_of_words_maximum() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(11, 4, mode="max"), nn.Linear(4, 3))


@register("language", WORDS, classify)
def bag_of_words_weighted() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        weights = torch.sigmoid(m.importance(ids)).squeeze(-1)
        return m.head(m.bag(ids, per_sample_weights=weights))

    return Network(
        forward,
        bag=nn.EmbeddingBag(11, 4, mode="sum"),
        importance=nn.Embedding(11, 1),
        head=nn.Linear(4, 3),
    )


@register("language", WORDS, classify)
def bag_of_words_with_public_weights() -> nn.Module:
    """The weights of the positions have a row for each example of the batch."""

    def forward(m: Network, ids: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 1, ids.shape[1], dtype=torch.float64).expand(ids.shape)
        return m.head(m.bag(ids, per_sample_weights=weights))

    return Network(forward, bag=nn.EmbeddingBag(11, 4, mode="sum"), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def sparse_embedding() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return m.head(m.wte(ids).mean(1))

    return Network(forward, wte=nn.Embedding(11, 4, sparse=True), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def embedding_by_indexing_a_parameter() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return m.head(m.table[ids].mean(1) + m.table.index_select(0, ids[:, 0]))

    return Network(forward, table=parameter(11, 4), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def embedding_by_one_hot_product() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return m.head((F.one_hot(ids, 11).double() @ m.table).sum(1))

    return Network(forward, table=parameter(11, 4), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def partly_frozen_embedding() -> nn.Module:
    """Rows of special tokens are trained, all others are frozen."""

    def forward(m: Network, ids: Tensor) -> Tensor:
        table = torch.cat([m.special, m.frozen])
        return m.head(F.embedding(ids, table).mean(1))

    return Network(
        forward, {"frozen": torch.randn(9, 4)}, special=parameter(2, 4), head=nn.Linear(4, 3)
    )


@register("language", WORDS, classify)
def new_tokens_where_the_old_are_frozen() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        is_new = ids >= 9
        old = m.old(ids.clamp(max=8))
        new = m.new((ids - 9).clamp(min=0))
        return m.head(torch.where(is_new.unsqueeze(-1), new, old).mean(1))

    model = Network(forward, old=nn.Embedding(9, 4), new=nn.Embedding(2, 4), head=nn.Linear(4, 3))
    model.old.requires_grad_(False)
    return model


@register("language", WORDS, classify)
def hashed_embeddings_of_pairs() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        pairs = (ids[:, :-1] * 11 + ids[:, 1:]) % 13
        return m.head(m.pairs(pairs).sum(1))

    return Network(forward, pairs=nn.Embedding(13, 4), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def norm_limited_embedding() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids)
        x = x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)
        return m.head(x.mean(1))

    return Network(forward, wte=nn.Embedding(11, 4), head=nn.Linear(4, 3))


@register("language", WORDS, classify)
def text_convolutions() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids).transpose(1, 2)
        pooled = [F.relu(conv(x)).amax(-1) for conv in m.convolutions]
        return m.head(torch.cat(pooled, 1))

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        convolutions=nn.ModuleList(nn.Conv1d(4, 3, k) for k in (2, 3)),
        head=nn.Linear(6, 3),
    )


# -- several rows an example -----------------------------------------------------------------------


def _choices(n: int) -> Batch:
    g = generator_of(n)
    return torch.randint(0, 11, (n, 3, 4), generator=g), torch.randint(0, 3, (n,), generator=g)


@register("folded", _choices, classify)
def multiple_choice_folded() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        x = m.wte(ids.view(-1, ids.shape[-1]))
        scores = m.score(m.block(x)[:, 0])
        return scores.view(-1, ids.shape[1])

    return Network(
        forward, wte=nn.Embedding(11, 4), block=Block(causal=False), score=nn.Linear(4, 1)
    )


@register("folded", _choices, classify)
def multiple_choice_by_vmap_over_choices() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        return torch.cat([m.score(m.wte(choice).mean(1)) for choice in ids.unbind(1)], dim=1)

    return Network(forward, wte=nn.Embedding(11, 4), score=nn.Linear(4, 1))


@register("folded", _choices, classify)
def hierarchical_documents() -> nn.Module:
    def forward(m: Network, ids: Tensor) -> Tensor:
        n, s, t = ids.shape
        words, _ = m.words(m.wte(ids.reshape(n * s, t)))
        sentences, _ = m.sentences(words[:, -1].reshape(n, s, -1))
        return m.head(sentences[:, -1])

    return Network(
        forward,
        wte=nn.Embedding(11, 4),
        words=nn.GRU(4, 3, batch_first=True),
        sentences=nn.GRU(3, 3, batch_first=True),
        head=nn.Linear(3, 3),
    )


def _pairs(n: int) -> Batch:
    g = generator_of(n)
    a, b = torch.randint(0, 11, (n, 4), generator=g), torch.randint(0, 11, (n, 4), generator=g)
    return a, b, torch.randint(0, 3, (n,), generator=g)


@register("folded", _pairs, classify)
def siamese_towers_by_cat_and_chunk() -> nn.Module:
    def forward(m: Network, a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat([a, b], dim=0)
        u, v = torch.tanh(m.tower(m.wte(both).mean(1))).chunk(2, dim=0)
        return m.head(torch.cat([u, v, (u - v).abs()], 1))

    return Network(forward, wte=nn.Embedding(11, 4), tower=nn.Linear(4, 4), head=nn.Linear(12, 3))


@register("folded", _pairs, classify)
def siamese_towers_by_two_calls() -> nn.Module:
    def forward(m: Network, a: Tensor, b: Tensor) -> Tensor:
        u, v = m.tower(m.wte(a).mean(1)), m.tower(m.wte(b).mean(1))
        return m.head(torch.cat([u * v, u - v], 1))

    return Network(forward, wte=nn.Embedding(11, 4), tower=nn.Linear(4, 4), head=nn.Linear(8, 3))


@register("folded", _pairs, classify)
def siamese_towers_by_stack_and_flatten() -> nn.Module:
    def forward(m: Network, a: Tensor, b: Tensor) -> Tensor:
        both = torch.stack([a, b]).flatten(0, 1)
        u, v = m.tower(m.wte(both).mean(1)).view(2, len(a), -1)
        return m.head(u * v)

    return Network(forward, wte=nn.Embedding(11, 4), tower=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("folded", _pairs, classify)
def siamese_towers_split_by_index() -> nn.Module:
    def forward(m: Network, a: Tensor, b: Tensor) -> Tensor:
        h = torch.tanh(m.tower(m.wte(torch.cat([a, b])).mean(1)))
        return m.head(h[: len(a)] * h[len(a) :])

    return Network(forward, wte=nn.Embedding(11, 4), tower=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register("folded", WORDS, classify)
def two_directions_by_cat() -> nn.Module:
    """A text and its reverse as two rows of one batch, as classifier-free guidance does with two
    conditions.
    """

    def forward(m: Network, ids: Tensor) -> Tensor:
        h = m.block(m.wte(torch.cat([ids, ids.flip(1)], 0)))[:, -1]
        one, two = h.chunk(2)
        return m.head(two + 1.5 * (one - two))

    return Network(forward, wte=nn.Embedding(11, 4), block=Block(), head=nn.Linear(4, 3))
