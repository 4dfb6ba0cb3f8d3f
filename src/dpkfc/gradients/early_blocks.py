"""Make blocks of norm layers while the backward pass runs.

A block has one row an example, and what it is made of is freed at once. To keep that until the end
of the pass would take as much memory as all activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkfc.gradients.autograd_graph import leads_to
from dpkfc.gradients.full_precision import full_precision
from dpkfc.gradients.layers import Calls
from dpkfc.gradients.recorded_call import Arrival, RecordedCall
from dpkfc.gradients.rules import blocks_of


class EarlyBlocks:
    """Context manager around the backward pass, in which waiting calls become blocks.

    Attributes:
        blocks: layer name to its blocks.
        waiting: calls at whose outputs no gradient has arrived.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrivals: list[Arrival] = []
        self.blocks: Calls = {}
        self.waiting: dict[int, RecordedCall] = {}

    def take(
        self, records: Sequence[RecordedCall], edges: Sequence[GradientEdge]
    ) -> list[RecordedCall]:
        """Take the calls whose gradients arrive on the way to others, and return the others.

        Args:
            records: of calls that read examples, in their order.
            edges: where gradients are wanted besides.
        """
        ends: list[GradientEdge | None] = [*edges]
        for record in records:
            if record.arrival is None:
                ends += record.edges
        wanted = {edge.node for edge in ends if edge is not None}
        others = []
        for key, record in enumerate(records):
            edge = record.edges[0]
            if record.arrival is None or edge is None:
                others.append(record)
            elif leads_to(edge.node, wanted):
                self.waiting[key] = record
            else:
                # Autograd only goes there where the gradient is asked for.
                others.append(record)
                wanted.add(edge.node)
        return others

    def __enter__(self) -> None:
        """Begin to make blocks."""
        for key, record in self.waiting.items():
            assert record.arrival is not None
            record.arrival.use = partial(self._make, key)
            self._arrivals.append(record.arrival)

    def __exit__(self, *error: object) -> None:
        """Leave later gradients alone."""
        for arrival in self._arrivals:
            arrival.use = None

    def _make(self, key: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        record = self.waiting.pop(key)
        layer = record.layers[0]
        with full_precision():
            block = blocks_of(layer, [record.with_gradients([gradient])], self._size)
        self.blocks.setdefault(layer.name, []).append(block)
