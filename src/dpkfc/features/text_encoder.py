"""A frozen public encoder of texts, and means over the tokens of each of its layers.

    m_l = mean over the tokens of a text of the hidden states of layer l, l = 0 … L

The means of a text depend on that text alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_integer, check_one_of
from dpkfc.tensors import content_bytes

# Tokens by which the lengths of a pass differ, and tokens of a pass. Both are constants, so that
# the shape of a text's pass depends on the text alone.
_STEP = 8
_TOKENS = 4096
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Show = Callable[[Iterable[Any]], Iterable[Any]]
Change = Callable[[Tensor], Tensor]


@contextmanager
def hide_loading_bar(transformers: Any) -> Iterator[None]:
    """Hide the bar that transformers draws while it loads weights."""
    logs = transformers.utils.logging
    was_shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logs.enable_progress_bar()


class TextEncoder:
    """A frozen public encoder of a folder of weights, and its tokenizer.

    Args:
        folder: as `transformers` stores a model.
        length: tokens that are read of a text.
        precision: of weights and hidden states, "float32" or "bfloat16"; means are float32.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the folder holds no tokenizer, or no model with hidden states.
    """

    def __init__(self, folder: str | Path, length: int = 256, precision: str = "float32") -> None:
        transformers: Any = import_module("transformers")

        check_integer("length", length, 1)
        check_one_of("precision", precision, tuple(_PRECISIONS))
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            with hide_loading_bar(transformers):
                model = transformers.AutoModel.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:20]
            raise ValueError(
                f"{str(folder)[-36:]}: not a text encoder with a tokenizer ({reason}…); name a"
                " folder that save_pretrained wrote for both"
            ) from None
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{str(folder)[-60:]}: holds an encoder and a decoder; name a folder of an encoder"
                " alone, such as BERT"
            )
        # transformers makes an empty tokenizer where the folder holds none.
        tokens, rows = len(tokenizer), model.get_input_embeddings().num_embeddings
        if tokens <= len(tokenizer.all_special_tokens) or tokens > rows:
            raise ValueError(
                f"{str(folder)[-60:]}: its tokenizer has {tokens} tokens, and its encoder {rows};"
                " add the tokenizer of this encoder to the folder"
            )
        model = model.to(_PRECISIONS[precision])
        self.model: nn.Module = model.requires_grad_(False).eval()
        self._tokenizer = tokenizer
        window = model.config.to_dict().get("max_position_embeddings", length)
        self.length = min(length, window, tokenizer.model_max_length)

    @property
    def digest(self) -> str:
        """SHA-256 of all weights."""
        hashed = hashlib.sha256()
        for name, weight in sorted(self.model.state_dict().items()):
            hashed.update(name.encode())
            hashed.update(content_bytes(weight))
        return hashed.hexdigest()

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of each text, cut at `length`."""
        # A tokenizer takes no lone surrogates.
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        encoded = self._tokenizer(whole, truncation=True, max_length=self.length)
        return [list(ids) for ids in encoded["input_ids"]]

    @torch.no_grad()
    def means(
        self, texts: Sequence[str], show: Show = iter, change: Change | None = None
    ) -> Tensor:
        """Return means over the tokens of each hidden layer, float32 `[N, (L + 1) · width]`.

        Args:
            texts: an empty one has the means of what the tokenizer adds to it, or zeros.
            show: wraps the passes, as a progress bar does.
            change: what the means of a pass become, row by row.
        """
        ids = self.tokens(texts)
        places: dict[int, list[int]] = {}
        for place, tokens in enumerate(ids):
            size = max(math.ceil(len(tokens) / _STEP), 1) * _STEP
            places.setdefault(size, []).append(place)
        passes = []
        for size, group in sorted(places.items()):
            rows = max(_TOKENS // size, 1)
            for at in range(0, len(group), rows):
                passes.append((size, rows, group[at : at + rows]))
        means = torch.empty(0)
        for size, rows, group in show(passes):
            values = self._means_of_pass([ids[place] for place in group], size, rows)
            values = change(values) if change else values
            if not means.numel():
                means = torch.zeros(len(ids), values.shape[1])
            means[group] = values[: len(group)]
        return means

    def _means_of_pass(self, ids: Sequence[Sequence[int]], size: int, rows: int) -> Tensor:
        # A last pass is filled up: no other text moves the rounding of a text's means.
        tokens = torch.zeros(rows, size, dtype=torch.long)
        mask = torch.zeros(rows, size, dtype=torch.long)
        for row, known in enumerate(ids):
            tokens[row, : len(known)] = torch.tensor(known, dtype=torch.long)
            mask[row, : len(known)] = 1
        mask[len(ids) :, 0] = 1
        output = self.model(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
        weights = mask.unsqueeze(-1).float()
        counts = weights.sum(1).clamp_min(1)
        means = [(states * weights).sum(1) / counts for states in output.hidden_states]
        return torch.cat(means, 1)
