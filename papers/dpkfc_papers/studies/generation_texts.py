"""Pairs of E2E and DART as tokens, and the figures of merit of the texts that a model writes."""

from __future__ import annotations

import re
import statistics
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.app.datasets.errors import import_optional
from dpkfc.app.datasets.pixels import Splits

MISSING = "a package of dpkfc_papers.studies.generation is missing: pip install '.[generation]'"
# Tokens of a prompt and of a reference; longer ones are cut.
PROMPT, REFERENCE = 24, 36
VALIDATION, DECODED, SPLIT_SEED = 500, 300, 0
# Ids of WordPiece: fill, unknown, end, the first single character and the first word.
PAD, UNKNOWN, END, CHARACTER, WORD = 0, 100, 102, 999, 1996
SLOTS, CHARACTERS, WORDS = 16, 64, 300

# --------------------------------------------------------------------------------------------------
# Texts: each pair becomes tokens by itself, with nothing learned from another.


def find_triples(prompt: str) -> list[tuple[str, str, str]]:
    """Return the facts of a prompt of E2E or DART, as subject, relation and object."""
    fields = re.findall(r"([\w ]+)\[([^\]]*)\](?:, )?", prompt)
    if fields and " | " not in prompt:
        subject = fields[0][1]
        return [(subject, name, value) for name, value in fields[1:] or fields]
    triples = []
    for fact in prompt.split(" ; "):
        parts = fact.split(" | ")
        if len(parts) > 2:
            subject, relation, *things = parts
            triples.append((subject, relation, " ".join(things)))
    return triples


