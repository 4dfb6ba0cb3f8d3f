"""Attention: torch's own modules in both layouts, attention by hand, windows, latents, queries and
relative positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

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

SEQUENCE = tensors((4, 4))
IMAGE = tensors((4, 4, 4))


# -- torch's own modules ---------------------------------------------------------------------------


def _self_attention(batch_first, **options):
    def forward(m, x):
        x = x if batch_first else x.transpose(0, 1)
        out, _ = m.attention(x, x, x, need_weights=options.get("need_weights", False))
        return m.head(out.mean(1 if batch_first else 0))

    more = {name: value for name, value in options.items() if name != "need_weights"}
    return Network(
        forward,
        attention=nn.MultiheadAttention(4, 2, batch_first=batch_first, **more),
        head=nn.Linear(4, 3),
    )


_MULTIHEAD = {
    "with_weights_sequence_first": (False, {"need_weights": True}),
    "bias_kv_batch_first": (True, {"add_bias_kv": True}),
    "zero_attention_sequence_first": (False, {"add_zero_attn": True}),
}
for _name, (_first, _options) in _MULTIHEAD.items():
    add_architecture(
        f"multihead_{_name}",
        "attention",
        lambda f=_first, o=_options: _self_attention(f, **o),
        SEQUENCE,
        classify,
    )


register_attention = register("attention", SEQUENCE, classify)


@register_attention
def multihead_of_other_widths_with_masks_of_heads():
    def forward(m, x):
        mask = m.mask(x).transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, 4, -1)
        out, _ = m.attention(x, x[..., :3], x[..., 1:3], attn_mask=mask)
        return m.head(out.mean(1))

    return Network(
        forward,
        attention=nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
        mask=nn.Linear(4, 2),
        head=nn.Linear(4, 3),
    )


def _encoder(batch_first, norm_first, activation):
    def forward(m, x):
        x = x if batch_first else x.transpose(0, 1)
        return m.head(m.encoder(x).mean(1 if batch_first else 0))

    layer = nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation=activation
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Network(forward, encoder=encoder, head=nn.Linear(4, 3))


add_architecture(
    "encoder_sequence_first",
    "attention",
    lambda: _encoder(False, False, "relu"),
    SEQUENCE,
    classify,
)


@register_attention
def encoder_in_evaluation_mode():
    """Torch's fast path must not be taken under a gradient."""
    return _encoder(True, False, "relu").eval()


@register("attention", ragged(), classify)
def encoder_with_padding_mask_sequence_first():
    def forward(m, x, lengths):
        padded = torch.arange(x.shape[1]) >= lengths[:, None]
        return m.head(m.encoder(x.transpose(0, 1), src_key_padding_mask=padded)[0])

    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)
    return Network(
        forward,
        encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        head=nn.Linear(4, 3),
    )


def _transformer(batch_first):
    def forward(m, ids):
        x = m.embed(ids) + m.positions(torch.arange(ids.shape[1]))
        x = x if batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        out = m.transformer(x, x, src_mask=mask, tgt_mask=mask, memory_mask=mask)
        logits = m.head(out)
        return logits if batch_first else logits.transpose(0, 1)

    transformer = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=batch_first)
    return Network(
        forward,
        embed=nn.Embedding(11, 4),
        positions=nn.Embedding(6, 4),
        transformer=transformer,
        head=nn.Linear(4, 11),
    )


add_architecture(
    "transformer_sequence_first", "attention", lambda: _transformer(False), texts(), next_token
)


# -- attention by hand -----------------------------------------------------------------------------


class Attention(nn.Module):
    """Split heads, attend, merge; `fold` puts heads into the leading axis."""

    def __init__(self, d=4, heads=2, *, fold=False, causal=False):
        super().__init__()
        self.heads, self.fold, self.causal = heads, fold, causal
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.fold:
            q, k, v = (z.reshape(n * self.heads, t, -1) for z in (q, k, v))
            scores = torch.baddbmm(
                torch.zeros(1, 1, 1, dtype=x.dtype), q, k.transpose(1, 2), beta=0, alpha=0.7
            )
        else:
            scores = q @ k.transpose(-1, -2) * 0.7
        if self.causal:
            scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -math.inf)
        h = scores.softmax(-1) @ v
        return self.out(h.view(n, self.heads, t, -1).transpose(1, 2).reshape(n, t, d))


