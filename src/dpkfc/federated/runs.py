"""A run of a server: its rounds so far, its checkpoint, and how it begins and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from dpkfc.checkpoint import StrPath
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.server import Server
from dpkfc.privacy.ledger import BudgetExhausted


@dataclass
class SimulatedRun:
    """The result of a run.

    Attributes:
        server: with the trained model and the ledger.
        records: one a round, public.
        history: (rounds done, ε, result of `evaluate`), by round.
        seconds: of the rounds.
    """

    server: Server
    records: list[RoundRecord] = field(default_factory=list)
    history: list[tuple[int, float, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, folder: StrPath) -> None:
        """Write the server's checkpoint, with the records and the history of the run.

        Raises:
            CheckpointError: the folder cannot be written, or `evaluate` returned more than plain
                values and tensors.
        """
        points = [list(point) for point in self.history]
        self.server.save(
            folder, {"records": [asdict(record) for record in self.records], "history": points}
        )

    def restore(self, folder: StrPath) -> None:
        """Continue from a checkpoint with its records, history and counts of rejected messages.

        Raises:
            CheckpointError: damaged, or of another plan, model or ledger.
        """
        stored = self.server.restore(folder) or {}
        for stored_record in stored.get("records", []):
            record = RoundRecord(**stored_record)
            self.records.append(record)
            self.server.rejected.update(record.rejected)
        self.history.extend(tuple(point) for point in stored.get("history", []))

    def finish_round(
        self,
        record: RoundRecord,
        evaluate: Callable[[nn.Module], Any] | None,
        checkpoint: StrPath | None,
        on_round: OnRound | None,
    ) -> None:
        """Append a round and the result of its evaluation, write the checkpoint, and report.

        Args:
            record: of the round.
            evaluate: maps the model to a figure for `history`; None for no evaluation.
            checkpoint: folder that is written; None for none.
            on_round: called with the record and the run.
        """
        self.records.append(record)
        if evaluate is not None:
            figure = evaluate(self.server.model)
            self.history.append((record.round + 1, self.server.epsilon, figure))
        if checkpoint is not None:
            self.save(checkpoint)
        if on_round is not None:
            on_round(record, self)


OnRound = Callable[[RoundRecord, SimulatedRun], None]


@contextmanager
def open_run(server: Server, checkpoint: StrPath | None, resume: bool) -> Iterator[SimulatedRun]:
    """Yield the run of a server, which is new or resumed; close the server at the end.

    A new run writes its first checkpoint.

    Args:
        server: of the run.
        checkpoint: folder of the checkpoint; None for none.
        resume: begin from the checkpoint.

    Raises:
        BudgetExhausted: no round is left.
        ValueError: a new run with a ledger that holds releases of other weights.
    """
    run = SimulatedRun(server)
    started = time.perf_counter()
    try:
        if resume and checkpoint is not None:
            run.restore(checkpoint)
        elif server.ledger.count:
            raise ValueError(
                f"the ledger holds {server.ledger.count} releases of an earlier run; resume from"
                " its checkpoint (resume=True), or choose another ledger: the two ε add up"
            )
        if not server.rounds_left:
            raise BudgetExhausted(
                f"all rounds of this plan are spent by the ledger {server.ledger.path}; nothing "
                "was sent"
            )
        if checkpoint is not None and not resume:
            run.save(checkpoint)
        yield run
    finally:
        run.seconds = time.perf_counter() - started
        server.close()
