"""Recipes of texts: hashed words with a linear model, a pretrained encoder of sentences, and GPT-2.

No vocabulary and no document frequencies are fitted. On private text both are functions of all
examples without clip and noise, so that a stated ε would not hold. `vocabulary = "private"` and
`"tf-idf"` are refused for that reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkfc.app.datasets.examples import Examples, ExampleSet
from dpkfc.app.datasets.sources import Source
from dpkfc.app.datasets.text import (
    AG_NEWS,
    DART,
    E2E,
    IMDB,
    KEY,
    SST2,
    STACKOVERFLOW,
    Pair,
    Texts,
    WordWeights,
    hashed_rows,
    hashed_texts,
    load_pairs,
    load_texts,
    word_hashes,
)
from dpkfc.app.models import linear_from_zero
from dpkfc.app.pretrained import (
    SENTENCE_WIDTH,
    encode_tokens,
    gpt2_lora,
    minilm_classifier,
    minilm_tokens,
    minilm_vectors,
    pretrained_lora,
    pretrained_tokenizer,
)
from dpkfc.app.recipes.images import LinearHead
from dpkfc.app.recipes.objective import Judged, Objective, model_outputs
from dpkfc.app.recipes.recipe import Recipe
from dpkfc.app.settings import RunConfig
from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import Probe
from dpkfc.curvature.token_noise import TokenNoise

# --------------------------------------------------------------------------------------------------
# Synthetic English for probes: words drawn independently by Zipf's law, the frequent ones by their
# real names.
#
# Which words of a language are frequent is public knowledge, and so is the law by which frequency
# falls with rank. A document made of them has the strongest directions of real text (function
# words, and pairs of them) and nothing that was ever private.


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


# Words of a document for which frequencies of documents are computed, and the rank from which on
# words count as rare.
_LENGTH = 200
_RARE = 1000


@cache
def english_weights() -> WordWeights:
    """Return inverse document frequencies of English by Zipf's law: no text is counted.

    The word of rank r is in a document of 200 words with probability 1 − (1 − p_r)^200. Its weight
    is minus the logarithm. All words that are not in `COMMON_WORDS` have the weight of rank 1,000.
    """
    weights = -np.log(1 - (1 - ZipfWords().frequencies) ** _LENGTH)
    hashes = word_hashes(COMMON_WORDS)
    order = np.argsort(hashes)
    return WordWeights(hashes[order], weights[: len(hashes)][order], float(weights[_RARE]))


@dataclass(frozen=True)
class HashedZipf(Probe):
    """A probe for hashed texts: Zipf documents through the map that prepares the private texts.

    Attributes:
        size: number of features.
        text: distribution of the documents.
        weighted: whether words have the weights of `english_weights`, and rows the norm 4.
    """

    size: int
    text: ZipfWords = ZipfWords()
    weighted: bool = False

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return features `[n, size]`, no labels."""
        hashes = self._hashes
        documents = [hashes[ranks] for ranks in self.text.ranks(n, generator)]
        if self.weighted:
            return NORM * hashed_rows(documents, self.size, weights=english_weights()), None
        return hashed_rows(documents, self.size), None

    @cached_property
    def _hashes(self) -> np.ndarray:
        return word_hashes(self.text.words)

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold."""
        facts = {"kind": "HashedZipf", "source": "synthetic", "size": self.size}
        if self.weighted:
            facts["weights"] = "Zipf"
        return {**facts, **asdict(self.text)}


@dataclass(frozen=True)
class ZipfBytes(Probe):
    """A probe for texts as bytes: frequent words by Zipf's law, with blanks between them.

    Ids are those of `BYTES`: a byte plus 3, separator 2 near the middle, end 1, padding
    0.

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
# IMDB: 25,000 film reviews, two classes. `imdb` has 32,768 columns and weights words by how rare
# they are in English, by Zipf's law; `imdb-logistic` has 4,096 columns without weights.

