"""Plant chosen gradients in a user's loss function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkfc.data.loading import Collate
from dpkfc.data.stored_rows import StoredRows
from dpkfc.memory import is_out_of_memory
from dpkfc.public_rows.template import find_template

LossFn = Callable[[nn.Module, Any], Tensor]
# Positional arguments of a module, or a batch of any parts.
Arguments = tuple[Any, ...]
Augment = Callable[[Any], Any]
NO_CANARY = -1  # the id of a row without a canary


@dataclass(frozen=True, eq=False)
class Plant:
    """Chosen gradients in one module.

    Attributes:
        layer: path of the module.
        ids: of the canaries `[k]`.
        inputs: what the module sees for each of them `[k, ...]`; None if its rows hold it.
        outputs: u for each of them, in the shape of an output `[k, ...]`.
    """

    layer: str
    ids: Tensor
    inputs: Tensor | None
    outputs: Tensor


class PlantedLoss:
    """The user's loss function with canaries in it.

    A batch is the user's own, followed by the ids of its canaries `[n]`.

    Args:
        loss_fn: of the user: maps model and batch to one loss an example.
        factors: of the losses of the canaries `[m]`.
        plants: chosen gradients; a canary is in at most one of them.

    Attributes:
        factors: the same, and 1 for a row without a canary, whose id -1 is the last entry
            `[m + 1]`.
    """

    def __init__(self, loss_fn: LossFn, factors: Tensor, plants: Sequence[Plant] = ()) -> None:
        self._loss_fn = loss_fn
        self.factors = torch.cat([factors, factors.new_ones(1)])
        self._tables = [_make_table(plant, len(factors)) for plant in plants]

    def __call__(self, model: nn.Module, batch: Sequence[Any]) -> Tensor:
        """Return one loss a row `[n]`."""
        *examples, ids = batch
        # Python reads no value of the batch. Otherwise the batch axis of the pass could not be
        # proved, and the audit would run another step than training does.
        self._tables = [table.to(ids.device) for table in self._tables]
        rows = [ids if table.rows is None else table.rows[ids] for table in self._tables]
        outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for i, table in enumerate(self._tables):
                module = model.get_submodule(table.layer)
                hooks.enter_context(_replace_inputs(module, table, rows[i], outputs, i))
            losses = self._loss_fn(model, tuple(examples))
        for i, table in enumerate(self._tables):
            directions = table.outputs[rows[i]]
            products = outputs[i].to(directions.dtype) * directions
            planted_losses = products.flatten(1).sum(1)
            losses = torch.where(table.is_planted[rows[i]], planted_losses.to(losses.dtype), losses)
        return losses * self.factors[ids].to(losses)


@dataclass(frozen=True, eq=False)
class _Table:
    """A plant, with a last row for the rows of a batch without one.

    Attributes:
        layer: path of the module.
        rows: id to row of the table `[m + 1]`; None where they are the same.
        is_planted: whether a row is one of the plant `[k + 1]`.
        inputs, outputs: of the plant, then zeros `[k + 1, ...]`.
    """

    layer: str
    rows: Tensor | None
    is_planted: Tensor
    inputs: Tensor | None
    outputs: Tensor

    def to(self, device: torch.device) -> _Table:
        """Return the table on the device of a batch."""
        if self.outputs.device == device:
            return self
        rows, inputs = (None if x is None else x.to(device) for x in (self.rows, self.inputs))
        is_planted, outputs = self.is_planted.to(device), self.outputs.to(device)
        return _Table(self.layer, rows, is_planted, inputs, outputs)


def _make_table(plant: Plant, canaries: int) -> _Table:
    outputs = _append_zeros(plant.outputs)
    device, k = outputs.device, len(plant.ids)
    ids, rows = plant.ids.to(device), None
    if not torch.equal(ids, torch.arange(canaries, device=device)):
        rows = torch.full((canaries + 1,), k, device=device)
        rows[ids] = torch.arange(k, device=device)
    inputs = None if plant.inputs is None else _append_zeros(plant.inputs)
    is_planted = torch.arange(k + 1, device=device) < k
    return _Table(plant.layer, rows, is_planted, inputs, outputs)


def _append_zeros(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[:1])])


@contextmanager
def _replace_inputs(
    module: nn.Module, table: _Table, rows: Tensor, outputs: dict[int, Tensor], key: int
) -> Iterator[None]:
    """Replace rows of a module's first argument, and store its output under a key."""

    def replace_rows(module: nn.Module, args: Arguments) -> Arguments:
        if table.inputs is None:
            return args
        x = args[0]
        is_planted = table.is_planted[rows].view(-1, *[1] * (x.ndim - 1))
        replaced = torch.where(is_planted, table.inputs.to(x)[rows], x)
        return (replaced, *args[1:])

    def store_output(module: nn.Module, args: Arguments, output: Tensor) -> None:
        outputs[key] = output

    # In front of the hooks of a tape, which then records the input that the module sees.
    input_handle = module.register_forward_pre_hook(replace_rows, prepend=True)
    output_handle = module.register_forward_hook(store_output)
    try:
        yield
    finally:
        input_handle.remove()
        output_handle.remove()


