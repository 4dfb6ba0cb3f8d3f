"""When the model of a script is compared with plain autograd: at batches 1, 2, 4, 8, … and after every new switch.

One batch proves little for later ones. A model may be switched in the middle of a run (`model.centre = True`, a module put into
another mode), and what is mixed at random shows under some random numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from dpkfc.gradients.layers import Layer
from dpkfc.integrations._checks import check_model
from dpkfc.integrations._padding import check_padding, warn_of_changed_rows
from dpkfc.integrations._rows import Inputs

__all__ = ["Looks"]

_SWITCHED = 32  # positions of the switches that are looked at; a model that throws dice with them has no end of them


class Looks:
    """The comparisons of one run.

    Args:
        model: the model.
        layers: of it.
        source: the script's own loader, in whose batches padding is looked at; None leaves that out.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], source: DataLoader[Any] | None) -> None:
        self._model, self._layers, self._source = model, layers, source
        self._passes, self._next = 0, 1
        self._seen: set[tuple[bool, ...]] = set()
        self._warned = False

    def look(self, inputs: Inputs, size: int, batch: Any, drawn: Iterable[int]) -> None:
        """A pass is about to be recorded: compare, where that is due. It stays due after a batch of one example.

        Args:
            inputs: (args, kwargs) of the call of the model.
            size: examples in them, at least 1.
            batch: as the loader handed it out; None before the first.
            drawn: indices of its examples. PRIVATE.

        Raises:
            ValueError: what `check_model` and `check_padding` raise.
        """
        self._passes += 1
        switches = _switches(self._model)
        new = switches not in self._seen and len(self._seen) < _SWITCHED
        if self._passes < self._next and not new:
            return
        try:
            self._compare(inputs, size, batch, drawn)
        except ValueError as error:
            if not self._seen:
                raise
            raise ValueError(
                f"{error} This is batch {self._passes}, and earlier ones did not show it: what was released before may have no "
                "bound either; begin anew"
            ) from error
        if size > 1:
            self._seen.add(switches)
            while self._next <= self._passes:
                self._next *= 2

    def _compare(self, inputs: Inputs, size: int, batch: Any, drawn: Iterable[int]) -> None:
        check_model(self._model, self._layers, inputs, size)
        if self._source is None or batch is None:
            return
        check_padding(self._model, inputs, batch, self._source, drawn)
        if size > 1 and not self._warned:
            self._warned = warn_of_changed_rows(inputs, batch, size)


def _switches(model: nn.Module) -> tuple[bool, ...]:
    """Attributes of all modules that are True or False, `training` among them."""
    return tuple(value for module in model.modules() for value in vars(module).values() if isinstance(value, bool))
