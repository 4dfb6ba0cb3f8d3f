"""Single examples of what a script calls its model with, and of what the model returns.

The leading axis is the batch, but for two things that scripts pass and return beside it: hidden states of recurrent modules,
`[layers, batch, hidden]`, which are known by the modules of the model, and lists with one number or text an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["Inputs", "is_plain_list", "picker", "row_outputs"]

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of a call."""

# What a call may raise on a batch that was not cut as it is meant to be; a ValueError is told as it is.
_FAILURES = (RuntimeError, TypeError, LookupError, AssertionError, AttributeError, NotImplementedError)


def is_plain_list(x: Any, size: int) -> bool:
    """Whether it is a list or tuple of so many numbers or texts."""
    return type(x) in (list, tuple) and 0 < len(x) == size and all(isinstance(y, (int, float, str, bytes)) for y in x)


def picker(inputs: Inputs, size: int, model: nn.Module | None = None) -> Callable[..., Inputs]:
    """A function of numbers of examples to the inputs of these examples.

    What all examples share (a table, a number) is left whole.

    Args:
        inputs: of a batch.
        size: examples in it.
        model: whose recurrent modules tell what hidden states look like.

    Raises:
        ValueError: a PackedSequence, of which no example can be taken.
    """
    states = _states(model)
    if any(isinstance(x, PackedSequence) for x in tree_flatten(inputs, is_leaf=_is_packed)[0]):
        raise ValueError(
            "an input of the model is a PackedSequence, in which the examples of a batch are interleaved: pass the padded batch "
            "and its lengths, as a tensor [batch], and pack them inside forward: pack_padded_sequence(x, lengths.cpu(), "
            "batch_first=True, enforce_sorted=False)"
        )

    def pick(*chosen: int) -> Inputs:
        split = list(chosen)

        def of(x: Any) -> Any:
            if is_plain_list(x, size):
                return type(x)(x[i] for i in split)
            if not isinstance(x, Tensor) or not x.dim():
                return x
            if x.dim() == 3 and x.shape[1] == size and (x.shape[0], x.shape[2]) in states:
                return x[:, split]
            return x[split] if x.shape[0] == size else x

        picked: Inputs = tree_map(of, inputs, is_leaf=lambda x: is_plain_list(x, size))
        return picked

    return pick


def row_outputs(model: nn.Module, inputs: Inputs, whole: Inputs, size: int) -> list[Tensor]:
    """The floating-point outputs of a model that have rows for each example, each as `[size, numbers]`.

    Args:
        model: the model.
        inputs: some examples of a batch.
        whole: the batch; where the model cannot be called on that either, its own error is raised.
        size: how many examples `inputs` holds.

    Raises:
        ValueError: the model takes the batch, but no part of it.
    """
    with _hidden_states(model) as hidden:
        outputs = _called(model, inputs, whole)
    rows = []
    for x in tree_flatten(outputs)[0]:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or not size:
            continue
        if x.dim() == 3 and x.shape[1] == size and x.untyped_storage().data_ptr() in hidden:
            rows.append(x.movedim(1, 0).reshape(size, -1))
        elif x.shape[0] and x.shape[0] % size == 0:
            rows.append(x.reshape(size, -1))
    return rows


@contextmanager
def _hidden_states(model: nn.Module) -> Iterator[set[int]]:
    """Where the hidden states are that the model's recurrent modules return inside: nothing else tells them from rows."""
    found: set[int] = set()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        found.update(x.untyped_storage().data_ptr() for x in tree_flatten(output[1])[0])

    handles = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.RNNBase)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _called(model: nn.Module, inputs: Inputs, whole: Inputs) -> Any:
    args, kwargs = inputs
    try:
        return model(*args, **kwargs)
    except _FAILURES as error:
        with torch.no_grad():
            model(*whole[0], **whole[1])
        raise ValueError(
            f"the model takes the whole batch but not single examples of it, which are compared before anything is released: "
            f"{error}. Examples are cut from tensors along the leading axis, from hidden states [layers, batch, hidden] of the "
            "model's recurrent modules along the second, and from lists with one number or text an example. Make hidden states "
            "inside forward, pass lengths as a tensor [batch], pack sequences inside forward; or leave the comparison out with "
            "make_private(verify=False): then nobody looks whether the model mixes examples or keeps something of them"
        ) from error


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _states(model: nn.Module | None) -> set[tuple[int, int]]:
    """Leading and last axis of the hidden states of a model's recurrent modules."""
    found: set[tuple[int, int]] = set()
    modules: Iterable[nn.Module] = () if model is None else model.modules()
    for m in modules:
        if isinstance(m, nn.RNNBase):
            layers = m.num_layers * (2 if m.bidirectional else 1)
            found |= {(layers, m.hidden_size), (layers, m.proj_size or m.hidden_size)}
    return found
