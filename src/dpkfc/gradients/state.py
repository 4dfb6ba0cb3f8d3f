"""What a forward pass may leave in a model: nothing that it has computed from private examples.

Parameters, buffers and extra state (`get_extra_state`) may not change at all: they are in every
checkpoint, and only released gradients move them. Every pass runs on a replica (`replica.py`), so
that nothing else stays either, counters too, since the number of passes is private.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.distributed.fsdp import reshard
from dpkfc.gradients.registrations import watch_registrations
from dpkfc.gradients.replica import Replica, replicate
from dpkfc.gradients.value_comparison import are_equal
from dpkfc.memory import is_out_of_memory


class StateChangedError(ValueError):
    """A pass has changed what only releases may change; it ends the run."""


def ends_run(error: Exception) -> bool:
    """Return whether an error says nothing of a record: memory ran out, or weights were written."""
    return isinstance(error, StateChangedError) or is_out_of_memory(error)


@contextmanager
def refuse_change(find_fault: Callable[[], str]) -> Iterator[None]:
    """Raise a StateChangedError after the body, whatever it has raised, if there is a fault."""
    try:
        yield
    finally:
        fault = find_fault()
        if fault:
            raise StateChangedError(fault)


@contextmanager
def own_pass(model: nn.Module) -> Iterator[None]:
    """Run a pass over private examples on a replica of the model.

    A parameter is seen to be written by torch's counter, and is then erased: a copy of all
    parameters in every pass would double their memory. `checked_state` copies them, for the check
    before the first release.

    Raises:
        StateChangedError: naming a parameter or a module, which would carry statistics of private
            data outside the mechanism.
    """
    extra = copy_extra_states(model)

    def find_written() -> str:
        reshard(model)  # FSDP2 puts gathered parameters into the modules
        return erase_written(replica)

    with (
        replicate(model) as replica,
        refuse_change(lambda: restore_extra_states(model, extra)),
        refuse_change(find_written),
        watch_registrations(model, replica.note_self_set),
    ):
        yield


PUT_BACK = "use a parametrization, or write after each step and call accept_weights()"
ERASED = "its value is unknown and has been erased: load the last checkpoint (docs/errors.md#state)"


def refuse_write(name: str, fate: str) -> str:
    """Return the message on a parameter that a pass has written."""
    return f"the forward pass writes to the parameter '{name}'; {fate}"


def erase_written(replica: Replica) -> str:
    """Erase parameters that passes have written, and return the message that refuses the first.

    A trainable parameter that is another object now is refused too. The message is empty if no
    parameter has changed.
    """
    faults = []
    # No mode need see that counters of writes are read.
    with torch._C.DisableTorchFunction():
        written = list(replica.written_parameters())
    for name, p in written:
        erase(p)
        faults.append(refuse_write(name, ERASED))
    for name, old, _ in replica.replaced_parameters():
        if old is not None and old.requires_grad:
            faults.append(refuse_write(name, PUT_BACK))
    return next(iter(faults), "")


def erase(p: Tensor) -> None:
    """Overwrite a parameter whose value is private now."""
    with torch.no_grad():
        p.fill_(float("nan") if p.is_floating_point() else 0)


# -- extra state -----------------------------------------------------------------------------------


def copy_extra_states(model: nn.Module) -> dict[str, Any]:
    """Return copies of the extra state of all modules that have one, by path."""
    return {
        path: _extra_state(m)
        for path, m in model.named_modules()
        if type(m).get_extra_state is not nn.Module.get_extra_state
    }


def _extra_state(module: nn.Module) -> Any:
    state: Any = module.get_extra_state()
    if isinstance(state, io.BytesIO):
        state = state.getvalue()
    return Replica().copy(state)


def restore_extra_states(model: nn.Module, before: Mapping[str, Any]) -> str:
    """Restore extra state that passes have changed, and return the message that refuses it."""
    fault = ""
    for path, state in before.items():
        module = model.get_submodule(path)
        if not are_equal(_extra_state(module), state):
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                module.set_extra_state(state)
            kind = type(module).__name__
            fault = fault or (
                f"the forward pass changes the extra state of the module '{path}' "
                f"({kind}.get_extra_state), which would carry private data into checkpoints; "
                "freeze it"
            )
    return fault
