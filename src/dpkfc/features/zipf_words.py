"""Synthetic English: independent words by Zipf's law, the frequent ones by their real names.

Which words of a language are frequent is public knowledge, and so is the law by which frequency
falls with rank. A text made of them has the strongest directions of real text (function words, and
pairs of them) and nothing that was ever private.

Source: Zipf's law with Mandelbrot's shift (Mandelbrot 1953).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

# Words of general English in rough order of frequency.
COMMON_WORDS = tuple(
    "the of and to a in is it that was for on with as i he be at by this had not are but from or"
    " have an they which one you were her all she there would their we him been has when who will"
    " more no if out so said what up its about into than them can only other new some could time"
    " these two may then do first any my now such like our over man even most made after also did"
    " many before must through back years where much your way well down should because each just"
    " those people mr how too little state good very make world still own see men work long get"
    " here between both life being under never day same another know while last might us great old"
    " year off come since against go came right used take three states himself few house use during"
    " without again place around however home small found mrs thought went say part once general"
    " high upon school every don't does got united left number course war until always away"
    " something fact though water less public put thing almost hand enough far took head yet"
    " government system better set told nothing night end why called didn't eyes find going look"
    " asked later knew point next city business give film movie story show seen really watch plot"
    " love best bad".split()
)
# Mandelbrot's form of the law is 1 / (rank + 2.7)^s.
_SHIFT = 2.7


@dataclass(frozen=True)
class ZipfWords:
    """Documents of independent words, p ∝ 1 / (rank + 2.7)^exponent.

    Attributes:
        vocabulary: number of words; those after `COMMON_WORDS` are invented names.
        exponent: of the distribution; 0 is uniform.
        shortest, longest: words of a document, drawn uniformly on a logarithmic scale.
    """

    vocabulary: int = 30_000
    exponent: float = 1.0
    shortest: int = 40
    longest: int = 600

    @property
    def frequencies(self) -> np.ndarray:
        """Share of each word in a text, float64 `[vocabulary]`, frequent ones first."""
        shares = (np.arange(1, self.vocabulary + 1) + _SHIFT) ** -self.exponent
        normalised: np.ndarray = shares / shares.sum()
        return normalised

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All words, frequent ones first."""
        invented = [f"w{rank}q" for rank in range(len(COMMON_WORDS), self.vocabulary)]
        return (*COMMON_WORDS, *invented)[: self.vocabulary]

    def ranks(self, n: int, generator: torch.Generator) -> list[np.ndarray]:
        """Return n documents as ranks from 0."""
        ranks = torch.arange(1, self.vocabulary + 1, dtype=torch.float64)
        cumulative = (ranks + _SHIFT).pow(-self.exponent).cumsum(0)
        spread = torch.rand(n, generator=generator, dtype=torch.float64)
        lengths = (self.shortest * (self.longest / self.shortest) ** spread).long().tolist()
        uniform = torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
        words = torch.searchsorted(cumulative, uniform * cumulative[-1])
        words = words.clamp(max=self.vocabulary - 1)
        return [document.numpy() for document in words.split(lengths)]

    def draw(self, n: int, seed: int = 0) -> list[str]:
        """Return n texts of a public seed."""
        generator = torch.Generator().manual_seed(seed)
        return [" ".join(self.words[rank] for rank in ranks) for ranks in self.ranks(n, generator)]
