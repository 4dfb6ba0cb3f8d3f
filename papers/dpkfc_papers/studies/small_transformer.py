"""A small transformer on AG News, by each method of the papers.

    python -m dpkfc_papers.studies.small_transformer --data-dir DATA
    python -m dpkfc_papers.studies.small_transformer --table

Two blocks of width 32 with random weights read the first 16 tokens of a text, as frozen vectors:
the principal components of the public token table of MiniLM-L6. C comes from Zipf texts with drawn
labels. Ranges of rates were moved once, where the best stood at an edge. Rows are in
papers/results/small_transformer.json, and one that is in the file is not run again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.features import ZipfWords
from dpkfc_papers.minilm import minilm_classifier, minilm_tokens
from dpkfc_papers.recipes.networks import TransformerBlock
from dpkfc_papers.studies.harness import RESULTS
from dpkfc_papers.studies.language import TASKS, accuracy
from dpkfc_papers.studies.paper_methods import (
    CLIP_ROWS,
    SEEDS,
    Comparison,
    Data,
    Rows,
    make_methods,
    split_rows,
)
from dpkfc_papers.studies.rows import run_rows

PATH = RESULTS / "small_transformer.json"
TASK = TASKS["ag-news"]
VALIDATION, DRAWN = 2000, 256
# Tokens of a text, width and heads.
LENGTH, WIDTH, HEADS = 16, 32, 4


class SmallEncoder(nn.Module):
    """Learned positions, two blocks, the mean over positions, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(TransformerBlock(WIDTH, HEADS) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TASK.classes)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return logits of token vectors `[N, LENGTH, WIDTH]`."""
        x = self.blocks(vectors + self.positions)
        return self.head(self.norm(x).mean(1))


@functools.cache
def token_table() -> Tensor:
    """Return the first principal components of the public token vectors, of mean square 1."""
    table = minilm_classifier(trained_blocks=0).encoder.get_input_embeddings().weight.detach()
    centred = table - table.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    found = centred @ vectors[:, -WIDTH:]
    found = found / found.std(0)
    found[0] = 0
    return found


def token_vectors(texts: Sequence[str]) -> Tensor:
    """Return vectors `[N, LENGTH, WIDTH]` of the first tokens of texts; 0 fills a short one."""
    return token_table()[minilm_tokens(texts, LENGTH)]


@functools.cache
def draw_texts() -> Tensor:
    """Return vectors of Zipf texts, which are not data."""
    return token_vectors(ZipfWords(shortest=10, longest=60).draw(DRAWN))


def draw_batch() -> Rows:
    """Return Zipf texts with drawn labels."""
    generator = torch.Generator().manual_seed(0)
    return draw_texts()[:CLIP_ROWS], torch.randint(TASK.classes, (CLIP_ROWS,), generator=generator)


def read(data_dir: str) -> Data:
    """Return the first tokens of AG News with their classes."""
    texts = TASK.texts(data_dir)
    train = token_vectors(texts.train[0]), torch.tensor(texts.train[1])
    test = token_vectors(texts.test[0]), torch.tensor(texts.test[1])
    return Data(*split_rows(train, VALIDATION), test)


def score(model: nn.Module, judged: Rows) -> Mapping[str, float]:
    """Return the share of right classes."""
    return {"accuracy": accuracy(model, *judged)}


COMPARISON = Comparison(
    path=PATH,
    methods=make_methods((6e-3, 2e-2, 6e-2), (0.1, 0.3, 1.0), (0.03, 0.1, 0.3)),
    model=SmallEncoder,
    loss_fn=cross_entropy,
    read=read,
    draw_inputs=draw_texts,
    draw_batch=draw_batch,
    score=score,
    figures={"accuracy": "test %"},
    batch=256,
    steps=24,
    every=8,
)
table = COMPARISON.table

if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, COMPARISON.methods, SEEDS, COMPARISON.run, table))
