"""A federated app: what server and clients of a run have to agree on.

It is written as functions of public settings. Every process makes its own plan and model from the
settings, and the contract (`party.contract_of`) is compared before the first round. The same app
runs inside one process (`App.run_here`), in an engine's simulation and on separate hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dpkfc import checkpoint
from dpkfc.data.loading import Collate
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.runs import OnRound, SimulatedRun
from dpkfc.federated.simulation import federate
from dpkfc.gradients.loss_function import LossFn

Settings = Mapping[str, Any]
# Settings of the server: its folder, seconds that a message may take, seconds to wait for clients.
SERVER: dict[str, Any] = {"folder": "", "timeout": 120.0, "wait": 120.0}


@dataclass(frozen=True)
class App:
    """What is trained, on which data, with which guarantee.

    Every process calls the functions, and they return the same each time.

    Attributes:
        plan: settings to the plan. On hosts with different libraries give the noise by
            `with_noise`: a calibration may differ in its last digit, and then the clients are
            refused.
        model: settings to the model; weights that are not trained are part of the contract.
        loss_fn: maps (model, batch) to one loss per example.
        records: (number of a client, settings) to its own records; called only on that client's
            machine.
        defaults: settings that a run may change, with their values: numbers, texts and truth
            values.
        evaluate: (model, settings) to a plain figure for `SimulatedRun.history`, on data of no
            client; None for no figure.
        finish: (run, settings, folder) writes what a finished run leaves; None for nothing.
        collate_fn: maps a list of examples to a batch.
    """

    plan: Callable[[Settings], FederatedPlan]
    model: Callable[[Settings], nn.Module]
    loss_fn: LossFn
    records: Callable[[int, Settings], Any]
    defaults: Settings = field(default_factory=dict, hash=False)
    evaluate: Callable[[nn.Module, Settings], Any] | None = None
    finish: Callable[[SimulatedRun, Settings, Path], None] | None = None
    collate_fn: Collate | None = None

    def settings(self, *given: Settings | None) -> dict[str, Any]:
        """Return the defaults, replaced by given settings; later ones win.

        Raises:
            ValueError: an unknown name, or a value of another type than the default.
        """
        defaults = {**SERVER, **self.defaults}
        chosen = dict(defaults)
        for values in given:
            for name, value in (values or {}).items():
                if name not in defaults:
                    raise ValueError(
                        f"unknown setting {name!r} of the federated app; it has "
                        f"{', '.join(sorted(defaults))}"
                    )
                chosen[name] = _convert(name, value, defaults[name])
        return chosen

    def bind_evaluate(self, settings: Settings) -> Callable[[nn.Module], Any] | None:
        """Return `evaluate` as a function of the model alone."""
        evaluate = self.evaluate
        if evaluate is None:
            return None
        return lambda model: evaluate(model, settings)

    def run_here(
        self,
        settings: Settings | None = None,
        *,
        folder: str | Path,
        on_round: OnRound | None = None,
    ) -> SimulatedRun:
        """Run the app inside this process; continue an interrupted run after its last round.

        Args:
            settings: in place of the defaults.
            folder: of the server's ledger, its checkpoint and what `finish` writes.
            on_round: called after every round.

        Raises:
            BudgetExhausted: the ledger in the folder holds all rounds.
            ValueError: as `federate`.
        """
        chosen = self.settings(settings)
        folder = Path(folder)
        plan = self.plan(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        run = federate(
            plan,
            self.model(chosen),
            self.loss_fn,
            [self.records(number, chosen) for number in range(plan.config.clients)],
            ledger_path=folder / "ledger.jsonl",
            checkpoint=folder / "checkpoint",
            resume=checkpoint.exists(folder / "checkpoint"),
            evaluate=self.bind_evaluate(chosen),
            on_round=on_round,
            collate_fn=self.collate_fn,
        )
        if self.finish is not None:
            self.finish(run, chosen, folder)
        return run


def _convert(name: str, value: Any, default: Any) -> Any:
    """Return a setting as the type of its default; an integer may stand for a float."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ValueError(f"the setting {name!r} is of type {type(default).__name__}, got {value!r}")
    return value
