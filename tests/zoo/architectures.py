"""Every architecture of the zoo; the files of the families register them."""

from tests.zoo import (
    attention,
    convolution,
    data,
    dense,
    huggingface,
    language,
    losses,
    mechanics,
    mixing,
    recurrent,
    structured,
    traps,
)
from tests.zoo.registry import ARCHITECTURES

__all__ = ["ARCHITECTURES", "FAMILY_FILES"]

FAMILY_FILES = (
    dense,
    convolution,
    data,
    recurrent,
    attention,
    language,
    structured,
    mechanics,
    losses,
    traps,
    mixing,
    huggingface,
)
