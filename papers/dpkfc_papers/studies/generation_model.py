"""A small GPT-2, its training with and without privacy, and the texts that it writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc_papers.recipes.generation import make_gpt2
from dpkfc_papers.studies.generation_texts import (
    PAD,
    PROMPT,
    REFERENCE,
    Vocabulary,
    encode_prompts,
    shorten_prompt,
)

DELTA, KAPPA, GAMMA = 1e-5, 0.7, 0.5
WIDTH, BLOCKS, HEADS = 48, 2, 4
BATCH, ROWS, STEPS = 128, 192, 50


def make_model(vocabulary: int, seed: int) -> nn.Module:
    """Return a small GPT-2 without dropout, with random weights."""
    torch.manual_seed(seed)
    sizes = {"width": WIDTH, "blocks": BLOCKS, "heads": HEADS}
    return make_gpt2(vocabulary, PROMPT + REFERENCE, **sizes, tie_word_embeddings=False)


def token_losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token of references `[N, REFERENCE]`, and which are not fill."""
    output = model(input_ids=ids, use_cache=False, logits_to_keep=REFERENCE + 1)
    wanted = ids[:, PROMPT:]
    logits = output.logits[:, :-1].transpose(1, 2)
    counted = wanted != PAD
    return functional.cross_entropy(logits, wanted, reduction="none") * counted, counted


def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Return the mean loss of each pair over the tokens of its reference."""
    losses, counted = token_losses(model, batch[0])
    return losses.sum(1) / counted.sum(1).clamp(min=1)


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor) -> float:
    """Return the perplexity of references, over all their tokens."""
    parts = [token_losses(model, part) for part in ids.split(ROWS)]
    total = sum(float(losses.sum()) for losses, _ in parts)
    return math.exp(total / sum(int(counted.sum()) for _, counted in parts))


@torch.no_grad()
def write_texts(model: nn.Module, prompts: Sequence[str], vocabulary: Vocabulary) -> list[str]:
    """Return a text for each prompt, of the most probable token at each place."""
    ids = encode_prompts(prompts, vocabulary)
    # Fill before a prompt is read like any token, as in training.
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=REFERENCE,
        do_sample=False,
        eos_token_id=vocabulary.end,
        pad_token_id=PAD,
        suppress_tokens=[PAD, vocabulary.unknown],
    )
    texts = []
    for prompt, numbers in zip(prompts, written[:, PROMPT:].tolist(), strict=True):
        numbers.append(vocabulary.end)
        kept = numbers[: numbers.index(vocabulary.end)]
        texts.append(vocabulary.decode(kept, shorten_prompt(prompt)[1]))
    return texts


def train_plainly(
    model: nn.Module, ids: Tensor, rows: int, steps: int, rate: float, seed: int
) -> None:
    """Train a model with AdamW, without privacy."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        chosen = torch.randint(len(ids), (rows,), generator=generator)
        optimizer.zero_grad()
        for part in chosen.split(ROWS):
            (loss_fn(model, (ids[part],)).sum() / rows).backward()
        optimizer.step()


def train_privately(
    model: nn.Module,
    ids: Tensor,
    rate: float,
    epsilon: float,
    method: str,
) -> dict[str, float]:
    """Train a model with DP-AdamW behind the filter of a method; return ε and σ."""
    from dpkfc import EMA, DiSK, PrivacyConfig, Session

    filters: dict[str, tuple[Any, ...]] = {
        "dp-adamw": (),
        "disk": (DiSK(KAPPA, GAMMA, momentum_allowed=True),),
        "ema": (EMA(KAPPA, momentum_allowed=True),),
    }
    plan = PrivacyConfig(
        expected_batch_size=BATCH,
        steps=STEPS,
        clipping="automatic",
        accountant="pld",
        postprocess=filters[method],
        max_physical_batch_size=ROWS,
    ).calibrate(epsilon, DELTA, len(ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with Session(plan, model, optimizer, (ids,)) as session:
        for batch in session.batches():
            session.step(batch, loss_fn)
        return {"epsilon": session.epsilon, "noise_multiplier": plan.noise_multiplier}
