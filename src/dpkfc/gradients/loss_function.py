"""The loss function of a user: one loss for each example, and what it raises on a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from dpkfc._errors import find_own_line
from dpkfc.gradients.layers import paths_of
from dpkfc.gradients.loss_state import own_variables

LossFn = Callable[[nn.Module, Any], Tensor]
"""Maps the model and a batch to one loss a row `[n]`."""


def losses_of(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    """Return the losses of a batch, with what loss_fn changes elsewhere undone.

    Raises:
        ValueError: a row outside of an embedding table, or a label out of the range of the loss.
    """
    try:
        with own_variables(loss_fn, model):
            return loss_fn(model, batch)
    except IndexError as error:
        message = unknown_row(model, error)
        texts = ("out of bounds", "out of range in self")
        if message is None and any(text in str(error) for text in texts):
            message = (
                f"loss_fn failed on a batch ({find_own_line(error)}): a label, token id or index"
                " is outside the range of the model or the tensor"
            )
        if message is None:
            raise  # a mistake of the function itself
        raise ValueError(message) from error


def check_losses(losses: Tensor, batch_size: int | None = None) -> None:
    """Raise unless losses is a float vector with one entry an example.

    Raises:
        ValueError: naming the shape and the fix.
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        is_tensor = isinstance(losses, Tensor)
        found = tuple(losses.shape) if is_tensor else type(losses).__name__
        raise ValueError(
            f"loss_fn must return one loss per example, a vector [batch]; got {found}. Use "
            "reduction='none' and average over each example's own positions"
        )
    if not losses.is_floating_point():
        raise ValueError(f"losses must be floating point, got {losses.dtype}")
    if batch_size not in (None, losses.shape[0]):
        raise ValueError(
            f"loss_fn returned {losses.shape[0]} losses for {batch_size} examples; the leading "
            "axis must be the batch"
        )


def unknown_row(model: nn.Module, error: BaseException) -> str | None:
    """Return a message on the embedding that was asked for a row that it does not have.

    The offending id is private data and is not repeated.

    Args:
        model: whose modules are named.
        error: an IndexError. Its traceback holds the module that was running.

    Returns:
        None where no embedding raised the error.
    """
    embedding: nn.Embedding | None = None
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Embedding):
            embedding = module
    if embedding is None:
        return None
    name = paths_of(model).get(embedding, type(embedding).__name__)
    last = embedding.num_embeddings - 1
    return (
        f"embedding '{name}' has {embedding.num_embeddings} rows, and the batch holds an id "
        f"outside 0 … {last}. For token ids compare len(tokenizer) with num_embeddings "
        "(resize_token_embeddings before the optimizer and the session are created); for position "
        "ids shorten the sequences"
    )


def identify_program(function: Any) -> Any:
    """Return the code of a loss function, whatever object or arguments the function is bound to."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))
