"""What the recipes that write text share: pairs to token ids, the loss on the reference alone, GPT-2 with LoRA.

A sequence is prompt, separator, reference, end; the loss counts the reference and the end. By default a token is a byte, so no
tokenizer and no download is needed, and the GPT-2 is small with random weights: a test of everything but the quality of the
text. `--pretrained FOLDER` takes weights and tokenizer of a GPT-2 from a local folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets.formats import Examples, ExampleSet
from dpkfc.app.datasets.sources import Source
from dpkfc.app.datasets.text import DART, E2E, Pair, load_pairs
from dpkfc.app.pretrained import gpt2_lora, pretrained_lora, pretrained_tokenizer
from dpkfc.app.recipes.recipe import Judged, Recipe, Task
from dpkfc.app.recipes.words import ZipfBytes
from dpkfc.app.settings import RunConfig
from dpkfc.curvature.text_probes import TokenNoise

IGNORED = -100
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A public map of texts to ids.

    Attributes:
        encode: text to ids.
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


BYTES = Tokens(encode=_bytes, size=259, pad=0, end=1, separator=(2,), name="bytes, 259 tokens")


def encoded(pairs: Sequence[Pair], tokens: Tokens, length: int) -> Examples:
    """Ids and targets `[N, length]` of pairs.

    A target is the next id where that is part of the reference or the end, and ignored elsewhere. A pair that is too long loses
    the end of its reference beyond half the length, then the end of its prompt.
    """
    ids = torch.full((len(pairs), length), tokens.pad)
    targets = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, reference) in enumerate(pairs):
        answer = [*tokens.encode(reference)[: length // 2], tokens.end]
        asked = tokens.encode(prompt)[: length - len(answer) - len(tokens.separator)]
        whole = torch.tensor([*asked, *tokens.separator, *answer])
        first = len(whole) - len(answer)
        ids[row, : len(whole)] = whole
        targets[row, first - 1 : len(whole) - 1] = whole[first:]
    return ids, targets


def _losses(model: nn.Module, batch: Examples) -> Tensor:
    """Mean negative log-likelihood of the reference's tokens, one an example `[B]`."""
    ids, targets = batch
    losses = functional.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / targets.ne(IGNORED).sum(1).clamp(min=1)


@torch.no_grad()
def _judged(model: nn.Module, examples: Examples) -> Judged:
    """Share of reference tokens that the model would have chosen, and their mean negative log-likelihood."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    right, total, loss = 0, 0, 0.0
    for ids, on_cpu in zip(examples[0].split(_BATCH), examples[1].split(_BATCH), strict=True):
        targets = on_cpu.to(device)
        counted = targets.ne(IGNORED)
        logits, wanted = model(ids.to(device))[counted], targets[counted]
        right += int((logits.argmax(-1) == wanted).sum())
        loss += float(functional.cross_entropy(logits, wanted, reduction="sum"))
        total += len(wanted)
    model.train(training)
    return Judged(right / max(1, total), loss / max(1, total))


def _perplexity(judged: Judged) -> dict[str, float]:
    return {"perplexity per token": math.exp(min(judged.loss, 700.0))}


GENERATION = Task(
    loss=_losses,
    judge=_judged,
    score="next-token accuracy in references",
    mean_loss="negative log-likelihood per token",
    also=_perplexity,
)


def generation_recipe(name: str, source: Source, *, length: int, constants: dict[str, tuple[str, str]] | None = None) -> Recipe:
    """A recipe that fine-tunes GPT-2 with LoRA to write references from prompts; an example is one pair.

    Args:
        name: of the recipe.
        source: of the pairs.
        length: tokens of a sequence.
        constants: more that is taken as public.
    """

    def load(tokens: Tokens, config: RunConfig) -> ExampleSet:
        pairs = load_pairs(source, config.data_dir or None)
        own = encoded(pairs.validation, tokens, length) if pairs.validation else None
        train, test = (encoded(part, tokens, length) for part in (pairs.train, pairs.test))
        return ExampleSet(train=train, test=test, validation=own, source=pairs.source)

    def made(tokens: Tokens, weights: str, **parts: Any) -> Recipe:
        return Recipe(
            name=name,
            title=source.name,
            load=partial(load, tokens),
            input_shape=(length,),
            num_classes=tokens.size,
            constants={
                "tokens": (f"{tokens.name}, cut at {length}", "fixed before any private text was read"),
                "initial weights": (weights, "public"),
                **(constants or {}),
            },
            task=GENERATION,
            **parts,
        )

    def variant(folder: str) -> Recipe:
        tokenizer = pretrained_tokenizer(folder)
        probe = partial(_token_noise, tokenizer, length)
        return made(_of(tokenizer), "a GPT-2 from a local folder", build=lambda: pretrained_lora(folder), probe=probe)

    small = made(BYTES, "random", build=lambda: gpt2_lora(BYTES.size, length), probe=lambda config: ZipfBytes(length))
    return replace(small, variant=variant)


def _of(tokenizer: Any) -> Tokens:
    """The tokenizer of a GPT-2, which pads with its end-of-text token and separates with a line break."""
    end = tokenizer.eos_token_id
    encode = partial(_encode, tokenizer)
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    name = f"those of the given folder, {len(tokenizer):,}"
    return Tokens(encode=encode, size=len(tokenizer), pad=pad, end=end, separator=tuple(encode("\n")), name=name)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _token_noise(tokenizer: Any, length: int, config: RunConfig) -> TokenNoise:
    law = config.zipf_exponent or None
    return TokenNoise.of_tokenizer(tokenizer, length, bare=True, zipf_exponent=law, min_length=max(8, length // 4))


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
    constants={"split": ("trained on the development split, judged on the test split", "no published figure is comparable")},
)
