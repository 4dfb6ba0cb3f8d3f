"""Reads of values that change no result: they choose between forms of one computation."""

from __future__ import annotations

import sys
from traceback import walk_stack
from typing import Any

# Functions whose branches on values only choose between forms with equal results, or only check
# values.
_HARMLESS_READS = frozenset(
    {
        ("transformers.masking_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"),
        ("transformers.masking_utils", "find_packed_sequence_indices"),
        ("transformers.modeling_attn_mask_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.modeling_attn_mask_utils", "_prepare_4d_attention_mask_for_sdpa"),
        ("transformers.modeling_utils", "warn_if_padding_and_no_attention_mask"),
        ("torch.nn.functional", "ctc_loss"),
        ("torch.nn.functional", "multi_head_attention_forward"),
        ("dpkfc.tracking.python_calls", "call_one_hot"),
    }
)
# Checks that raise an error unless they read this value.
_CHECKS = {
    ("torch.distributions.distribution", "__init__"): True,
    ("torch.distributions.distribution", "_validate_sample"): True,
    ("torch.nn.functional", "gaussian_nll_loss"): False,
}


def is_harmless(value: Any = None) -> bool:
    """Return whether a listed function reads the value; its branches give one result."""
    harmless = _HARMLESS_READS.union(key for key, good in _CHECKS.items() if value is good)
    for frame, _ in walk_stack(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        if (module, frame.f_code.co_name) in harmless:
            return True
        # a user's function reads what it wants
        if not (is_of_torch(module) or module.startswith("transformers.")):
            return False
    return False


def is_of_torch(module: str) -> bool:
    """Return whether a Python module belongs to torch, or to this library."""
    return module.partition(".")[0] in ("torch", "dpkfc")