SIZE = 4096
WIDE = 32_768
# Norm of rows of weighted words. The input of the bias is 1: at norm 1 it takes half of the clipped
# norm, and the words have less signal at the same noise.
NORM = 4.0


def weighted_words(texts: Sequence[str], size: int) -> Tensor:
    """Return hashed words `[N, size]` with the weights of `english_weights`, rows of norm 4."""
    return NORM * hashed_texts(texts, size, weights=english_weights())


def _reviews_recipe(
    name: str,
    size: int,
    build: Callable[[int, int], nn.Module],
    hashed: Callable[[Sequence[str], int], Tensor],
    *,
    weighted: bool = False,
) -> Recipe:
    """Return a recipe of a linear model on hashed words of film reviews."""

    def load(config: RunConfig) -> ExampleSet:
        texts = load_texts(IMDB, config.data_dir or None).check(IMDB.name, num_classes=2)
        return texts.tensors(lambda lines: hashed(lines, size))

    def probe(config: RunConfig) -> HashedZipf:
        return HashedZipf(size, ZipfWords(exponent=config.zipf_exponent), weighted)

    by = ", weighted by Zipf's law" if weighted else ""
    features = f"{size:,} signed hashes of words, key {KEY!r}{by}"
    return Recipe(
        name=name,
        title=IMDB.name,
        load=load,
        build=partial(build, size, 2),
        input_shape=(size,),
        num_classes=2,
        constants={"features": (features, "published; nothing is fitted")},
        probe=probe,
    )


# Logistic regression as two scores whose difference the softmax takes.
IMDB_LOGISTIC = _reviews_recipe("imdb-logistic", SIZE, linear_from_zero, hashed_texts)
# Weighted words take 3.3 GB in half precision.
IMDB_WORDS = _reviews_recipe(
    "imdb",
    WIDE,
    LinearHead,
    lambda lines, size: weighted_words(lines, size).half(),
    weighted=True,
)


# --------------------------------------------------------------------------------------------------
# Sentences: a pretrained encoder, its vocabulary, and token noise.

VOCABULARY = 30522


def token_noise(config: RunConfig, length: int) -> TokenNoise:
    """Return random WordPiece tokens between [CLS] and [SEP].

    Words begin at id 1996 of this public vocabulary.

    Args:
        config: has the exponent of Zipf's law.
        length: columns of the inputs.
    """
    return TokenNoise(
        vocab_size=VOCABULARY,
        length=length,
        min_length=4,
        zipf_exponent=config.zipf_exponent or None,
        cls_id=101,
        sep_id=102,
        pad_id=0,
        first_id=1996,
        bare=True,
    )


def sentence_recipe(
    name: str,
    source: Source,
    *,
    num_classes: int,
    length: int,
    unseen: bool = False,
    constants: dict[str, tuple[str, str]] | None = None,
) -> Recipe:
    """Return a recipe that trains the head and the last block of MiniLM-L6 on labelled texts.

    Args:
        name: of the recipe.
        source: of the texts.
        num_classes: number of labels.
        length: tokens a text is cut at.
        unseen: leave out training texts that also occur in the test split.
        constants: more that is taken as public.
    """

    def load(config: RunConfig) -> ExampleSet:
        texts = load_texts(source, config.data_dir or None).check(source.name, num_classes)
        if unseen:
            texts = _remove_test_texts(texts)
        return texts.tensors(tokens)

    def tokens(lines: Sequence[str]) -> Tensor:
        return minilm_tokens(lines, length)

    def probe(config: RunConfig) -> TokenNoise:
        return token_noise(config, length)

    return Recipe(
        name=name,
        title=source.name,
        load=load,
        build=partial(minilm_classifier, num_classes),
        input_shape=(length,),
        num_classes=num_classes,
        constants={
            "vocabulary": (
                f"WordPiece, {VOCABULARY:,} tokens, cut at {length}",
                "published with the encoder",
            ),
            "pretrained weights": ("all-MiniLM-L6-v2", "published; trained on public web text"),
            **(constants or {}),
        },
        probe=probe,
    )


