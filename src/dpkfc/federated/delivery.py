"""Which client has which preconditioner: it is sent once to each client that needs it, and its digest in every round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpkfc.curvature.preconditioner import Preconditioner
from dpkfc.federated.messages import METRIC_DIFFERS, METRIC_MISSING, Message, flat

__all__ = ["MetricDelivery"]


class MetricDelivery:
    """The server's record of the metrics that its clients have.

    Args:
        to_all: whether every client is sent the metric, or only those that could not build it from its seed.
    """

    def __init__(self, to_all: bool) -> None:
        self._to_all = to_all
        self._digests: dict[int, str] = {}  # client to the digest of the metric that it has
        self._asked: set[int] = set()  # clients that could not build the metric from its seed
        self._last: tuple[Preconditioner | None, str] = (None, "")

    def round_fields(self, client: int, current: Preconditioner | None) -> Message:
        """Return what a round tells a client of the metric in force, without what the server keeps for its next refresh."""
        if current is None:
            return {}
        digest = self._digest(current)
        message: Message = {"metric_digest": digest, "metric_step": current.step}
        wanted = self._to_all or client in self._asked
        if wanted and self._digests.get(client) != digest:
            message |= flat("metric", replace(current, running=()).state_dict())
        return message

    def note_answer(self, client: int, current: Preconditioner | None) -> None:
        """Note that a client answered under the metric in force."""
        self._digests[client] = self._digest(current)

    def note_failure(self, client: int, reason: Any) -> None:
        """Note that a client refused a round: it may have lost the metric, or have none."""
        self._digests.pop(client, None)
        if reason in (METRIC_DIFFERS, METRIC_MISSING):
            self._asked.add(client)

    def forget(self) -> None:
        """Forget what clients have, after a resume."""
        self._digests.clear()

    def _digest(self, current: Preconditioner | None) -> str:
        """Hash a metric once."""
        if current is not self._last[0]:
            self._last = (current, "" if current is None else replace(current, running=()).digest)
        return self._last[1]
