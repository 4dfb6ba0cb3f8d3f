"""Report ε of an engine's releases, with the methods of an Opacus accountant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from itertools import product
from typing import Any, NoReturn

import numpy as np

from dpkfc._checks import is_number
from dpkfc.config import Plan
from dpkfc.integrations._opacus_step import StepHook
from dpkfc.privacy.accounting import EpsilonCurve
from dpkfc.privacy.ledger import Ledger

_ACCOUNTANTS = {"pld": "pld", "prv": "pld", "rdp": "rdp"}


class Accountant:
    """Reports the spent budget; the `accountant` attribute of an engine."""

    def __init__(self, name: str) -> None:
        if name not in _ACCOUNTANTS:
            raise ValueError(
                f"accountant={name!r} is not supported; choose one of {', '.join(_ACCOUNTANTS)} (a"
                " central-limit accountant as 'gdp' is not an upper bound)"
            )
        self.name = _ACCOUNTANTS[name]
        self._run: tuple[Plan, Ledger] | None = None
        self._warned = False

    def attach(self, plan: Plan, ledger: Ledger) -> None:
        """Report the releases of this ledger from now on."""
        self._run = (plan, ledger)
        self._warned = False

    def get_epsilon(
        self,
        delta: float,
        alphas: Any = None,
        eps_error: float | None = None,
        delta_error: float | None = None,
    ) -> float:
        """Return ε of all releases so far, including earlier runs on the ledger.

        A plan without a certified guarantee (test mode, shuffled batches) warns once that ε is not
        valid.

        Args:
            delta: any δ in (0, 1), not only the plan's.
            alphas: ignored; this library chooses its own orders.
            eps_error: ignored; this library has a precision of its own.
            delta_error: as `eps_error`.

        Raises:
            ValueError: δ outside (0, 1).
        """
        if not (is_number(delta) and 0 < delta < 1):
            raise ValueError(f"delta must be in (0, 1), got {delta!r}")
        if self._run is None:
            return 0.0
        plan, ledger = self._run
        self._warn_once(plan)
        curve = EpsilonCurve(
            plan.event, delta, plan.neighbouring_relation, plan.accountant, horizon=plan.steps
        )
        return curve.running_epsilon(ledger.count)

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """Return ε as `get_epsilon` does, and NaN where Opacus gives the best order."""
        return self.get_epsilon(delta), math.nan

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Return one (noise multiplier, sample rate, releases); no entry before the first."""
        if self._run is None or not len(self):
            return []
        plan, ledger = self._run
        rate = plan.expected_batch_size / plan.dataset_size
        return [(plan.noise_multiplier, rate, ledger.count)]

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the history and the name of the accountant; ε is read from the ledger alone."""
        state = {} if destination is None else destination
        state |= {"history": self.history, "mechanism": self.mechanism()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that the ledger holds all releases that a state lists; change nothing.

        Raises:
            ValueError: the state lists no releases, or some that the ledger does not hold.
        """
        if not state_dict or "history" not in state_dict:
            raise ValueError("state_dict has no 'history'; pass what accountant.state_dict() gave")
        history = state_dict["history"]
        count = sum(int(releases) for _, _, releases in history)
        is_same_run = all(
            np.allclose(saved[:2], own[:2], rtol=1e-9, atol=0.0)
            for saved, own in product(history, self.history)
        )
        if count > len(self) or not is_same_run:
            raise ValueError(
                f"the state has {count} releases that the ledger does not hold; go on with that"
                " run's file, then load: make_private(ledger_path=..., resume=True)"
            )

    def get_optimizer_hook_fn(self, sample_rate: float) -> StepHook:
        """Return a step hook that does nothing: each release is in the ledger before it exists."""
        return lambda optimizer: None

    def step(self, *, noise_multiplier: float, sample_rate: float) -> NoReturn:
        """Refuse to count by hand.

        Raises:
            RuntimeError: always, naming what counts.
        """
        raise RuntimeError(
            "accountant.step() is absent: optimizer.step() counts every release; leave it out"
        )

    def _warn_once(self, plan: Plan) -> None:
        """Warn once that ε is not valid; without noise it is infinite and needs no warning."""
        if plan.caveats and plan.noise_multiplier > 0 and not self._warned:
            self._warned = True
            reasons = ". ".join(plan.caveats)
            text = f"the reported epsilon is not a guarantee of this run. {reasons}"
            warnings.warn(text, stacklevel=4)  # the caller of get_epsilon

    def mechanism(self) -> str:
        """Return the name of the accountant: "pld" or "rdp"."""
        return self.name

    def __len__(self) -> int:
        return 0 if self._run is None else self._run[1].count
