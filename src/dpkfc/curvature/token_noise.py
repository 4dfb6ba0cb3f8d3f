"""Token noise: random tokens, with the special tokens and masks that a language model expects.

Such a probe shows the scale that the architecture gives activations and gradients. With token
frequencies it also shows how often a row of the embedding is read. It has neither grammar nor
meaning, so `PublicData` of tokenised public text is a better probe if there is any.

Source: DP-KFC, appendix E.2 and Algorithm 4 (uniform tokens), section 5.3 (weighted tokens).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dpkfc._checks import (
    check_in_range,
    check_integer,
    check_not_negative,
    check_one_of,
    check_optional_integer,
)
from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import ComparedByDescription


@dataclass(frozen=True, eq=False)
class TokenNoise(ComparedByDescription):
    """Random tokens, `[cls] tokens [sep] [pad] …`, as a mapping for `model(**inputs)`.

    A sequence has a uniform random length from `min_length` to `length`, special tokens included.
    Unlike in the paper's Algorithm 4, the separator is the last token of the text and not masked.

    Tokens are uniform (Algorithm 4), or follow Zipf's law p ∝ 1/rank^zipf_exponent, or a given
    table. The rank of Zipf's law is the order of the ids from `first_id` on. Byte-pair and
    WordPiece vocabularies list their entries roughly from frequent to rare (BERT's from id 1996 on,
    with `first_id=1996`).

    Attributes:
        vocab_size: V, one more than the largest id.
        length: T, columns of the inputs.
        min_length: shortest text; None is the special tokens and one more token a segment.
        zipf_exponent: s of Zipf's law, about 1 for natural text; None is uniform.
        frequencies: weights of all V tokens `[V]`, not negative, instead of a law. They must come
            from public text: frequencies counted on private text void the guarantee.
        provenance: where the frequencies come from, for the privacy card; only with frequencies.
        cls_id: the first token, or None.
        sep_id: the last token of the text (of each text, with two segments), or None.
        pad_id: fills the columns after the text; needed if lengths differ.
        first_id: smaller ids are not drawn.
        exclude: more ids that are not drawn; special tokens never are.
        segments: 0 gives no `token_type_ids`, 1 gives zeros, 2 a pair of texts with types 0 and 1.
        bare: the ids alone as a tensor, for a model that is called as `model(ids)`.
    """

    vocab_size: int
    length: int
    min_length: int | None = None
    zipf_exponent: float | None = None
    frequencies: Tensor | Sequence[float] | None = None
    provenance: str = ""
    cls_id: int | None = None
    sep_id: int | None = None
    pad_id: int | None = None
    first_id: int = 0
    exclude: tuple[int, ...] = ()
    segments: int = 0
    bare: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.frequencies is not None:
            table = torch.as_tensor(self.frequencies).detach().cpu().double()
            object.__setattr__(self, "frequencies", table)
        check_integer("TokenNoise: vocab_size", self.vocab_size, 1)
        check_integer("TokenNoise: length", self.length, 1)
        check_optional_integer("TokenNoise: min_length", self.min_length, 1)
        check_one_of("TokenNoise: segments", self.segments, (0, 1, 2))
        ids = [(name, getattr(self, name)) for name in ("cls_id", "sep_id", "pad_id", "first_id")]
        ids += [("exclude", value) for value in self.exclude]
        for name, value in ids:
            if value is not None:
                check_in_range(f"TokenNoise: {name}", value, f"[0, {self.vocab_size})")
        if self.zipf_exponent is not None:
            check_not_negative("TokenNoise: zipf_exponent", self.zipf_exponent)
        self._check()

    def _check(self) -> None:
        """Check settings that belong together."""
        if self.segments == 2 and self.sep_id is None:
            raise ValueError("TokenNoise: a pair of texts (segments=2) needs sep_id between them")
        if not self._least <= self._shortest <= self.length:
            raise ValueError(
                f"TokenNoise: min_length must lie between {self._least} (the special tokens and "
                f"one more a segment) and length={self.length}, got {self._shortest}"
            )
        if self._shortest < self.length and self.pad_id is None:
            raise ValueError(
                "TokenNoise: texts of different lengths need pad_id (any id, it is masked); "
                "or set min_length=length"
            )
        if isinstance(self.frequencies, Tensor):
            self._check_frequencies(self.frequencies)
        elif self.provenance:
            raise ValueError(
                "TokenNoise: provenance says where frequencies come from, but none are given"
            )
        if not float(self._cumulative[-1]) > 0:
            raise ValueError(
                "TokenNoise: no token is left to draw; check first_id, exclude and frequencies"
            )

    def _check_frequencies(self, table: Tensor) -> None:
        if self.zipf_exponent is not None:
            raise ValueError("TokenNoise: give either zipf_exponent or frequencies, not both")
        if not self.provenance:
            raise ValueError(
                "TokenNoise: say where the frequencies come from, provenance='...', for the "
                "privacy card. Frequencies counted on private text void the guarantee."
            )
        if table.shape != (self.vocab_size,):
            raise ValueError(
                f"TokenNoise: frequencies need one number for each of vocab_size={self.vocab_size} "
                f"tokens, got shape {tuple(table.shape)}"
            )
        is_weight = torch.isfinite(table) & (table >= 0)
        bad = torch.nonzero(~is_weight).flatten().tolist()
        if bad:
            raise ValueError(
                f"TokenNoise: frequencies must be finite and not negative, but {len(bad)} are not; "
                f"the first belongs to token {bad[0]}, {float(table[bad[0]])}"
            )

    @property
    def padding_id(self) -> int | None:
        """The id that fills bare ids, None if a special token has the same id."""
        if self.pad_id in (self.cls_id, self.sep_id):
            return None
        return self.pad_id

    @property
    def call_hint(self) -> str:
        """What to change if the model does not take the arguments that the probe gives it."""
        if self.bare:
            return super().call_hint
        return (
            "for a model that is called as model(ids) give the ids alone, TokenNoise(..., "
            "bare=True)"
        )

    @property
    def _least(self) -> int:
        """The special tokens of a text, and one more token a segment."""
        texts = max(1, self.segments)
        least = texts + (self.cls_id is not None)
        if self.sep_id is not None:
            least += texts
        return least

    @property
    def _shortest(self) -> int:
        if self.min_length is None:
            return self._least
        return self.min_length

    @functools.cached_property
    def _cumulative(self) -> Tensor:
        """Running sum of the weights `[V]`, float64."""
        if isinstance(self.frequencies, Tensor):
            largest = self.frequencies.max().clamp(min=1e-300)
            weights = self.frequencies / largest
        else:
            rank = torch.arange(self.vocab_size, dtype=torch.float64) - self.first_id + 1
            rank = rank.clamp(min=1)
            exponent = self.zipf_exponent or 0.0
            weights = rank.pow(-exponent)
        weights[: self.first_id] = 0
        for special in (self.cls_id, self.sep_id, self.pad_id, *self.exclude):
            if special is not None:
                weights[special] = 0
        return weights.cumsum(0)

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return `input_ids`, `attention_mask` and `token_type_ids` (with `segments`); no labels.

        All are int64 `[n, T]`.
        """
        lengths = torch.randint(self._shortest, self.length + 1, (n, 1), generator=generator)
        place = torch.arange(self.length)
        ids = self._tokens(n, generator)
        last = lengths - 1
        is_text = place <= last
        mask = is_text.long()
        types = torch.zeros_like(mask)
        if self.segments == 2:
            # The first separator stands anywhere that leaves each text a token.
            first = 1 + (self.cls_id is not None)
            choices = last - first - 1
            uniform = torch.rand(n, 1, generator=generator, dtype=torch.float64)
            offset = (uniform * choices).long()
            middle = first + torch.minimum(offset, choices - 1)
            ids = torch.where(place == middle, self.sep_id or 0, ids)
            is_second = is_text & (place > middle)
            types = is_second.long()
        if self.sep_id is not None:
            ids = torch.where(place == last, self.sep_id, ids)
        if self.cls_id is not None:
            ids[:, 0] = self.cls_id
        ids = torch.where(is_text, ids, self.pad_id or 0)
        if self.bare:
            return ids, None
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.segments:
            inputs["token_type_ids"] = types
        return inputs, None

    def _tokens(self, n: int, generator: torch.Generator) -> Tensor:
        """Return tokens `[n, T]` by inverse transform."""
        cumulative = self._cumulative
        uniform = torch.rand(n, self.length, generator=generator, dtype=torch.float64)
        uniform = uniform * cumulative[-1]
        # With `right` a token of weight zero is never drawn: the first entry above the number is a
        # token with a positive weight.
        tokens = torch.searchsorted(cumulative, uniform, right=True)
        return tokens.clamp(max=self._last)

    @functools.cached_property
    def _last(self) -> int:
        """The last token of positive weight, for a number that rounding has moved to the end."""
        return int(torch.searchsorted(self._cumulative, self._cumulative[-1:]))

    def describe(self) -> dict[str, Any]:
        """Return plain values; a table of frequencies by its hash."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        settings["exclude"] = list(self.exclude)
        table = settings.pop("frequencies")
        provenance = settings.pop("provenance")
        own = {"kind": "TokenNoise", "source": "synthetic"}
        if table is not None:
            own["source"] = "public"
            own["provenance"] = provenance
            content = table.numpy().tobytes()
            settings["frequencies"] = hashlib.sha256(content).hexdigest()
        return own | settings

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, length: int, **settings: Any) -> TokenNoise:
        """Return token noise with the special tokens of a Hugging Face tokenizer.

        Args:
            tokenizer: called on a text; the same one that prepares the private data.
            length: T.
            settings: other fields; they override the tokenizer's.

        Raises:
            ValueError: the tokenizer puts more than one token before or after a text.
        """
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        before, after = _split_special_tokens(whole, bare)
        if len(before) > 1 or len(after) > 1:
            raise ValueError(
                f"TokenNoise: the tokenizer puts the tokens {before} before and {after} after a "
                "text; at most one each is supported, so give cls_id and sep_id yourself"
            )
        pad = tokenizer.pad_token_id
        size = len(tokenizer)
        special = {i for i in tokenizer.all_special_ids if 0 <= i < size}
        fields_of_tokenizer: dict[str, Any] = {
            "vocab_size": size,
            "cls_id": before[0] if before else None,
            "sep_id": after[0] if after else None,
            "pad_id": tokenizer.eos_token_id if pad is None else pad,
            "exclude": tuple(sorted(special)),
            "segments": int("token_type_ids" in getattr(tokenizer, "model_input_names", ())),
        }
        return cls(**(fields_of_tokenizer | {"length": length} | settings))


def _split_special_tokens(
    whole: Sequence[int], inner: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the items before and after `inner` in `whole`."""
    own = list(whole)
    wanted = list(inner)
    for start in range(len(own) - len(wanted) + 1):
        stop = start + len(wanted)
        if own[start:stop] == wanted:
            return own[:start], own[stop:]
    return own, []
