"""What an architecture of the zoo is, how one is registered, and the batches and losses that many
of them share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

SOUND = "sound"
MIXING = "mixing"
UNCLEAR = "unclear"


def size_of(batch: Batch) -> int:
    """Return the number of examples of a batch."""
    return len(tree_flatten(batch)[0][0])


def rows_of(batch: Batch, rows: Any) -> Batch:
    """Select some examples of a batch."""
    return tree_map(lambda x: x[rows], batch)


def stack_rows(rows: list[Any]) -> Batch:
    """Collate examples of any nesting into a batch."""
    leaves = [tree_flatten(row)[0] for row in rows]
    stacked = iter([torch.stack(column) for column in zip(*leaves, strict=True)])
    return tree_map(lambda _: next(stacked), rows[0])


@dataclass(frozen=True)
class Architecture:
    """Describe a model with its loss and its data.

    Attributes:
        name: unique name.
        family: heading in the table of results.
        make: builds the model in float64, the same one at every call.
        loss_fn: maps (model, batch) to one loss an example `[n]`.
        batch: maps n to a batch; the leading axis of every tensor in it is the example.
        kind: "sound" must train, "mixing" must be refused, "unclear" must either train rightly or
            be refused.
        size: examples of every batch; None for batches of 1, 2 and 5.
        steps: steps of a run with batches of one size.
        records: examples of the dataset where batches have one size; None for two more than a
            batch.
        tolerance: largest relative error of a clipped sum.
        is_random: the forward pass draws random numbers, so the sum is only bounded.
        requires: package that the model needs.
        inputs: maps a batch to what the model is called on; used for the probe of a preconditioner.
        collate: makes a batch of a list of examples.
        augment: changes every row of a batch on its own; None for no change.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    loss_fn: Loss
    batch: Callable[[int], Batch]
    kind: str = SOUND
    size: int | None = None
    steps: int = 2
    records: int | None = None
    tolerance: float = 1e-9
    is_random: bool = False
    requires: str | None = None
    inputs: Callable[[Batch], Any] | None = None
    collate: Callable[[list[Any]], Batch] = stack_rows
    augment: Callable[[Batch], Batch] | None = None

    def prepared(self, rows: Batch) -> Batch:
        """Return the batch that the loss function gets for these rows `[n, ...]` of the dataset."""
        batch = self.collate([rows_of(rows, i) for i in range(size_of(rows))])
        return batch if self.augment is None else self.augment(batch)

    def singles(self, rows: Batch) -> list[Batch]:
        """Return each of these rows as a batch of one."""
        return [self.prepared(rows_of(rows, slice(i, i + 1))) for i in range(size_of(rows))]


ARCHITECTURES: dict[str, Architecture] = {}


def register(
    family: str, batch: Callable[[int], Batch], loss_fn: Loss, **options: Any
) -> Callable[..., Any]:
    """Register the model that the decorated function builds, under the name of the function."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        add_architecture(build.__name__, family, build, batch, loss_fn, **options)
        return build

    return add


def add_architecture(
    name: str,
    family: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss_fn: Loss,
    **options: Any,
) -> None:
    """Register a model under a name."""
    if name in ARCHITECTURES:
        raise ValueError(f"the zoo has two architectures named {name!r}")

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(0)
            return build().double()

    ARCHITECTURES[name] = Architecture(name, family, make, loss_fn, batch, **options)


class Network(nn.Module):
    """Hold named modules, parameters and buffers; `function(self, *inputs)` is the forward pass."""

    def __init__(
        self, function: Callable[..., Any], buffers: dict[str, Tensor] | None = None, **parts: Any
    ) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def parameter(*shape: int, scale: float = 0.5) -> nn.Parameter:
    """Build a parameter of random numbers."""
    return nn.Parameter(scale * torch.randn(*shape, dtype=torch.float64))


# -- batches ---------------------------------------------------------------------------------------


def generator_of(n: int) -> torch.Generator:
    """Build the random stream of a batch of n examples."""
    return torch.Generator().manual_seed(100 + n)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def vectors(d: int = 4, classes: int = 3) -> Callable[[int], Batch]:
    """Make batches of (inputs `[n, d]`, labels `[n]`)."""
    return tensors((d,), classes)


def tensors(shape: tuple[int, ...], classes: int = 3) -> Callable[[int], Batch]:
    """Make batches of (inputs `[n, *shape]`, labels `[n]`)."""

    def batch(n: int) -> Batch:
        g = generator_of(n)
        return normal(n, *shape, generator=g), torch.randint(0, classes, (n,), generator=g)

    return batch


def targets(shape: tuple[int, ...], target: tuple[int, ...]) -> Callable[[int], Batch]:
    """Make batches of (inputs `[n, *shape]`, real targets `[n, *target]`)."""

    def batch(n: int) -> Batch:
        g = generator_of(n)
        return normal(n, *shape, generator=g), normal(n, *target, generator=g)

    return batch


def words(t: int = 5, vocabulary: int = 11, classes: int = 3) -> Callable[[int], Batch]:
    """Make batches of (token ids `[n, t]`, labels `[n]`)."""

    def batch(n: int) -> Batch:
        g = generator_of(n)
        return torch.randint(0, vocabulary, (n, t), generator=g), torch.randint(
            0, classes, (n,), generator=g
        )

    return batch


def texts(t: int = 5, vocabulary: int = 11) -> Callable[[int], Batch]:
    """Make batches of (token ids `[n, t + 1]`,) for next-token losses."""

    def batch(n: int) -> Batch:
        return (torch.randint(0, vocabulary, (n, t + 1), generator=generator_of(n)),)

    return batch


def ragged(t: int = 5, d: int = 4, classes: int = 3) -> Callable[[int], Batch]:
    """Make batches of (inputs `[n, t, d]`, lengths `[n]`, labels `[n]`)."""

    def batch(n: int) -> Batch:
        g = generator_of(n)
        lengths = torch.randint(1, t + 1, (n,), generator=g)
        x = normal(n, t, d, generator=g) * (torch.arange(t) < lengths[:, None])[..., None]
        return x, lengths, torch.randint(0, classes, (n,), generator=g)

    return batch


# -- models and losses -----------------------------------------------------------------------------


def mlp(features: int = 4, classes: int = 3) -> nn.Sequential:
    """Build a perceptron with five hidden units."""
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, classes))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of logits `[n, k]`; all entries of the batch but the last are inputs."""
    return F.cross_entropy(model(*batch[:-1]), batch[-1], reduction="none")


def regress(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of each example."""
    return (model(*batch[:-1]) - batch[-1]).square().flatten(1).mean(1)


def square(model: nn.Module, batch: Batch) -> Tensor:
    """Half the squared output of each example, without targets."""
    return 0.5 * model(*batch).square().flatten(1).sum(1)


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token of each example; logits `[n, t, v]`."""
    ids = batch[0]
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
