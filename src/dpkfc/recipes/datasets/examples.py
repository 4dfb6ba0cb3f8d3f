"""The tensors that a run trains and is judged on, whatever they were made from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ExampleSet", "Examples"]

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ExampleSet:
    """What a run trains and is judged on.

    Attributes:
        train: inputs `[N, ...]` and labels `[N]`, the private examples.
        test: the same for the test split.
        validation: examples cut from the training set by a public seed, or the set's own validation split, or None.
        source: where they were read from.
        part: how much of the data set they are, where files hold a part of it: no published number is of that.
    """

    train: Examples
    test: Examples
    validation: Examples | None = None
    source: str = ""
    part: str = ""
