"""A byte-level GPT-2 on the texts of E2E, by each method of the papers.

    python -m dpkfc_papers.studies.byte_gpt2 --data-dir DATA
    python -m dpkfc_papers.studies.byte_gpt2 --table

Four blocks of width 192 (1.8 million weights) predict each of the first 64 bytes of a reference
from those before it. They were trained on public texts, pieces of IMDB's reviews; these weights are
kept in the user's cache. One record is one reference; a restaurant has several, so ε does not
protect a restaurant. C and the factors of the preconditioner come from Zipf texts. Rows are in
papers/results/byte_gpt2.json, and one that is in the file is not run again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets.text import IMDB, load_texts
from dpkfc.app.models import build_seeded
from dpkfc.features import ZipfWords
from dpkfc.features.cache import cached_tensors
from dpkfc_papers.recipes.generation import make_gpt2
from dpkfc_papers.recipes.pairs import E2E, load_pairs
from dpkfc_papers.studies.harness import RESULTS
from dpkfc_papers.studies.paper_methods import (
    SEEDS,
    Comparison,
    Data,
    Rows,
    make_methods,
    split_rows,
)
from dpkfc_papers.studies.rows import run_rows

PATH = RESULTS / "byte_gpt2.json"
VALIDATION, JUDGED, DRAWN = 2000, 2000, 64
# Bytes that are predicted, the byte before a text and behind it, and what is scored at once.
LENGTH, END, PART = 64, 0, 100
WIDTH, BLOCKS, HEADS = 192, 4, 4
START_BATCH, START_STEPS, START_RATE = 64, 400, 1e-3


def make_model() -> nn.Module:
    """Return a GPT-2 of bytes without dropout, with random weights."""
    return make_gpt2(256, LENGTH, width=WIDTH, blocks=BLOCKS, heads=HEADS, end=END)


def encode_texts(texts: Sequence[str]) -> Tensor:
    """Return bytes `[N, LENGTH + 1]` of texts: one END, then the text, then END."""
    ids = torch.full((len(texts), LENGTH + 1), END)
    for row, text in enumerate(texts):
        cut = text.encode()[:LENGTH]
        ids[row, 1 : 1 + len(cut)] = torch.tensor(list(cut))
    return ids


def token_losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses and hits `[N, LENGTH]`, and which bytes count: a text and one END."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    wanted = ids[:, 1:]
    losses = functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
    before = ids[:, :-1] != END
    before[:, 0] = True
    return losses * before, (logits.argmax(2) == wanted) & before, before


def loss_fn(model: nn.Module, batch: Rows) -> Tensor:
    """Return the mean loss of each text over its bytes."""
    losses, _, counted = token_losses(model, batch[0])
    return losses.sum(1) / counted.sum(1)


@torch.no_grad()
def score(model: nn.Module, judged: Rows) -> Mapping[str, float]:
    """Return the share of bytes that are predicted, and bits a byte."""
    loss = hits = count = 0.0
    for ids in judged[0].split(PART):
        losses, right, counted = token_losses(model, ids)
        loss += float(losses.sum())
        hits += float(right.sum())
        count += float(counted.sum())
    return {"accuracy": 100 * hits / count, "bits": loss / count / math.log(2)}


@functools.cache
def draw_texts() -> Tensor:
    """Return bytes of Zipf texts, which are not data."""
    return encode_texts(ZipfWords(shortest=10, longest=60).draw(DRAWN))


def train_start(data_dir: str) -> dict[str, Tensor]:
    """Return the weights of a model that was trained on pieces of public texts."""
    pieces = [
        text[place : place + LENGTH]
        for text in load_texts(IMDB, data_dir).train[0]
        for place in range(0, len(text) - LENGTH, LENGTH)
    ]
    model = build_seeded(make_model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=START_RATE)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(START_STEPS):
        rows = order[step * START_BATCH : (step + 1) * START_BATCH]
        optimizer.zero_grad()
        loss_fn(model, (encode_texts([pieces[row] for row in rows]),)).mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def read(data_dir: str) -> Data:
    """Return the references of E2E; JUDGED of them, drawn, stand for the test split."""
    splits = load_pairs(E2E, data_dir)
    train = encode_texts([text for _, text in splits.train])
    test = encode_texts([text for _, text in splits.test])
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    return Data(*split_rows((train,), VALIDATION), (test[order[:JUDGED]],))


COMPARISON = Comparison(
    path=PATH,
    methods=make_methods((1e-3, 3e-3, 0.01), (1e-3, 3e-3, 0.01, 0.03), (1e-3, 3e-3, 0.01)),
    model=make_model,
    loss_fn=loss_fn,
    read=read,
    draw_inputs=lambda: draw_texts()[:, :-1],
    draw_batch=lambda: (draw_texts(),),
    score=score,
    figures={"accuracy": "next byte %", "bits": "bits a byte"},
    batch=128,
    steps=16,
    every=8,
)
table = COMPARISON.table


def run(data_dir: str, names: Sequence[str], seeds: int) -> None:
    """Run what is missing, from public weights that the cache keeps."""
    settings = [WIDTH, BLOCKS, HEADS, LENGTH, START_BATCH, START_STEPS, START_RATE]
    make = functools.partial(train_start, data_dir)
    start = cached_tensors("byte-gpt2", {"settings": settings}, [], make)

    def make_started() -> nn.Module:
        model = make_model()
        model.load_state_dict(start, strict=False)
        return model

    replace(COMPARISON, model=make_started).run(data_dir, names, seeds)


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, COMPARISON.methods, SEEDS, run, table))
