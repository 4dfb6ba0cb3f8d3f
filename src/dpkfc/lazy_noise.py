"""Let the noise of embedding rows wait until they are read: a step costs what its records read.

In DP-SGD a row that no record of a batch reads gets noise alone. That noise can wait: before the
row is read, it gets the sum of the steps that have passed it over, one Gaussian whose variance is
(σC/B)² Σ lr² (LazyDP, Lim et al., ASPLOS 2024). A row that is read gets the noise of its own step
with its gradient, in the one release of the step.

Which rows wait is private: it shows what records have read. So a table with waiting noise is empty.
Its values lie in a copy here, its own memory holds NaN, and other code, with an older reference
too, reads that. A call of the module in a private pass finds its own rows there, brought up to
date, and no others. Whatever else asks for the weights (a state dict, a forward pass elsewhere, the
session's own methods, the end) makes all rows up to date first and puts them back. These weights
have the distribution that DP-SGD gives them, for real numbers: rounding depends on when a row was
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from dpkfc.config import Plan
from dpkfc.gradients.hook import Hook
from dpkfc.gradients.layers import Layer
from dpkfc.gradients.model_checks import check_finite
from dpkfc.privacy.grid import GAUSSIAN
from dpkfc.privacy.mechanism import Released, add_waiting_noise
from dpkfc.privacy.rng import NoiseStream
from dpkfc.tensors import Tensors
from dpkfc.weights import ReleasedWeights

_BLOCK = 1 << 16
"""Rows that are brought up to date at once."""
_NEVER = torch.iinfo(torch.int32).max


@dataclass(eq=False)
class _Waiting:
    """PRIVATE: the values of a table whose noise waits.

    Attributes:
        table: the empty parameter.
        rows: its values `[V, d]`.
        last: how many steps' noise each row has, int32 `[V]`; padding never gets any.
        squares: Σ lr² of the steps behind each count of steps, float64 `[steps + 1]`.
        place: address of the empty table, and torch's count of writes to it.
        shown: rows that the table holds during a call.
        touched: rows with a gradient in this step.
        update: their noisy gradient.
        unfinished: rows, their new values, and `squares`, that are being written.
    """

    table: Tensor
    rows: Tensor
    last: Tensor
    squares: Tensor
    place: tuple[int, int]
    shown: Tensor | None = None
    touched: Tensor | None = None
    update: Tensor | None = None
    unfinished: tuple[Tensor, Tensor, Tensor] | None = None

    def finish(self) -> None:
        """Write rows that have the noise of all steps, also where Ctrl-C came in between.

        Which rows those are is private, so none may have noise twice.
        """
        if self.unfinished is not None:
            ids, values, self.squares = self.unfinished
            self.rows.index_copy_(0, ids, values)
            self.last.index_fill_(0, ids, len(self.squares) - 1)
            self.unfinished = None


class LazyNoise:
    """The embedding tables of one session whose noise may wait.

    Args:
        plan: of the session.
        noise: the noise stream of the run.
        weights: knows which weights were released.

    Attributes:
        tables: names of the parameters to their layers; empty while no noise may wait.
        weights: as given.

    Guarantee:
        Outside of a call of its module in a private pass, a table holds the weights that DP-SGD
        would have made, in all rows, or NaN in all rows.
    """

    def __init__(self, plan: Plan, noise: NoiseStream, weights: ReleasedWeights) -> None:
        self.tables: dict[str, Layer] = {}
        self._plan = plan
        self._noise = noise
        self.weights = weights
        self._waiting: dict[str, _Waiting] = {}
        self._in_passes = False
        self._step = 0
        self._draws: Counter[bool] = Counter()

    # -- the block ---------------------------------------------------------------------------------

    @contextmanager
    def allowed(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let noise wait inside the body.

        Args:
            layers: of the model; all embeddings among them are meant.
            optimizer: of the session.

        Raises:
            ValueError: settings, an optimizer or tables that noise cannot wait for.
        """
        if self.tables:
            raise ValueError("lazy_noise: its block is open already; enter it once")
        _refuse_plan(self._plan)
        tables = _find_tables(layers)
        for name, layer in tables.items():
            _find_rate(optimizer, name, layer)
        self.tables = tables
        with ExitStack() as stack:
            for name, layer in tables.items():
                for handle in self._register_hooks(name, layer.module):
                    stack.callback(handle.remove)
            try:
                yield
            finally:
                self._in_passes = False
                self.expose()
                self.tables = {}

    def _register_hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        def expose(*_: Any) -> None:
            self.expose()

        show = _WaitingHook(self, partial(self._show, name))
        yield module.register_forward_pre_hook(show, with_kwargs=True)
        cover = _WaitingHook(self, partial(self._cover, name))
        yield module.register_forward_hook(cover, always_call=True)
        yield module.register_state_dict_pre_hook(_WaitingHook(self, expose))
        yield module.register_load_state_dict_pre_hook(_WaitingHook(self, expose))

    @property
    def is_waiting(self) -> bool:
        """Return whether any table is empty."""
        return bool(self._waiting)

    def expose(self) -> None:
        """Bring all rows up to date and put them back; private passes cannot ask for that."""
        if self._in_passes:
            return
        for name, waiting in list(self._waiting.items()):
            with _hide_from_modes():
                count = len(waiting.rows)
                for first in range(0, count, _BLOCK):
                    last = min(count, first + _BLOCK)
                    self._bring_up(waiting, torch.arange(first, last, device=waiting.rows.device))
                is_counted = waiting.table._version != waiting.place[1]
                is_written = is_counted or not waiting.table.isnan().all()
                waiting.table.data.copy_(waiting.rows)
                del self._waiting[name]
                self.weights.take_back(name, is_written=bool(is_written))

    def _bring_up(self, waiting: _Waiting, rows: Tensor) -> None:
        """Give rows, each named once, the noise of the steps that have passed them over."""
        waiting.finish()
        last = waiting.last.index_select(0, rows)
        is_due = last < len(waiting.squares) - 1
        due, last = rows[is_due], last[is_due].long()
        if not len(due):
            return
        stddev = waiting.squares[last].sqrt() * (self._plan.stddev / self._plan.expected_batch_size)
        # Test mode draws the same again after a resume: inside of steps, and between them.
        number = (self._step << 1 | self._in_passes) << 24 | self._draws[self._in_passes]
        self._draws[self._in_passes] += 1
        noisy = add_waiting_noise(waiting.rows[due], stddev, self._noise, 1 << 63 | number)
        waiting.unfinished = due, noisy, waiting.squares
        waiting.finish()

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Check the settings of the optimizer and the empty tables.

        Raises:
            ValueError: noise cannot wait for the optimizer as it is now.
            RuntimeError: an empty table was moved or written.
        """
        if step != self._step:
            self._step = step
            self._draws.clear()
        for name, layer in self.tables.items():
            _find_rate(optimizer, name, layer)
        for name, waiting in self._waiting.items():
            if _place_of(self.tables[name].tensor("weight")) != waiting.place:
                raise RuntimeError(
                    f"'{name}' was moved or written while its noise waits and it is empty: call"
                    " model.state_dict() first, which fills it, or leave lazy_noise()"
                )

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Run private passes, in which a call of a module finds the rows that it reads."""
        for name, layer in self.tables.items():
            if name not in self._waiting:
                self._hide(name, layer)
        self._in_passes = bool(self.tables)
        try:
            yield
        finally:
            self._in_passes = False
            for name in self._waiting:
                self._cover(name)

    def _hide(self, name: str, layer: Layer) -> None:
        """Empty a table, whose values move here."""
        check_finite([layer])
        self.weights.set_aside(name)
        table = layer.tensor("weight")
        last = torch.zeros(len(table), dtype=torch.int32, device=table.device)
        padding = _padding_of(layer)
        if padding is not None:
            last[padding] = _NEVER
        squares = torch.zeros(1, dtype=torch.float64, device=table.device)
        rows = table.detach().clone()
        self._waiting[name] = _Waiting(table, rows, last, squares, _place_of(table))
        # Not a write that torch counts: those are of other code.
        table.data.fill_(torch.nan)

    def _show(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Put the rows that a call reads into the table, or all where the call is not private."""
        waiting = self._waiting.get(name)
        if waiting is None:
            return
        if not self._in_passes:
            self.expose()
            return
        ids = args[0] if args else kwargs["input"]
        with _hide_from_modes():
            rows = ids.detach().unique().long()
            self._bring_up(waiting, rows)
            waiting.shown = rows
            waiting.table.data.index_copy_(0, rows, waiting.rows.index_select(0, rows))

    def _cover(self, name: str, *_: Any) -> None:
        """Empty the table again."""
        waiting = self._waiting.get(name)
        if waiting is not None and waiting.shown is not None:
            with _hide_from_modes():
                waiting.table.data.index_fill_(0, waiting.shown, torch.nan)
            waiting.shown = None

    def take_rows(self, sums: Tensors) -> Tensors:
        """Return sums in which each table has the rows `[n, d]` that have a gradient.

        Args:
            sums: with a sparse tensor for each table. PRIVATE, and so is n.
        """
        taken = dict(sums)
        for name, waiting in self._waiting.items():
            ids, rows = sums[name].indices()[0], sums[name].values()
            padding = _padding_of(self.tables[name])
            if padding is not None:
                rows, ids = rows[ids != padding], ids[ids != padding]
            # A gradient can come from elsewhere than from the calls of the module.
            with _hide_from_modes():
                self._bring_up(waiting, ids)
            waiting.touched = ids
            taken[name] = rows
        return taken

    def keep_rows(self, released: Released) -> Released:
        """Return a release without the rows of the tables, which `update` adds."""
        gradients = dict(released.gradients)
        for name, waiting in self._waiting.items():
            waiting.update = gradients.pop(name)
        return replace(released, gradients=gradients)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step of the optimizer in all tables: rows without a gradient wait for it."""
        for name, waiting in self._waiting.items():
            waiting.finish()
            ids, update = waiting.touched, waiting.update
            if ids is None or update is None:
                # Ctrl-C has come behind it.
                continue
            rate = _find_rate(optimizer, name, self.tables[name])
            values = waiting.rows.index_select(0, ids)
            values.add_(update.to(values.dtype), alpha=-rate)
            waiting.unfinished = ids, values, _add_step(waiting.squares, rate)
            waiting.touched = waiting.update = None
            waiting.finish()


class _WaitingHook(Hook):
    """A hook with which an empty table is not copied."""

    def __init__(self, lazy: LazyNoise, function: Any) -> None:
        super().__init__(function)
        self._lazy = lazy

    def __reduce__(self) -> Any:
        if self._lazy.is_waiting:
            _refuse_copy()
        return Hook, ()


def _refuse_copy() -> NoReturn:
    raise RuntimeError(
        "the model has empty tables, whose noise waits: call model.state_dict() first, which fills"
        " them, or copy and pickle it behind lazy_noise()"
    )


@contextmanager
def _hide_from_modes() -> Iterator[None]:
    """Work on tensors without gradients, out of sight of modes that follow operations."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def _place_of(table: Tensor) -> tuple[int, int]:
    return table.data_ptr(), table._version


def _add_step(squares: Tensor, rate: float) -> Tensor:
    """Return Σ lr² behind each count of steps, after one step more, for which all rows wait."""
    return pad(squares + rate**2, (0, 1))


def _padding_of(layer: Layer) -> int | None:
    padding: Any = layer.module.padding_idx
    return padding


# --------------------------------------------------------------------------------------------------
# What noise cannot wait for.


def _refuse_plan(plan: Plan) -> None:
    """Refuse a plan whose noise or update is not independent from row to row.

    Raises:
        ValueError: naming the setting.
    """
    config = plan.config
    if plan.noise != GAUSSIAN:
        raise ValueError(
            f"lazy_noise: noise={plan.noise!r} is defined step by step, and what waits is one sum;"
            f" use noise='{GAUSSIAN}'"
        )
    for name, value in (
        ("preconditioner", config.preconditioner),
        ("postprocess", config.postprocess),
        ("weight_average", config.weight_average),
    ):
        if value:
            raise ValueError(
                f"lazy_noise: {name} needs every row in every step; leave it out, or lazy_noise()"
            )


def _find_tables(layers: Sequence[Layer]) -> dict[str, Layer]:
    """Return the embeddings among some layers by the names of their weights.

    Raises:
        ValueError: there are none, or one that shares its weight or has low precision.
    """
    tables = {}
    for layer in layers:
        modules = [m for m in layer.modules if isinstance(m, nn.Embedding)]
        if layer.rule == "tied" or (layer.rule == "embedding" and len(modules) > 1):
            raise ValueError(
                f"lazy_noise: '{layer.parameters['weight']}' is shared by several modules, which"
                " read all of it; untie it, or leave lazy_noise()"
            )
        if layer.rule != "embedding":
            continue
        name = layer.parameters["weight"]
        dtype = layer.tensor("weight").dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"lazy_noise: '{name}' is {dtype}, which rounds the noise of each step more than a"
                " sum of it; use float32"
            )
        tables[name] = layer
    if not tables:
        raise ValueError("lazy_noise: the model trains no nn.Embedding; leave lazy_noise()")
    return tables


def _find_rate(optimizer: Any, name: str, layer: Layer) -> float:
    """Return the learning rate of a table.

    Raises:
        ValueError: the optimizer is not plain SGD.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise ValueError(
            f"lazy_noise: {type(optimizer).__name__} moves rows by more than their own noise; use"
            " torch.optim.SGD without momentum"
        )
    table = layer.tensor("weight")
    group = next(g for g in optimizer.param_groups if any(p is table for p in g["params"]))
    for setting in ("momentum", "weight_decay", "maximize"):
        if group[setting]:
            raise ValueError(
                f"lazy_noise: SGD has {setting}={group[setting]} for '{name}', and rows that wait"
                " would miss it; leave it out"
            )
    return float(group["lr"])
