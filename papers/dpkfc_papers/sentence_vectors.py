"""Vectors of sentences by the frozen public encoder MiniLM-L6."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc_papers.minilm import minilm_classifier, minilm_tokens

# Numbers of a sentence vector.
SENTENCE_WIDTH = 384
_SENTENCES_AT_ONCE = 64


def minilm_vectors(texts: Sequence[str], length: int) -> Tensor:
    """Return vectors `[N, 384]` of norm 1 by the frozen public encoder, each of its text alone.

    Args:
        texts: sentences.
        length: tokens that are read of each.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    # Every pass has one shape, so that no other text moves the rounding of a vector.
    fill = [""] * (-len(texts) % _SENTENCES_AT_ONCE)
    tokens = minilm_tokens([*texts, *fill], length)
    return encode_tokens(tokens)[: len(texts)]


@torch.no_grad()
def encode_tokens(ids: Tensor) -> Tensor:
    """Return vectors `[N, 384]` of norm 1 of token ids `[N, T]` by the frozen public encoder.

    Raises:
        DatasetError: the packages that carry it are missing.
    """
    classifier = minilm_classifier(trained_blocks=0)
    classifier.head = nn.Linear(SENTENCE_WIDTH, SENTENCE_WIDTH, bias=False)
    nn.init.eye_(classifier.head.weight)
    classifier.eval()
    vectors = []
    for chunk in ids.split(_SENTENCES_AT_ONCE):
        outputs = classifier(chunk)
        vectors.append(F.normalize(outputs, dim=1))
    return torch.cat(vectors)