def _attended(attention):
    def forward(m, x):
        return m.head((x + m.attention(x)).mean(1))

    return Network(forward, attention=attention, head=nn.Linear(4, 3))


add_architecture(
    "attention_heads_folded",
    "attention",
    lambda: _attended(Attention(fold=True)),
    SEQUENCE,
    classify,
)


@register_attention
def scaled_dot_product_with_learnt_mask():
    def forward(m, x):
        q, k, v = (z.unflatten(-1, (2, 2)).transpose(1, 2) for z in m.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias)
        return m.head(h.transpose(1, 2).flatten(2).mean(1))

    return Network(forward, qkv=nn.Linear(4, 12), bias=parameter(2, 4, 4), head=nn.Linear(4, 3))


@register_attention
def relative_bias_expanded_to_the_batch():
    """As in MPNet: `[t, t]` positions are expanded to the batch before they are added."""

    def forward(m, x):
        t = torch.arange(x.shape[1])
        bias = m.bias((t[None] - t[:, None]).clamp(-2, 2) + 2).permute(2, 0, 1).unsqueeze(0)
        bias = bias.expand(x.shape[0], -1, -1, -1).contiguous()
        q, k, v = (z.unflatten(-1, (2, 2)).transpose(1, 2) for z in m.qkv(x).chunk(3, -1))
        h = (q @ k.mT + bias).softmax(-1) @ v
        return m.head(h.transpose(1, 2).flatten(2).mean(1))

    return Network(forward, qkv=nn.Linear(4, 12), bias=nn.Embedding(5, 2), head=nn.Linear(4, 3))


@register_attention
def latents_projected_before_they_meet_an_example():
    def forward(m, x):
        q = m.q(m.norm(m.latents))
        k, v = m.kv(x).chunk(2, -1)
        h = torch.einsum("ld,ntd->nlt", q, k).softmax(-1) @ v
        return m.head(h.flatten(1))

    return Network(
        forward,
        latents=parameter(3, 4),
        norm=nn.LayerNorm(4),
        q=nn.Linear(4, 4),
        kv=nn.Linear(4, 8),
        head=nn.Linear(12, 3),
    )


@register_attention
def slot_attention():
    def forward(m, x):
        n = x.shape[0]
        slots = m.slots.expand(n, -1, -1)
        k, v = m.k(x), m.v(x)
        for _ in range(2):
            weights = torch.softmax(k @ m.q(slots).mT, dim=-1)
            weights = weights / weights.sum(1, keepdim=True)
            update = weights.mT @ v
            slots = m.cell(update.reshape(-1, 4), slots.reshape(-1, 4)).view(n, 2, 4)
        return m.head(slots.flatten(1))

    return Network(
        forward,
        slots=parameter(1, 2, 4),
        q=nn.Linear(4, 4),
        k=nn.Linear(4, 4),
        v=nn.Linear(4, 4),
        cell=nn.GRUCell(4, 4),
        head=nn.Linear(8, 3),
    )


# -- vision transformers ---------------------------------------------------------------------------


@register("vision attention", IMAGE, classify)
def vit_positions_interpolated():
    def forward(m, x):
        positions = F.interpolate(m.positions, size=(4, 4), mode="bicubic", align_corners=False)
        h = (m.patches(x) + positions).flatten(2).transpose(1, 2)
        return m.head((h + m.attention(h)).mean(1))

    return Network(
        forward,
        patches=nn.Conv2d(4, 4, 1),
        positions=parameter(1, 4, 2, 2),
        attention=Attention(),
        head=nn.Linear(4, 3),
    )
