"""The private sum of second moments of the inputs of a linear head.

The gradient of ½ ⟨M, x xᵀ⟩ in M is x xᵀ. So the sum, its clip, and the proof that no example enters
the part of another, are the same as in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_sum import Rows, clipped_sum
from dpkfc.gradients.discovery import find_layers


class _Moments(nn.Module):
    """Return ⟨M, x xᵀ⟩ for the features x of each row; M is zero."""

    def __init__(self, maps: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.maps = maps
        width = head.in_features
        self.moments = nn.Linear(width, width, bias=False).to(head.weight)
        nn.init.zeros_(self.moments.weight)

    def forward(self, batch: Any) -> Tensor:
        """Return one number a row `[B]`."""
        features = self.maps(batch if isinstance(batch, Tensor) else batch[0])
        product = self.moments(features) * features
        return product.sum(1)


def sum_second_moments(
    maps: nn.Module,
    head: nn.Linear,
    norm: float,
    micro_batches: Iterable[tuple[Any, Rows]],
    one_record: Callable[[int], Any],
) -> Tensor:
    """Return Σ x xᵀ `[d, d]` over all units, each clipped to a Frobenius norm; PRIVATE.

    Args:
        maps: from the inputs of the model to the inputs of its head, without trained parameters.
        head: whose inputs x are.
        norm: of the part of a unit, at most; the square of the longest x.
        micro_batches: as of `clipped_sum`; a batch is its inputs, or begins with them.
        one_record: as of `clipped_sum`.
    """
    model = _Moments(maps, head)
    sums, _ = clipped_sum(
        model,
        find_layers(model),
        {},
        Clip(norm),
        loss_fn=lambda model, batch: model(batch),
        micro_batches=micro_batches,
        one_record=one_record,
    )
    return sums["moments.weight"]