def find_slots(triples: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return names and numbers of a prompt in their order."""
    values = [value for subject, _, thing in triples for value in (subject, thing)]
    kept = [
        value
        for value in dict.fromkeys(values)
        if value[:1].isupper() or (value and not re.search(r"[^\W\d_]", value))
    ]
    return kept[:SLOTS]


def shorten_prompt(prompt: str) -> tuple[str, list[str]]:
    """Return a prompt with slots in place of names, each written `[unused N]`, and the names."""
    triples = find_triples(prompt)
    slots = find_slots(triples)
    names = {value: f" [unused{place}] " for place, value in enumerate(slots)}
    pieces, last = [], None
    for subject, relation, thing in triples:
        relation = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", relation)
        if subject != last:
            pieces.append(names.get(subject, subject))
        pieces += [relation, names.get(thing, thing)]
        last = subject
    return " ".join(pieces), slots


def shorten_reference(reference: str, slots: Sequence[str]) -> str:
    """Return a reference with slots in place of the names of its own prompt."""
    places = sorted(range(len(slots)), key=lambda place: -len(slots[place]))
    for place in places:
        pattern = rf"(?<!\w){re.escape(slots[place])}(?!\w)"
        name = f" [unused{place}] "
        reference = re.sub(pattern, name, reference, flags=re.IGNORECASE)
    return reference


def split_words(text: str) -> str:
    """Return lower-case words and marks with a space between them, without accents."""
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(sign for sign in plain if not unicodedata.combining(sign))
    return " ".join(re.findall(r"\w+|[^\w\s]", plain))


class Vocabulary:
    """The pieces that the model knows, fixed by public texts and a published list alone.

    Args:
        public: texts whose pieces are taken.
    """

    def __init__(self, public: Sequence[str]) -> None:
        from dpkfc.app.pretrained import find_minilm, import_transformers

        loader = import_transformers().AutoTokenizer
        self.tokenizer = loader.from_pretrained(find_minilm())
        slots = [f"[unused{place}]" for place in range(SLOTS)]
        self.tokenizer.add_special_tokens({"additional_special_tokens": slots})
        self.first_slot = self.tokenizer.convert_tokens_to_ids(slots[0])
        fixed = {
            PAD,
            UNKNOWN,
            END,
            *range(CHARACTER, CHARACTER + CHARACTERS),
            *range(WORD, WORD + WORDS),
        }
        fixed |= set(range(self.first_slot, self.first_slot + SLOTS))
        pieces = {piece for ids in self._split(public) for piece in ids}
        # 0 stays the id that fills the columns after a sequence.
        self.pieces = sorted(fixed | pieces)
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self.unknown, self.end = self.numbers[UNKNOWN], self.numbers[END]

    def __len__(self) -> int:
        return len(self.pieces)

    def _split(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers of pieces; others become `[UNK]`."""
        return [
            [self.numbers.get(piece, self.unknown) for piece in ids] for ids in self._split(texts)
        ]

    def decode(self, numbers: Sequence[int], slots: Sequence[str]) -> str:
        """Return the words of pieces, with the names of a prompt in its slots."""
        text = ""
        for number in numbers:
            piece = self.pieces[number]
            place = piece - self.first_slot
            if 0 <= place < SLOTS:
                text += " " + (slots[place] if place < len(slots) else "")
                continue
            token = self.tokenizer.convert_ids_to_tokens(piece)
            text += token[2:] if token.startswith("##") else " " + token
        return split_words(text)


def encode_prompts(prompts: Sequence[str], vocabulary: Vocabulary) -> Tensor:
    """Return prompts as numbers `[N, PROMPT]`, each at the end of its row behind fill."""
    found = vocabulary.encode([shorten_prompt(prompt)[0] for prompt in prompts])
    ids = torch.zeros(len(prompts), PROMPT, dtype=torch.long)
    for row, numbers in enumerate(found):
        kept = [*numbers[: PROMPT - 1], vocabulary.end]
        ids[row, PROMPT - len(kept) :] = torch.tensor(kept)
    return ids


def encode_pairs(pairs: Sequence[tuple[str, str]], vocabulary: Vocabulary) -> Tensor:
    """Return prompts and references `[N, PROMPT + REFERENCE]`; fill stands at both ends."""
    short = [shorten_reference(text, shorten_prompt(prompt)[1]) for prompt, text in pairs]
    ids = torch.zeros(len(pairs), REFERENCE, dtype=torch.long)
    for row, numbers in enumerate(vocabulary.encode(short)):
        kept = [*numbers, vocabulary.end][:REFERENCE]
        ids[row, : len(kept)] = torch.tensor(kept)
    return torch.cat([encode_prompts([prompt for prompt, _ in pairs], vocabulary), ids], 1)


def group_references(pairs: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the references of each prompt, in the order of the prompts."""
    found: dict[str, list[str]] = {}
    for prompt, reference in pairs:
        found.setdefault(prompt, []).append(reference)
    return found


@dataclass(frozen=True)
class Task:
    """What a study needs of one data set.

    Attributes:
        vocabulary: public.
        start: public pairs in place of pretraining.
        train: private pairs.
        validation: private pairs cut from them, for rates.
        test: pairs that are judged.
        references: of each prompt that is decoded.
    """

    vocabulary: Vocabulary
    start: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor
    references: dict[str, list[str]]


def is_restaurant(prompt: str) -> bool:
    """Whether a prompt of DART is about one of E2E's restaurants."""
    return bool(re.search("eatType|familyFriendly|priceRange|customer rating", prompt))


def make_task(data: str, e2e: Splits, dart: Splits) -> Task:
    """Return the tokens of a data set; only a public split of E2E forms the vocabulary."""
    known = e2e.validation
    if data == "dart":
        # All restaurants of DART's development split are from E2E's development split.
        known = e2e.train[: len(e2e.validation)]
    public = []
    for prompt, reference in known:
        short, slots = shorten_prompt(prompt)
        public += [short, shorten_reference(reference, slots)]
    vocabulary = Vocabulary(public)
    private, start = dart, known
    if data == "e2e":
        private = e2e
        start = [pair for pair in dart.train if not is_restaurant(pair[0])]
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(private.train), generator=generator).tolist()
    train = [private.train[place] for place in order]
    grouped = group_references(private.test)
    prompts = list(grouped)
    if len(prompts) > DECODED:
        chosen = torch.randperm(len(prompts), generator=generator)[:DECODED].sort().values
        prompts = [prompts[place] for place in chosen.tolist()]
    references = {prompt: grouped[prompt] for prompt in prompts}
    test = [(prompt, text) for prompt, texts in references.items() for text in texts]
    parts = (start, train[VALIDATION:], train[:VALIDATION], test)
    return Task(vocabulary, *(encode_pairs(part, vocabulary) for part in parts), references)


# --------------------------------------------------------------------------------------------------
# Figures of merit.


class NoSynonyms:
    """Stands for WordNet, whose data are not available: METEOR counts words and stems alone."""

    def synsets(self, word: str) -> list[Any]:
        """Return no synonyms."""
        return []


def score(references: Sequence[Sequence[str]], texts: Sequence[str]) -> dict[str, float]:
    """Return BLEU, ROUGE-L, METEOR and NIST of texts, each with one or more references."""
    sacrebleu = import_optional("sacrebleu", MISSING)
    rouge = import_optional("rouge_score.rouge_scorer", MISSING)
    meteor = import_optional("nltk.translate.meteor_score", MISSING)
    nist = import_optional("nltk.translate.nist_score", MISSING)
    texts = [split_words(text) for text in texts]
    references = [[split_words(text) for text in of] for of in references]
    most = max(map(len, references))
    padded = [[*of, *[None] * (most - len(of))] for of in references]
    columns = [list(column) for column in zip(*padded, strict=True)]
    bleu = sacrebleu.corpus_bleu(texts, columns, tokenize="none", force=True)
    scorer = rouge.RougeScorer(["rougeL"])
    overlap = [
        scorer.score_multi(of, text)["rougeL"].fmeasure
        for of, text in zip(references, texts, strict=True)
    ]
    tokens = [[one.split() for one in of] for of in references]
    split = [text.split() for text in texts]
    matches = [
        meteor.meteor_score(of, text, wordnet=NoSynonyms())
        for of, text in zip(tokens, split, strict=True)
    ]
    # NIST has no value where no text has five words.
    is_long = max(map(len, split)) >= 5
    return {
        "bleu": bleu.score,
        "rouge": 100 * statistics.mean(overlap),
        "meteor": statistics.mean(matches),
        "nist": nist.corpus_nist(tokens, split, n=5) if is_long else 0.0,
    }


def score_cider(references: Sequence[Sequence[str]], texts: Sequence[str]) -> float:
    """Return CIDEr of texts; its weights of words come from the references."""
    cider = import_optional("pycocoevalcap.cider.cider", MISSING)
    wanted = {place: [split_words(text) for text in of] for place, of in enumerate(references)}
    found = {place: [split_words(text)] for place, text in enumerate(texts)}
    return float(cider.Cider().compute_score(wanted, found)[0])
