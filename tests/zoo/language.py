"""Language models written by hand: embeddings, tying, prompts, flattening and language losses."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.attention import Attention
from tests.zoo.registry import (
    Network,
    classify,
    generator_of,
    next_token,
    register,
    texts,
    words,
)

TEXT = texts()
WORDS = words()


class Block(nn.Module):
    """One pre-norm block of attention and a perceptron."""

    def __init__(self, d=4, *, causal=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, causal=causal)
        self.up, self.down = nn.Linear(d, 6), nn.Linear(6, d)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


register_language_model = register("language", TEXT, next_token)


@register_language_model
def nano_gpt_tied_by_product():
    def forward(m, ids):
        x = m.wte(ids) + m.wpe(torch.arange(ids.shape[1]))[None]
        return m.block(x) @ m.wte.weight.T

    return Network(forward, wte=nn.Embedding(11, 4), wpe=nn.Embedding(8, 4), block=Block())


class ScaledEmbedding(nn.Embedding):
    """An embedding that multiplies what it returns, as those of Gemma and BART do."""

    def forward(self, ids):
        return super().forward(ids) * self.embedding_dim**0.5


@register_language_model
def gemma_like_scaled_embedding_tied():
    def forward(m, ids):
        return m.head(m.block(m.wte(ids)))

    model = Network(
        forward, wte=ScaledEmbedding(11, 4), block=Block(), head=nn.Linear(4, 11, bias=False)
    )
    model.head.weight = model.wte.weight
    return model


register_classifier = register("language", WORDS, classify)


@register_classifier
def bag_of_words_weighted():
    def forward(m, ids):
        weights = torch.sigmoid(m.importance(ids)).squeeze(-1)
        return m.head(m.bag(ids, per_sample_weights=weights))

    return Network(
        forward,
        bag=nn.EmbeddingBag(11, 4, mode="sum"),
        importance=nn.Embedding(11, 1),
        head=nn.Linear(4, 3),
    )


@register_classifier
def bag_of_words_with_public_weights():
    """The weights of the positions have a row for each example of the batch."""

    def forward(m, ids):
        weights = torch.linspace(0.5, 1, ids.shape[1], dtype=torch.float64).expand(ids.shape)
        return m.head(m.bag(ids, per_sample_weights=weights))

    return Network(forward, bag=nn.EmbeddingBag(11, 4, mode="sum"), head=nn.Linear(4, 3))


@register_classifier
def sparse_embedding():
    def forward(m, ids):
        return m.head(m.wte(ids).mean(1))

    return Network(forward, wte=nn.Embedding(11, 4, sparse=True), head=nn.Linear(4, 3))


# -- several rows an example -----------------------------------------------------------------------


def _choices(n):
    g = generator_of(n)
    return torch.randint(0, 11, (n, 3, 4), generator=g), torch.randint(0, 3, (n,), generator=g)


register_choices = register("folded", _choices, classify)


@register_choices
def multiple_choice_folded():
    def forward(m, ids):
        x = m.wte(ids.view(-1, ids.shape[-1]))
        scores = m.score(m.block(x)[:, 0])
        return scores.view(-1, ids.shape[1])

    return Network(
        forward, wte=nn.Embedding(11, 4), block=Block(causal=False), score=nn.Linear(4, 1)
    )


@register_choices
def hierarchical_documents():
    def forward(m, ids):
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


def _pairs(n):
    g = generator_of(n)
    a, b = torch.randint(0, 11, (n, 4), generator=g), torch.randint(0, 11, (n, 4), generator=g)
    return a, b, torch.randint(0, 3, (n,), generator=g)


@register("folded", _pairs, classify)
def siamese_towers_by_cat_and_chunk():
    def forward(m, a, b):
        both = torch.cat([a, b], dim=0)
        u, v = torch.tanh(m.tower(m.wte(both).mean(1))).chunk(2, dim=0)
        return m.head(torch.cat([u, v, (u - v).abs()], 1))

    return Network(forward, wte=nn.Embedding(11, 4), tower=nn.Linear(4, 4), head=nn.Linear(12, 3))
