"""Text that a public language model writes, as a probe: what its own layers see then is close to real text, at no cost in ε.

The weights that are fine-tuned are public before the first private step, and so is everything computed from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.curvature.inputs import device_of
from dpkfc.curvature.probes import PublicData
from dpkfc.curvature.probing import undisturbed

__all__ = ["generated_text"]

_WANTED = (
    "generated_text needs a causal language model that is called as model(input_ids=..., past_key_values=..., use_cache=True), "
    "as those of transformers are; give texts of another one as PublicData(...)"
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

    Call it before private training, or on released weights: what has seen private examples without noise voids the guarantee.

    Args:
        model: called as `model(input_ids=..., past_key_values=..., use_cache=True)`, as those of transformers are, with or
            without adapters; its parameters, modes, buffers and the global random state stay as they are.
        n: texts, once and for all; a refresh draws its `probe_size` of them.
        length: tokens of a text T, the first included.
        start_id: the first token (GPT-2 begins a text with its end-of-text token).
        end_id: a text is over behind this token, None if it never is.
        pad_id: what fills a text that is over, masked; None takes `end_id`.
        seed: of the public stream that tokens are drawn from, each from the model's whole distribution.
        chunk: texts written at once; another value draws others.
        provenance: of the weights, for the privacy card.

    Returns:
        `input_ids` and `attention_mask`, int64 `[n, length]`; no labels.

    Raises:
        ValueError: sizes that are not positive, or logits that are not finite.
        TypeError: the model cannot be called so.
    """
    if n < 1 or length < 2 or chunk < 1:
        raise ValueError(f"generated_text: n and chunk must be at least 1 and length 2, got {n}, {chunk} and {length}")
    generator = torch.Generator().manual_seed(seed)
    with undisturbed(model), torch.no_grad():
        parts = [_written(model, min(chunk, n - at), length, start_id, generator) for at in range(0, n, chunk)]
    ids, mask = torch.cat(parts), torch.ones(n, length, dtype=torch.int64)
    if end_id is not None:
        ended = (ids[:, 1:] == end_id).long().cumsum(1)
        mask[:, 2:] = (ended[:, :-1] == 0).long()  # the end itself is part of the text
        ids = torch.where(mask == 1, ids, end_id if pad_id is None else pad_id)
    told = f"written by {type(model).__name__}" + (f" ({provenance})" if provenance else "") + f", seed {seed}"
    return PublicData({"input_ids": ids, "attention_mask": mask}, provenance=told)


def _written(model: nn.Module, n: int, length: int, start_id: int, generator: torch.Generator) -> Tensor:
    """Texts `[n, length]`, one token after another."""
    ids, past = torch.full((n, 1), start_id), None
    while ids.shape[1] < length:
        out = _called(model, ids[:, -1:].to(device_of(model)), past)
        logits, past = out.logits[:, -1].double().cpu(), out.past_key_values
        if not torch.isfinite(logits).all():
            raise ValueError("generated_text: the model's logits contain NaN or infinity")
        ids = torch.cat([ids, torch.multinomial(logits.softmax(1), 1, generator=generator)], dim=1)
    return ids


def _called(model: nn.Module, ids: Tensor, past: Any) -> Any:
    try:
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
    except TypeError as error:
        raise TypeError(f"{_WANTED}: {error}") from error
    if getattr(out, "logits", None) is None or getattr(out, "past_key_values", None) is None:
        raise TypeError(f"{_WANTED}: it returned a {type(out).__name__} without logits or past_key_values")
    return out
