"""A federated app: what server and clients of a run have to agree on, as functions of a few public settings.

Every process makes its own plan and model from the settings, and the contract (`messages.contract_of`) is compared before the
first round. One and the same value runs inside one process (`App.here`), on an engine's simulation and on hosts far apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dpkfc import checkpoint
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.rounds import RoundRecord
from dpkfc.federated.runner import Run, federate
from dpkfc.gradients.micro import LossFn

__all__ = ["SERVER", "App", "Settings"]

Settings = Mapping[str, Any]
# Of the server alone: its folder, seconds that a message may take, seconds to wait for clients.
SERVER: dict[str, Any] = {"folder": "", "timeout": 120.0, "wait": 120.0}


@dataclass(frozen=True)
class App:
    """What is trained, on what, under which promise. The functions are called in every process and give the same every time.

    Attributes:
        plan: settings to the plan. On hosts with unlike libraries give the noise by `with_noise`: a calibration may differ in its
            last digit, and then the clients are refused.
        model: settings to the model; weights that are not trained are part of the contract.
        loss_fn: maps (model, batch) to one loss an example.
        records: (number of a client, settings) to its own records; called where they lie, and nowhere else.
        defaults: settings that a run may change, with their values: numbers, texts and truth values.
        evaluate: (model, settings) to a plain figure for `Run.history`, on data that are no client's; None for nothing.
        finish: (run, settings, folder) writes what a finished run leaves; None for nothing.
        collate_fn: list of examples to a batch.
    """

    plan: Callable[[Settings], FederatedPlan]
    model: Callable[[Settings], nn.Module]
    loss_fn: LossFn
    records: Callable[[int, Settings], Any]
    defaults: Settings = field(default_factory=dict, hash=False)
    evaluate: Callable[[nn.Module, Settings], Any] | None = None
    finish: Callable[[Run, Settings, Path], None] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    def settings(self, *given: Settings | None) -> dict[str, Any]:
        """The defaults, replaced by what was given, the last one first.

        Raises:
            ValueError: an unknown name, or a value of another kind than the default.
        """
        known = {**SERVER, **self.defaults}
        for values in given:
            for name, value in (values or {}).items():
                if name not in known:
                    raise ValueError(f"unknown setting {name!r} of the federated app; it has {', '.join(sorted(known))}")
                known[name] = _as(name, value, {**SERVER, **self.defaults}[name])
        return known

    def evaluated(self, settings: Settings) -> Callable[[nn.Module], Any] | None:
        """`evaluate` with its settings."""
        found = self.evaluate
        return None if found is None else lambda model: found(model, settings)

    def here(
        self,
        settings: Settings | None = None,
        *,
        folder: str | Path,
        on_round: Callable[[RoundRecord, Run], None] | None = None,
    ) -> Run:
        """Run it inside this process; with the folder of a run that was interrupted it goes on after its last round.

        Args:
            settings: instead of the defaults.
            folder: of the server's ledger, its checkpoint and what `finish` writes.
            on_round: called after every round.

        Raises:
            BudgetExhausted: all rounds are spent by the ledger in the folder.
            ValueError: as `runner.federate`.
        """
        chosen, place = self.settings(settings), Path(folder)
        plan = self.plan(chosen)
        place.mkdir(parents=True, exist_ok=True)
        run = federate(
            plan,
            self.model(chosen),
            self.loss_fn,
            [self.records(number, chosen) for number in range(plan.config.clients)],
            ledger_path=place / "ledger.jsonl",
            checkpoint=place / "checkpoint",
            resume=checkpoint.is_there(place / "checkpoint"),
            evaluate=self.evaluated(chosen),
            on_round=on_round,
            collate_fn=self.collate_fn,
        )
        if self.finish is not None:
            self.finish(run, chosen, place)
        return run


def _as(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ValueError(f"the setting {name!r} is of type {type(default).__name__}, got {value!r}")
    return value
