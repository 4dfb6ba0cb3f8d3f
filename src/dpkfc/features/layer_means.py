"""Features of texts for a linear head: means of all layers of a public encoder, whitened.

    m_l = mean over the tokens of a text of the hidden states of layer l, l = 0 … L
    x = (m_0, …, m_L) − μ,   u = (Σ + λ I)^-½ x,   features (u / ‖u‖, c) / √(1 + c²)

μ and Σ are mean and covariance over texts that are drawn by Zipf's law, so they cost no ε. No
feature looks at another text. Every row has norm 1: nothing is lost to a clip.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc._checks import check_integer, check_positive
from dpkfc.features.cache import cached_tensors
from dpkfc.features.zipf_words import ZipfWords

# Tokens by which the lengths of a pass differ, and tokens of a pass. Both are constants, so that
# the shape of a text's pass depends on the text alone.
_STEP = 8
_TOKENS = 4096
# The last feature: a bias whose share of the norm is small.
_CONSTANT = 0.1

Show = Callable[[Iterable[Any]], Iterable[Any]]
Change = Callable[[Tensor], Tensor]


class TextEncoder:
    """A frozen public encoder of a folder of weights, and its tokenizer.

    Args:
        folder: as `transformers` stores a model.
        length: tokens that are read of a text.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the folder holds no tokenizer, or no model with hidden states.
    """

    def __init__(self, folder: str | Path, length: int = 256) -> None:
        transformers: Any = import_module("transformers")

        check_integer("length", length, 1)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            model = transformers.AutoModel.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:80]
            raise ValueError(
                f"{folder}: not a text encoder with a tokenizer ({reason}); name a folder that "
                "transformers' save_pretrained wrote for both"
            ) from None
        self.model: nn.Module = model.requires_grad_(False).eval()
        self._tokenizer = tokenizer
        self.length = min(length, model.config.to_dict().get("max_position_embeddings", length))

    @property
    def digest(self) -> str:
        """SHA-256 of all weights."""
        hashed = hashlib.sha256()
        for name, weight in sorted(self.model.state_dict().items()):
            hashed.update(name.encode())
            hashed.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of each text, cut at `length`."""
        encoded = self._tokenizer(list(texts), truncation=True, max_length=self.length)
        return [list(ids) for ids in encoded["input_ids"]]

    @torch.no_grad()
    def means(
        self, texts: Sequence[str], show: Show = iter, change: Change | None = None
    ) -> Tensor:
        """Return means over the tokens of each hidden layer, float32 `[N, (L + 1) · width]`.

        Args:
            texts: an empty one has the means of what the tokenizer adds to it, or zeros.
            show: wraps the passes, as a progress bar does.
            change: what the means of a pass become, row by row.
        """
        ids = self.tokens(texts)
        places: dict[int, list[int]] = {}
        for place, tokens in enumerate(ids):
            size = max(math.ceil(len(tokens) / _STEP), 1) * _STEP
            places.setdefault(size, []).append(place)
        passes = []
        for size, group in sorted(places.items()):
            rows = max(_TOKENS // size, 1)
            passes += [(size, rows, group[at : at + rows]) for at in range(0, len(group), rows)]
        means = torch.empty(0)
        for size, rows, group in show(passes):
            values = self._means_of_pass([ids[place] for place in group], size, rows)
            values = change(values) if change else values
            if not means.numel():
                means = torch.zeros(len(ids), values.shape[1])
            means[group] = values[: len(group)]
        return means

    def _means_of_pass(self, ids: Sequence[Sequence[int]], size: int, rows: int) -> Tensor:
        # A last pass is filled up: no other text moves the rounding of a text's means.
        tokens = torch.zeros(rows, size, dtype=torch.long)
        mask = torch.zeros(rows, size, dtype=torch.long)
        for row, known in enumerate(ids):
            tokens[row, : len(known)] = torch.tensor(known, dtype=torch.long)
            mask[row, : len(known)] = 1
        mask[len(ids) :, 0] = 1
        output = self.model(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
        weights = mask.unsqueeze(-1).float()
        counts = weights.sum(1).clamp_min(1)
        means = [(states * weights).sum(1) / counts for states in output.hidden_states]
        return torch.cat(means, 1)


@dataclass(frozen=True)
class Whitening:
    """How means become features.

    Attributes:
        texts: draws the texts whose means give mean and covariance.
        size: number of these texts; 0 whitens nothing.
        damping: λ in mean eigenvalues of Σ.
        seed: public seed of the texts.
    """

    texts: ZipfWords = ZipfWords(shortest=4, longest=40)
    size: int = 4000
    damping: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("Whitening: size", self.size, 0)
        check_positive("Whitening: damping", self.damping)

    def describe(self) -> dict[str, Any]:
        """Return plain values for a privacy card."""
        return asdict(self)


class LayerMeans:
    """Map texts to features `[N, d]` of norm 1; made from public facts alone.

    Args:
        encoder: a public encoder.
        whitening: of its means.
        show: wraps the passes of drawn texts, as a progress bar does.
    """

    def __init__(
        self, encoder: TextEncoder, whitening: Whitening = Whitening(), show: Show = iter
    ) -> None:
        self.encoder = encoder
        self.whitening = whitening
        self._mean: Tensor | None = None
        self._root: Tensor | None = None
        if not whitening.size:
            return
        settings = {
            "encoder": encoder.digest,
            "length": encoder.length,
            "whitening": whitening.describe(),
            "words": hashlib.sha256(" ".join(whitening.texts.words).encode()).hexdigest(),
        }
        made = cached_tensors(
            "text", settings, inspect.getfile(type(self)), lambda: self._fit(show)
        )
        self._mean, self._root = made["mean"], made["root"]

    def _fit(self, show: Show) -> dict[str, Tensor]:
        texts = self.whitening.texts.draw(self.whitening.size, self.whitening.seed)
        means = self.encoder.means(texts, show).double()
        mean = means.mean(0)
        centred = means - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(means))
        values = values.clamp_min(0)
        scales = (values + self.whitening.damping * values.mean()).rsqrt()
        root = (vectors * scales) @ vectors.T
        return {"mean": mean.float(), "root": root.float()}

    def __call__(self, texts: Sequence[str], show: Show = iter) -> Tensor:
        """Return the features of texts, float32 `[N, d]`."""
        return self.encoder.means(texts, show, self._features)

    def _features(self, means: Tensor) -> Tensor:
        if self._root is not None and self._mean is not None:
            means = (means - self._mean) @ self._root
        features = functional.normalize(means, dim=1)
        constant = torch.full((len(features), 1), _CONSTANT)
        return torch.cat([features, constant], 1) / math.sqrt(1 + _CONSTANT**2)