def _remove_test_texts(texts: Texts) -> Texts:
    """Return the texts without training texts of the public test split.

    Each text is compared alone, so one more example changes one row.
    """
    seen = set(texts.test[0])
    lines, labels = [], []
    for line, label in zip(*texts.train, strict=True):
        if line not in seen:
            lines.append(line)
            labels.append(label)
    return Texts((lines, labels), texts.test, texts.source)


# --------------------------------------------------------------------------------------------------
# SST-2: 67,349 phrases of film reviews, two classes; a pretrained sentence encoder, whose last
# block and head are trained.

SST2_MINILM = sentence_recipe("sst2-minilm", SST2, num_classes=2, length=48)


# --------------------------------------------------------------------------------------------------
# AG News: descriptions of news, four classes; a pretrained sentence encoder, whose last block and
# head are trained.
#
# Descriptions alone, without titles, on both sides. The stored training file is a part of the
# official 120,000; those of its descriptions that also occur in the test file are left out.

AG_NEWS_MINILM = sentence_recipe(
    "ag-news-minilm",
    AG_NEWS,
    num_classes=4,
    length=64,
    unseen=True,
    constants={
        "test split": (
            "training texts that occur in it are left out",
            "it is public, and each is looked at alone",
        )
    },
)


# --------------------------------------------------------------------------------------------------
# StackOverflow: 20,000 titles of questions, 20 tags; a pretrained sentence encoder, whose last
# block and head are trained.
#
# This is the repaired task of the DP-KFC experiments: there, pairs of a title and a LIST of titles
# written out as text were classified, and the form of the list gave the label away. Here one title
# has one tag. The set has no official split; every fifth title of a public permutation is a test
# example.

STACKOVERFLOW_MINILM = sentence_recipe(
    "stackoverflow-minilm",
    STACKOVERFLOW,
    num_classes=20,
    length=32,
    constants={"split": ("16,000 to 4,000 by a fixed permutation", "of the row numbers alone")},
)


# --------------------------------------------------------------------------------------------------
# The same titles, as vectors of the frozen encoder; the head alone is trained, as in the DP-KFC
# paper.

# Tokens that are read of a text.
HEAD_LENGTH = 32


@dataclass(frozen=True)
class SentenceNoise(Probe):
    """Vectors of random tokens by the frozen public encoder.

    Attributes:
        tokens: makes the tokens.
    """

    tokens: TokenNoise

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return vectors `[n, 384]` of norm 1, no labels."""
        ids, _ = self.tokens.sample(n, generator)
        assert isinstance(ids, Tensor)
        return encode_tokens(ids), None

    def describe(self) -> dict[str, Any]:
        """Return a description that JSON can hold."""
        return {**self.tokens.describe(), "kind": "SentenceNoise", "encoder": "all-MiniLM-L6-v2"}


@lru_cache(maxsize=1)
def _title_vectors(data_dir: str) -> ExampleSet:
    """Return vectors of all titles; a study asks for them many times, and they take minutes."""
    texts = load_texts(STACKOVERFLOW, data_dir or None).check(STACKOVERFLOW.name, 20)
    return texts.tensors(lambda lines: minilm_vectors(lines, HEAD_LENGTH))


STACKOVERFLOW_HEAD = replace(
    STACKOVERFLOW_MINILM,
    name="stackoverflow-head",
    load=lambda config: _title_vectors(config.data_dir),
    build=partial(LinearHead, SENTENCE_WIDTH, 20),
    input_shape=(SENTENCE_WIDTH,),
    probe=lambda config: SentenceNoise(token_noise(config, HEAD_LENGTH)),
)


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
        pairs = load_pairs(source, config.data_dir or None)
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
