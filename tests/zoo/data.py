"""Augmentations and collate functions, which keep rows apart or mix them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from tests.zoo.registry import (
    MIXING,
    SOUND,
    UNCLEAR,
    Network,
    add_architecture,
    classify,
    mlp,
    ragged,
    stack_rows,
    tensors,
    vectors,
)

VECTORS = vectors()
IMAGES = tensors((1, 4, 4))


def _cnn():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


# -- augmentations ---------------------------------------------------------------------------------


def _augmented(name, kind, change, *, build=mlp, batch=VECTORS, size=5, is_random=False):
    """Register a model whose inputs go through a function of the batch."""
    name = f"mixes_augment_{name}" if kind == MIXING else f"augment_{name}"
    size_or_none = size if kind == MIXING else None
    add_architecture(
        name,
        "augmentations",
        build,
        batch,
        classify,
        kind=kind,
        size=size_or_none,
        is_random=is_random,
        augment=lambda rows: (change(rows[0]), rows[1]),
    )


def _flipped_by_row(x):
    chosen = torch.rand(len(x), 1, 1, 1) < 0.5
    return torch.where(chosen, x.flip(-1), x)


def _cropped_by_row(x):
    padded = F.pad(x, (1, 1, 1, 1))
    places = torch.randint(0, 3, (len(x), 2)).tolist()
    return torch.stack(
        [row[:, i : i + 4, j : j + 4] for row, (i, j) in zip(padded, places, strict=True)]
    )


_augmented("scaled", SOUND, lambda x: 2 * x + 1)
_augmented("flipped", SOUND, lambda x: x.flip(-1), build=_cnn, batch=IMAGES)
_augmented(
    "standardised_within_a_row",
    SOUND,
    lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
)
_augmented("noisy", SOUND, lambda x: x + 0.1 * torch.randn_like(x), is_random=True)
_augmented("flipped_at_random", SOUND, _flipped_by_row, build=_cnn, batch=IMAGES, is_random=True)
_augmented("cropped_at_random", SOUND, _cropped_by_row, build=_cnn, batch=IMAGES, is_random=True)
_augmented(
    "one_random_number_for_all_rows",
    UNCLEAR,
    lambda x: x * (1 + 0.1 * torch.rand((), dtype=x.dtype)),
    is_random=True,
)
_augmented("random_partners", MIXING, lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))])
_augmented(
    "standardised_over_the_batch",
    MIXING,
    lambda x: (x - x.mean(0)) / (x.std(0, correction=0) + 0.1),
)
_augmented(
    "rows_beyond_the_eighth",
    MIXING,
    lambda x: torch.cat([x[:8], x[8:] + x[: len(x[8:])]]) if len(x) > 8 else x,
    size=12,
)
_augmented("sign_follows_the_size", MIXING, lambda x: -x if len(x) >= 40 else x, size=48)
_augmented(
    "patches_of_other_images",
    MIXING,
    lambda x: torch.cat([x[..., :2], x.roll(1, 0)[..., 2:]], -1),
    build=_cnn,
    batch=IMAGES,
)


def _labels_of_the_first_half(rows):
    x, y = rows
    n = len(y) // 2
    return x, torch.cat([y[:n], (y[n : 2 * n] + y[:n]) % 3, y[2 * n :]])


add_architecture(
    "mixes_augment_labels_of_the_first_half",
    "augmentations",
    mlp,
    VECTORS,
    classify,
    kind=MIXING,
    size=5,
    augment=_labels_of_the_first_half,
)


# -- collate functions -----------------------------------------------------------------------------


def _collated(name, kind, collate, *, build=mlp, batch=VECTORS, loss_fn=classify, size=5):
    """Register a model whose batches are made by a collate function of its own."""
    name = f"mixes_collate_{name}" if kind == MIXING else f"collate_{name}"
    add_architecture(
        name,
        "collate",
        build,
        batch,
        loss_fn,
        kind=kind,
        size=size if kind == MIXING else None,
        collate=collate,
    )


def _changed(change):
    def collate(rows):
        x, y = stack_rows(rows)
        return change(x), y

    return collate


def _cut(rows):
    return [(x[:length], label) for x, length, label in rows]


def _padded_with_mask(rows):
    cut = _cut(rows)
    x = pad_sequence([x for x, _ in cut], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in cut])
    return x, torch.arange(x.shape[1]) < lengths[:, None], torch.stack([y for _, y in cut])


def _padded_sequence_first(rows):
    cut = _cut(rows)
    x = pad_sequence([x for x, _ in cut])
    lengths = torch.tensor([len(x) for x, _ in cut])
    return x, (torch.arange(x.shape[0]) < lengths[:, None]).T, torch.stack([y for _, y in cut])


def _padded_without_mask(rows):
    cut = _cut(rows)
    return pad_sequence([x for x, _ in cut], batch_first=True), torch.stack([y for _, y in cut])


def _sorted_by_length(rows):
    return _padded_with_mask(sorted(rows, key=lambda row: -int(row[1])))


def _joined_with_offsets(rows):
    """All sequences in one row, with the place where each begins."""
    cut = _cut(rows)
    lengths = torch.tensor([len(x) for x, _ in cut])
    owner = torch.arange(len(cut)).repeat_interleave(lengths)
    return torch.cat([x for x, _ in cut]), owner, torch.stack([y for _, y in cut])


def _with_positions(rows):
    x, y = stack_rows(rows)
    return x, torch.linspace(0, 1, 4, dtype=x.dtype), y


def _masked_mean():
    def forward(m, x, mask):
        h = torch.tanh(m.inner(x)) * mask.unsqueeze(-1)
        return m.head(h.sum(1) / mask.sum(1, keepdim=True))

    return Network(forward, inner=nn.Linear(4, 5), head=nn.Linear(5, 3))


def _masked_mean_sequence_first():
    def forward(m, x, mask):
        h = torch.tanh(m.inner(x)) * mask.unsqueeze(-1)
        return m.head(h.sum(0) / mask.sum(0).unsqueeze(-1))

    return Network(forward, inner=nn.Linear(4, 5), head=nn.Linear(5, 3))


def _mean_with_padding():
    return Network(
        lambda m, x: m.head(torch.tanh(m.inner(x)).mean(1)),
        inner=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    )


def _pooled_by_owner(model, batch):
    x, owner, y = batch
    h = torch.tanh(model.inner(x))
    pooled = torch.zeros(len(y), 5, dtype=x.dtype).index_add(0, owner, h)
    return F.cross_entropy(model.head(pooled), y, reduction="none")


def _parts():
    return Network(lambda m, x: m.head(m.inner(x)), inner=nn.Linear(4, 5), head=nn.Linear(5, 3))


def _positioned():
    def forward(m, x, positions):
        return m.head(torch.tanh(m.inner(x) + m.places(positions)))

    return Network(forward, inner=nn.Linear(4, 4), places=nn.Linear(4, 4), head=nn.Linear(4, 3))


_collated("default", SOUND, default_collate)
_collated("scaled", SOUND, _changed(lambda x: 2 * x + 1))
_collated("padded_with_a_mask", SOUND, _padded_with_mask, build=_masked_mean, batch=ragged())
_collated(
    "padded_sequence_first",
    SOUND,
    _padded_sequence_first,
    build=_masked_mean_sequence_first,
    batch=ragged(),
)
_collated("sorted_by_length", UNCLEAR, _sorted_by_length, build=_masked_mean, batch=ragged())
_collated(
    "joined_with_owners",
    SOUND,
    _joined_with_offsets,
    build=_parts,
    batch=ragged(),
    loss_fn=_pooled_by_owner,
)
_collated("with_public_positions", SOUND, _with_positions, build=_positioned)
_collated(
    "padded_without_a_mask", MIXING, _padded_without_mask, build=_mean_with_padding, batch=ragged()
)
_collated("standardised_over_the_batch", MIXING, _changed(lambda x: x - x.mean(0)))
_collated("rows_in_another_order_than_labels", MIXING, _changed(lambda x: x.flip(0)))
