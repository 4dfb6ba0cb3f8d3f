"""Recipes that write text: pairs as token ids, the loss on the reference, GPT-2 with LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc._errors import first_line
from dpkfc.app.datasets.errors import DatasetError, import_optional
from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.datasets.sources import Source
from dpkfc.app.recipes.objective import Judged, Objective, model_outputs
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.run_config import RunConfig
from dpkfc.curvature.probes import Probe, Sample
from dpkfc.curvature.token_noise import TokenNoise
from dpkfc.features.zipf_words import COMMON_WORDS, ZipfWords
from dpkfc_papers.recipes.pairs import DART, E2E, Pair, load_pairs

# --------------------------------------------------------------------------------------------------
# GPT-2 with LoRA: a small one with random weights, or one from a local folder.

_HOW = "pip install '.[hf]' (transformers and peft)"
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Logits(nn.Module):
    """Map token ids `[N, T]` to logits `[N, T, V]` of the next token.

    Texts are padded at their end, which no earlier token sees.
    """

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of ids."""
        return self.language_model(input_ids=ids, use_cache=False).logits


def gpt2_lora(vocabulary: int, length: int) -> Logits:
    """Build two blocks of width 96 with random weights, of which adapters alone are trained.

    Raises:
        DatasetError: transformers or peft are missing; the message says how to get them.
    """
    return _add_adapters(make_gpt2(vocabulary, length, width=96, blocks=2, heads=4))


def make_gpt2(
    vocabulary: int,
    positions: int,
    *,
    width: int,
    blocks: int,
    heads: int,
    end: int = 1,
    **settings: Any,
) -> nn.Module:
    """Build a GPT-2 without dropout, with random weights.

    Args:
        vocabulary: number of tokens.
        positions: of the longest text.
        width: of a block.
        blocks: number of them.
        heads: of a block.
        end: the token that begins and ends a text.
        settings: of `transformers.GPT2Config`.

    Raises:
        DatasetError: transformers is missing; the message says how to get it.
    """
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=width,
        n_layer=blocks,
        n_head=heads,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=0,
        **_NO_DROPOUT,
        **settings,
    )
    return transformers.GPT2LMHeadModel(config)


def pretrained_lora(folder: str) -> Logits:
    """Load a GPT-2 from a local folder without dropout, of which adapters alone are trained.

    Raises:
        DatasetError: a package is missing, or the folder holds no such model.
    """
    kind = _transformers().GPT2LMHeadModel
    return _add_adapters(_load_folder(folder, kind, **_NO_DROPOUT))


def pretrained_tokenizer(folder: str) -> Any:
    """Load the tokenizer of that folder.

    Raises:
        DatasetError: a package is missing, or the folder holds no tokenizer.
    """
    return _load_folder(folder, _transformers().AutoTokenizer)


def _load_folder(folder: str, kind: Any, **settings: Any) -> Any:
    if not Path(folder).is_dir():
        raise DatasetError(
            f"pretrained {folder!r} is not a folder; give one with config.json, weights and"
            " tokenizer of a GPT-2"
        )
    try:
        return kind.from_pretrained(folder, local_files_only=True, **settings)
    # Whatever the package raises becomes one line.
    except Exception as error:
        raise DatasetError(
            f"pretrained {folder}: holds no GPT-2 with its tokenizer ({first_line(error)}); fetch"
            " the folder again"
        ) from None


def _transformers() -> Any:
    return import_optional("transformers", f"transformers is not installed: {_HOW}")


def _add_adapters(model: nn.Module) -> Logits:
    """Add adapters of rank 8 at all linear maps of the blocks."""
    peft = import_optional("peft", f"peft is not installed: {_HOW}")
    lora = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        lora_dropout=0.0,
    )
    return Logits(peft.get_peft_model(model, lora))


# --------------------------------------------------------------------------------------------------
# The probe.


@dataclass(frozen=True)
class ZipfBytes(Probe):
    """A probe for texts as bytes: frequent words by Zipf's law, with blanks between them.

    Ids follow `BYTES`: a byte plus 3, separator 2 near the middle, end 1, padding 0.

    Attributes:
        length: ids of a sequence.
    """

    length: int

    @property
    def padding_id(self) -> int:
        """The id that fills a row after its text."""
        return 0

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return ids `[n, length]`, no labels."""
        text = ZipfWords(
            vocabulary=len(COMMON_WORDS),
            shortest=max(2, self.length // 10),
            longest=max(4, self.length // 5),
        )
        places = torch.rand(n, generator=generator, dtype=torch.float64).tolist()
        rows = torch.zeros(n, self.length, dtype=torch.int64)
        for row, ranks, place in zip(rows, text.ranks(n, generator), places, strict=True):
            words = " ".join(COMMON_WORDS[rank] for rank in ranks)
            line = words[: self.length - 1].encode()
            row[: len(line)] = torch.tensor(list(line)) + 3
            row[int((0.25 + 0.5 * place) * len(line))] = 2
            row[len(line)] = 1
        return rows, None

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold."""
        return {"kind": "ZipfBytes", "source": "synthetic", "length": self.length}


# --------------------------------------------------------------------------------------------------
# Recipes that write text: pairs as token ids, the loss on the reference, GPT-2 with LoRA.
#
# A sequence is prompt, separator, reference, end. The loss counts the reference and the end. By
# default a token is a byte and the GPT-2 is small with random weights, so nothing is downloaded: a
# test of everything but the quality of the text. `--pretrained FOLDER` takes weights and tokenizer
# of a GPT-2 from a local folder.

IGNORED = -100
_PAIRS_AT_ONCE = 32


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


def _reference_losses(model: nn.Module, batch: Examples) -> Tensor:
    """Return the mean negative log-likelihood of each example's reference tokens `[B]`."""
    ids, targets = batch
    logits = model(ids).transpose(1, 2)
    losses = functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / targets.ne(IGNORED).sum(1).clamp(min=1)


@torch.no_grad()
def _judge_references(model: nn.Module, examples: Examples) -> Judged:
    """Return the accuracy of the next reference token, and the mean negative log-likelihood."""
    right, total = 0, 0
    loss = 0.0
    outputs = model_outputs(model, examples[0], _PAIRS_AT_ONCE)
    for output, batch in zip(outputs, examples[1].split(_PAIRS_AT_ONCE), strict=True):
        targets = batch.to(output.device)
        counted = targets.ne(IGNORED)
        logits = output[counted]
        references = targets[counted]
        right += int((logits.argmax(-1) == references).sum())
        loss += float(functional.cross_entropy(logits, references, reduction="sum"))
        total += len(references)
    return Judged(right / max(1, total), loss / max(1, total))


def _perplexity(judged: Judged) -> dict[str, float]:
    return {"perplexity per token": math.exp(min(judged.loss, 700.0))}


GENERATION = Objective(
    loss=_reference_losses,
    judge=_judge_references,
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
        pairs = load_pairs(source, config.data.data_dir or None)
        return pairs.convert(lambda part: encode_pairs(part, tokens, length))

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
        name=f"from the given folder, {len(tokenizer):,}",
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _token_noise(tokenizer: Any, length: int, config: RunConfig) -> TokenNoise:
    return TokenNoise.from_tokenizer(
        tokenizer,
        length,
        bare=True,
        zipf_exponent=config.preconditioner.zipf_exponent or None,
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