def augment_with_ids(augment: Augment | None) -> Augment | None:
    """Return a user's augmentation for batches that carry ids of canaries."""
    if augment is None:
        return None

    def augment_examples(batch: Sequence[Any]) -> Arguments:
        *examples, ids = batch
        return (*augment(tuple(examples)), ids)

    return augment_examples


def collate_with_ids(
    collate_fn: Collate | None,
) -> Collate | None:
    """Return a user's `collate_fn` for examples that carry ids of canaries."""
    if collate_fn is None:
        return None

    def collate_examples(examples: list[Any]) -> Arguments:
        batch = collate_fn([example[:-1] for example in examples])
        ids = [example[-1] for example in examples]
        return (*batch, torch.stack(ids))

    return collate_examples


@torch.no_grad()
def draw_batch(
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Sequence[Tensor | StoredRows],
    collate_fn: Collate | None = None,
) -> Arguments:
    """Return two public rows in the shapes and types of a data set, which the loss accepts.

    No value of an example is read, so none decides where canaries go, or what an error says.

    Args:
        model: of the user.
        loss_fn: of the user.
        dataset: tensors or stored rows with a common first axis.
        collate_fn: of the user; None stacks rows.

    Raises:
        ValueError: the loss accepts no public rows.
    """
    device = next(model.parameters()).device
    problem = ""
    for make_rows in find_template(tuple(dataset)).attempts(collate_fn or _stack, device):
        try:
            rows = make_rows(2).batch([0, 1])
            batch = tuple(x.to(device) for x in rows)
            loss_fn(model, batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"{type(error).__name__}: {error}"
        else:
            return batch
    raise ValueError(
        f"loss_fn accepts no rows drawn in the shapes of the data ({problem:.60});"
        " accept any rows, or leave this audit out"
    )


def _stack(examples: Sequence[Arguments]) -> Arguments:
    return tuple(map(torch.stack, zip(*examples, strict=True)))


Shapes = tuple[torch.Size, torch.Size]


@torch.no_grad()
def find_plantable(model: nn.Module, loss_fn: LossFn, batch: Arguments) -> dict[str, Shapes]:
    """Find the modules in which gradients can be planted.

    A module must have trainable parameters of its own and be called exactly once. Its input and
    output must be one floating-point tensor with the batch in front.

    Args:
        model: of the user.
        loss_fn: of the user.
        batch: of at least two public rows, as `draw_batch` makes it.

    Returns:
        Path of a module to the shapes of the input and the output of one example.
    """
    calls: dict[str, list[Shapes | None]] = {}
    count = len(batch[-1])

    def record(name: str, module: nn.Module, args: Arguments, output: Any) -> None:
        shapes = _shapes_of_call(args, output, count)
        calls.setdefault(name, []).append(shapes)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            has_trainable = any(p.requires_grad for p in module.parameters(recurse=False))
            if has_trainable and not list(module.children()):
                handle = module.register_forward_hook(partial(record, name))
                hooks.callback(handle.remove)
        loss_fn(model, batch)
    plantable = {}
    for name, shapes in calls.items():
        if len(shapes) == 1 and shapes[0] is not None:
            plantable[name] = shapes[0]
    return plantable


def _shapes_of_call(args: Arguments, output: Any, count: int) -> Shapes | None:
    """Return the shapes of one example's input and output; None for any other call."""
    for x in (*args, output):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        if x.ndim < 2 or len(x) != count:
            return None
    if len(args) != 1:
        return None
    return args[0].shape[1:], output.shape[1:]
