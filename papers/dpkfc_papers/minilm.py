"""MiniLM-L6 as a classifier of sentences: its token ids, and the network with a linear head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpkfc.app.pretrained import find_minilm, import_transformers
from dpkfc.features.text_encoder import hide_loading_bar


class SentenceClassifier(nn.Module):
    """Mean of the encoder's token vectors, then a linear map to classes.

    Args:
        encoder: a Hugging Face encoder of token ids, of which 0 pads a sentence and is masked.
        width: of its vectors.
        classes: number of labels.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits `[N, classes]` of token ids `[N, T]`."""
        mask = (ids != 0).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        total = (states * weights).sum(1)
        count = weights.sum(1).clamp(min=1)
        return self.head(total / count)


def minilm_classifier(classes: int = 2, trained_blocks: int = 1) -> SentenceClassifier:
    """Build MiniLM-L6 (six blocks of width 384) without dropout, with a new head.

    Args:
        classes: number of labels.
        trained_blocks: how many of the last blocks are trained next to the head; all before them is
            frozen. Noise grows with the number of trained parameters, so few are better where steps
            are few.

    Raises:
        DatasetError: the packages that carry it are missing; the message says how to get them.
    """
    folder = find_minilm()
    transformers = import_transformers()
    with hide_loading_bar(transformers):
        encoder = transformers.BertModel.from_pretrained(
            folder,
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    encoder.requires_grad_(False)
    blocks = encoder.encoder.layer
    for block in blocks[len(blocks) - trained_blocks :]:
        block.requires_grad_(True)
    return SentenceClassifier(encoder, encoder.config.hidden_size, classes)


def minilm_tokens(texts: Sequence[str], length: int) -> Tensor:
    """Return token ids `[N, length]` by the encoder's own public vocabulary, cut or padded.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    folder = find_minilm()
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        list(texts),
        truncation=True,
        padding="max_length",
        max_length=length,
        return_tensors="np",
    )
    return torch.from_numpy(encoded["input_ids"]).long()
