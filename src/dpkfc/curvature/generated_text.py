"""Text that a public language model writes, as a probe.

What its own layers see is then close to real text, at no cost in ε: the weights are public before
the first private step, and so is everything computed from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpkfc._checks import check_integer
from dpkfc.curvature.model_inputs import device_of_model
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probes import PublicData

_WANTED = (
    "generated_text needs a causal language model that is called as model(input_ids=..., "
    "past_key_values=..., use_cache=True), like models of transformers; give other texts as "
    "PublicData(...)"
)


def generated_text(
    model: nn.Module,
    n: int,
    length: int,
    *,
    start_id: int,
    end_id: int | None = None,
    pad_id: int | None = None,
    seed: int = 0,
    chunk: int = 64,
    provenance: str = "",
) -> PublicData:
    """Sample texts from a causal language model, for `KFAC(probe=...)`.

    Call this before private training, or on released weights: weights that have seen private
    examples without noise void the guarantee.

    Args:
        model: called as `model(input_ids=..., past_key_values=..., use_cache=True)`, as models of
            transformers are. Its parameters, modes, buffers and the global random state stay as
            they are.
        n: number of texts, sampled once; a refresh samples its `probe_size` of them.
        length: tokens of a text T, the first included.
        start_id: the first token (GPT-2 begins a text with its end-of-text token).
        end_id: a text ends with this token, None if it never ends.
        pad_id: fills a text that has ended, masked; None takes `end_id`.
        seed: of the public stream that tokens are drawn from, by the model's whole distribution.
        chunk: texts written at once; another value draws others.
        provenance: of the weights, for the privacy card.

    Returns:
        `input_ids` and `attention_mask`, int64 `[n, length]`; no labels.

    Raises:
        ValueError: sizes that are not positive, or logits that are not finite.
        TypeError: the model cannot be called like this.
    """
    check_integer("generated_text: n", n, 1)
    check_integer("generated_text: length", length, 2)
    check_integer("generated_text: chunk", chunk, 1)
    generator = torch.Generator().manual_seed(seed)
    texts = []
    with preserve_model(model), torch.no_grad():
        for first in range(0, n, chunk):
            size = min(chunk, n - first)
            texts.append(_write(model, size, length, start_id, generator))
    ids = torch.cat(texts)
    mask = torch.ones(n, length, dtype=torch.int64)
    if end_id is not None:
        ended = (ids[:, 1:] == end_id).long().cumsum(1)
        # The end itself is part of the text.
        is_text = ended[:, :-1] == 0
        mask[:, 2:] = is_text.long()
        ids = torch.where(mask == 1, ids, end_id if pad_id is None else pad_id)
    origin = f"written by {type(model).__name__}"
    if provenance:
        origin += f" ({provenance})"
    inputs = {"input_ids": ids, "attention_mask": mask}
    return PublicData(inputs, provenance=f"{origin}, seed {seed}")


def _write(
    model: nn.Module, n: int, length: int, start_id: int, generator: torch.Generator
) -> Tensor:
    """Return texts `[n, length]`, written one token after another."""
    token = torch.full((n, 1), start_id)
    tokens = [token]
    past = None
    while len(tokens) < length:
        out = _call(model, token.to(device_of_model(model)), past)
        past = out.past_key_values
        logits = out.logits[:, -1].double().cpu()
        if not torch.isfinite(logits).all():
            raise ValueError("generated_text: the model's logits contain NaN or infinity")
        token = torch.multinomial(logits.softmax(1), 1, generator=generator)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def _call(model: nn.Module, ids: Tensor, past: Any) -> Any:
    try:
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
    except TypeError as error:
        raise TypeError(f"{_WANTED}: {error}") from error
    if getattr(out, "logits", None) is None or getattr(out, "past_key_values", None) is None:
        raise TypeError(
            f"{_WANTED}: it returned a {type(out).__name__} without logits or past_key_values"
        )
    return out
