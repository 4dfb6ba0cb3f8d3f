"""State that a loss function or an augmentation keeps from one call to the next.

A memory of past features, a running mean or a counter would let one example move the gradients of
others, in other steps too. It may lie in the object whose method the function is, in a `partial`,
in a closure or in a global variable. Modules that the function reaches, and that are not part of
the model, may not change their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from torch import Tensor, nn

from dpkfc.gradients.replica import Replica, replicate_variables
from dpkfc.gradients.state import erase_written, refuse_change
from dpkfc.gradients.state_check import note_call


def make_stateless(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the loss function, each call of which has variables of its own.

    Raises:
        StateChangedError: from a call that changes a buffer or a parameter of a module that is not
            a part of the model, or a tensor of more than a megabyte, which is not copied.
    """

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with own_variables(loss_fn, model):
            return loss_fn(model, batch)

    # The wrapper shows the code of loss_fn.
    return update_wrapper(losses, loss_fn, assigned=(), updated=())


@contextmanager
def own_variables(function: Any, model: nn.Module, name: str = "loss_fn") -> Iterator[None]:
    """Run a call of a function with values of their own for all variables that it reaches.

    Those that the code of the model reaches have them too.

    Args:
        function: a loss function or an augmentation.
        model: the model that is trained. Its own attributes have theirs from `own_pass`.
        name: of the function, for messages.

    Raises:
        StateChangedError: as `make_stateless`.
    """
    with (
        replicate_variables(model, function) as replica,
        refuse_change(lambda: _find_fault(replica, name)),
    ):
        yield


def _find_fault(replica: Replica, name: str) -> str:
    """Return the message that refuses what a call has changed, empty without one."""
    faults = [erase_written(replica), *note_call(replica, name)]
    lost = replica.find_lost()
    if lost is not None:
        variable, x = lost
        if isinstance(x, Tensor):
            faults.append(
                f"{name} writes to a tensor that it reaches by '{variable}', and that "
                "is too large to be put back; compute each example without a memory of others"
            )
        else:
            faults.append(
                "model, loss_fn or augment advances a generator, which cannot be put back"
                " after a pass; take its values before training (docs/errors.md#state)"
            )
    return next(filter(None, faults), "")
