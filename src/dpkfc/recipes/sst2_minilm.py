"""SST-2: 67,349 phrases of film reviews, two classes; a pretrained sentence encoder, whose last block and head are trained."""

from __future__ import annotations

from dpkfc.curvature import TokenNoise
from dpkfc.recipes.base import Recipe
from dpkfc.recipes.config import RunConfig
from dpkfc.recipes.datasets import ExampleSet, load_texts
from dpkfc.recipes.datasets.texts import SST2
from dpkfc.recipes.models.sentence import minilm_classifier, minilm_tokens

__all__ = ["RECIPE"]

LENGTH, VOCABULARY = 48, 30522


def _load(data_dir: str | None) -> ExampleSet:
    return load_texts(SST2, data_dir).check("SST-2", num_classes=2).tensors(lambda texts: minilm_tokens(texts, LENGTH))


def _probe(config: RunConfig) -> TokenNoise:
    """Random WordPiece tokens between [CLS] and [SEP]; words begin at id 1996 of this public vocabulary."""
    return TokenNoise(
        vocab_size=VOCABULARY,
        length=LENGTH,
        min_length=4,
        zipf_exponent=config.zipf_exponent or None,
        cls_id=101,
        sep_id=102,
        pad_id=0,
        first_id=1996,
        bare=True,
    )


RECIPE = Recipe(
    name="sst2-minilm",
    title="SST-2",
    load=_load,
    build=minilm_classifier,
    input_shape=(LENGTH,),
    num_classes=2,
    constants={
        "vocabulary": (f"WordPiece, {VOCABULARY:,} tokens, cut at {LENGTH}", "published with the encoder"),
        "pretrained weights": ("all-MiniLM-L6-v2", "published; trained on public web text"),
    },
    probe=_probe,
)
