"""Recipes that write text: pairs as token ids, the loss on the reference, GPT-2 with LoRA.

A sequence is prompt, separator, reference, end. The loss counts the reference and the end. By
default a token is a byte and the GPT-2 is small with random weights, so nothing is downloaded: a
test of everything but the quality of the text. `--pretrained FOLDER` takes weights and tokenizer of
a GPT-2 from a local folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets import Examples, ExampleSet
from dpkfc.app.datasets.sources import Source
from dpkfc.app.datasets.text import DART, E2E, Pair, load_pairs
from dpkfc.app.pretrained import gpt2_lora, pretrained_lora, pretrained_tokenizer
from dpkfc.app.recipes import Judged, Recipe, Task
from dpkfc.app.recipes.text import ZipfBytes
from dpkfc.app.settings import RunConfig
from dpkfc.curvature.probes import TokenNoise

IGNORED = -100
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A public map of texts to ids.

    Attributes:
        encode: maps a text to ids.
        size: V.
        pad, end, separator: ids; the separator may be several.
        name: for the privacy card.
    """

    encode: Callable[[str], list[int]]
    size: int
    pad: int
    end: int
    separator: tuple[int, ...]
    name: str


def _bytes(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


BYTES = Tokens(
    encode=_bytes,
    size=259,
    pad=0,
    end=1,
    separator=(2,),
    name="bytes, 259 tokens",
)


def encode_pairs(pairs: Sequence[Pair], tokens: Tokens, length: int) -> Examples:
    """Return ids and targets `[N, length]` of pairs.

    A target is the next id where that id is part of the reference or the end, and ignored
    elsewhere. A long pair loses the end of its reference beyond half the length, then the end of
    its prompt.
    """
    ids = torch.full((len(pairs), length), tokens.pad)
    targets = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, reference) in enumerate(pairs):
        answer = [*tokens.encode(reference)[: length // 2], tokens.end]
        room = length - len(answer) - len(tokens.separator)
        whole = torch.tensor([*tokens.encode(prompt)[:room], *tokens.separator, *answer])
        first = len(whole) - len(answer)
        ids[row, : len(whole)] = whole
        targets[row, first - 1 : len(whole) - 1] = whole[first:]
    return ids, targets


def _losses(model: nn.Module, batch: Examples) -> Tensor:
    """Return the mean negative log-likelihood of each example's reference tokens `[B]`."""
    ids, targets = batch
    logits = model(ids).transpose(1, 2)
    losses = functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / targets.ne(IGNORED).sum(1).clamp(min=1)


@torch.no_grad()
def _judge(model: nn.Module, examples: Examples) -> Judged:
    """Return the accuracy of the next reference token, and the mean negative log-likelihood."""
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    right, total = 0, 0
    loss = 0.0
    for ids, batch in zip(examples[0].split(_BATCH), examples[1].split(_BATCH), strict=True):
        targets = batch.to(device)
        counted = targets.ne(IGNORED)
        logits = model(ids.to(device))[counted]
        references = targets[counted]
        right += int((logits.argmax(-1) == references).sum())
        loss += float(functional.cross_entropy(logits, references, reduction="sum"))
        total += len(references)
    model.train(training)
    return Judged(right / max(1, total), loss / max(1, total))


def _perplexity(judged: Judged) -> dict[str, float]:
    return {"perplexity per token": math.exp(min(judged.loss, 700.0))}


GENERATION = Task(
    loss=_losses,
    judge=_judge,
    score="next-token accuracy in references",
    mean_loss="negative log-likelihood per token",
    also=_perplexity,
)


def generation_recipe(
    name: str,
    source: Source,
    *,
    length: int,
    constants: dict[str, tuple[str, str]] | None = None,
) -> Recipe:
    """Return a recipe that fine-tunes GPT-2 with LoRA to write references from prompts.

    An example is one pair.

    Args:
        name: of the recipe.
        source: of the pairs.
        length: tokens of a sequence.
        constants: more that is taken as public.
    """

    def load(tokens: Tokens, config: RunConfig) -> ExampleSet:
        pairs = load_pairs(source, config.data_dir or None)
        validation = None
        if pairs.validation:
            validation = encode_pairs(pairs.validation, tokens, length)
        return ExampleSet(
            train=encode_pairs(pairs.train, tokens, length),
            test=encode_pairs(pairs.test, tokens, length),
            validation=validation,
            source=pairs.source,
        )

    def make_recipe(tokens: Tokens, weights: str, **parts: Any) -> Recipe:
        return Recipe(
            name=name,
            title=source.name,
            load=partial(load, tokens),
            input_shape=(length,),
            num_classes=tokens.size,
            constants={
                "tokens": (
                    f"{tokens.name}, cut at {length}",
                    "fixed before any private text was read",
                ),
                "initial weights": (weights, "public"),
                **(constants or {}),
            },
            task=GENERATION,
            **parts,
        )

    def variant(folder: str) -> Recipe:
        tokenizer = pretrained_tokenizer(folder)
        return make_recipe(
            _tokens_of_gpt2(tokenizer),
            "a GPT-2 from a local folder",
            build=partial(pretrained_lora, folder),
            probe=partial(_token_noise, tokenizer, length),
        )

    return make_recipe(
        BYTES,
        "random",
        build=partial(gpt2_lora, BYTES.size, length),
        probe=lambda config: ZipfBytes(length),
        variant=variant,
    )


def _tokens_of_gpt2(tokenizer: Any) -> Tokens:
    """Return the tokens of a GPT-2.

    It pads with its end-of-text token where it has no token for that, and separates with a line
    break.
    """
    end = tokenizer.eos_token_id
    encode = partial(_encode, tokenizer)
    return Tokens(
        encode=encode,
        size=len(tokenizer),
        pad=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        end=end,
        separator=tuple(encode("\n")),
        name=f"those of the given folder, {len(tokenizer):,}",
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _token_noise(tokenizer: Any, length: int, config: RunConfig) -> TokenNoise:
    return TokenNoise.of_tokenizer(
        tokenizer,
        length,
        bare=True,
        zipf_exponent=config.zipf_exponent or None,
        min_length=max(8, length // 4),
    )


# --------------------------------------------------------------------------------------------------
# E2E: 42,061 pairs of a description of a restaurant in fields and one in words; GPT-2 with LoRA
# writes the latter.

E2E_GPT2_LORA = generation_recipe("e2e-gpt2-lora", E2E, length=320)


# --------------------------------------------------------------------------------------------------
# DART: triples of facts and a sentence that says them; GPT-2 with LoRA writes the sentence.
#
# The training split of DART is not read: training is on the development split (2,768 sets of
# triples, 6,980 pairs), evaluation on the test split. A set of triples with several sentences
# stands in several pairs, and the privacy unit is one pair.

DART_GPT2_LORA = generation_recipe(
    "dart-gpt2-lora",
    DART,
    length=384,
    constants={
        "split": (
            "trained on the development split, judged on the test split",
            "no published figure is comparable",
        )
    },
)
