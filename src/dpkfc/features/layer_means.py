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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpkfc._checks import check_integer, check_positive
from dpkfc.features.cache import cached_tensors
from dpkfc.features.text_encoder import Show, TextEncoder
from dpkfc.features.zipf_words import ZipfWords

# The last feature: a bias whose share of the norm is small.
_CONSTANT = 0.1


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
            "text", settings, [inspect.getfile(type(self))], lambda: self._fit(show)
        )
        self._mean, self._root = made["mean"], made["root"]

    def _fit(self, show: Show) -> dict[str, Tensor]:
        texts = self.whitening.texts.draw(self.whitening.size, self.whitening.seed)
        mean, root = fit_whitening(self.encoder.means(texts, show), self.whitening.damping)
        return {"mean": mean, "root": root}

    def __call__(self, texts: Sequence[str], show: Show = iter) -> Tensor:
        """Return the features of texts, float32 `[N, d]`."""
        return self.encoder.means(texts, show, self.whiten)

    def whiten(self, means: Tensor) -> Tensor:
        """Return the features `[N, d]` of means of the encoder's layers."""
        return scale_means(means, self._mean, self._root)


def fit_whitening(means: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return mean `[D]` and damped root `[D, D]` of the inverse covariance.

    Args:
        means: of public texts `[N, D]`.
        damping: λ in mean eigenvalues of the covariance.
    """
    values = means.double()
    mean = values.mean(0)
    centred = values - mean
    scales, vectors = torch.linalg.eigh(centred.T @ centred / len(values))
    scales = scales.clamp_min(0)
    root = (vectors * (scales + damping * scales.mean()).rsqrt()) @ vectors.T
    return mean.float(), root.float()


def scale_means(means: Tensor, mean: Tensor | None, root: Tensor | None) -> Tensor:
    """Return rows of norm 1 with a constant, `[N, D + 1]`, whitened where a root is given."""
    if root is not None and mean is not None:
        means = (means - mean) @ root
    features = functional.normalize(means, dim=1)
    constant = torch.full((len(features), 1), _CONSTANT)
    return torch.cat([features, constant], 1) / math.sqrt(1 + _CONSTANT**2)
