"""Which embedding was asked for a row that it does not have."""

from __future__ import annotations

from torch import nn

__all__ = ["unknown_row"]


def unknown_row(model: nn.Module, error: BaseException) -> str | None:
    """A sentence on the embedding whose forward pass raised an IndexError; None where it was raised elsewhere.

    The offending id is private data and is not repeated.

    Args:
        model: whose modules are named.
        error: as caught; its traceback holds the module that was running.
    """
    trace = error.__traceback__
    found: nn.Embedding | None = None
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        found = own if isinstance(own, nn.Embedding) else found
        trace = trace.tb_next
    if found is None:
        return None
    name = next((name for name, module in model.named_modules() if module is found), type(found).__name__)
    return (
        f"embedding '{name}' has {found.num_embeddings} rows, and the batch holds an id outside 0 … "
        f"{found.num_embeddings - 1}. For token ids compare len(tokenizer) with num_embeddings (resize_token_embeddings before "
        "the optimizer and the session are created); for position ids shorten the sequences"
    )
