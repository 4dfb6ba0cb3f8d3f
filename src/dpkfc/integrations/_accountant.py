"""ε of an engine's releases, under the name and the methods of an Opacus accountant."""

from __future__ import annotations

import warnings

from dpkfc.plan import Plan
from dpkfc.privacy.events import EpsilonCurve
from dpkfc.privacy.ledger import Ledger

__all__ = ["Accountant"]

_ACCOUNTANTS = {"pld": "pld", "prv": "pld", "rdp": "rdp"}


class Accountant:
    """What was spent; the `accountant` attribute of an engine."""

    def __init__(self, name: str) -> None:
        if name not in _ACCOUNTANTS:
            raise ValueError(
                f"accountant={name!r} is not supported; choose one of {', '.join(_ACCOUNTANTS)} (a central-limit accountant "
                "as 'gdp' is no upper bound)"
            )
        self.name = _ACCOUNTANTS[name]
        self._run: tuple[Plan, Ledger] | None = None
        self._curves: dict[float, EpsilonCurve] = {}
        self._warned = False

    def attach(self, plan: Plan, ledger: Ledger) -> None:
        """Report the releases of this ledger from now on."""
        self._run, self._curves, self._warned = (plan, ledger), {}, False

    def get_epsilon(self, delta: float) -> float:
        """ε of all releases so far, those that the ledger file held before included.

        A plan without a certified guarantee (test mode, shuffled batches) warns once that this number is none.

        Args:
            delta: any δ in (0, 1), not only the one a plan was made for.

        Raises:
            ValueError: δ outside (0, 1).
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {delta}")
        if self._run is None:
            return 0.0
        plan, ledger = self._run
        self._warn_once(plan)
        if delta not in self._curves:
            self._curves[delta] = EpsilonCurve(plan.event, delta, plan.neighbouring_relation, plan.accountant)
        return self._curves[delta].at(ledger.count)

    def _warn_once(self, plan: Plan) -> None:
        """Without noise ε is infinite, which needs no warning."""
        if plan.caveats and plan.noise_multiplier > 0 and not self._warned:
            self._warned = True
            text = f"epsilon is no guarantee of this run. {'. '.join(plan.caveats)}"
            warnings.warn(text, stacklevel=4)  # the caller of the engine's get_epsilon

    def mechanism(self) -> str:
        """Name of the accountant: "pld" or "rdp"."""
        return self.name

    def __len__(self) -> int:
        return 0 if self._run is None else self._run[1].count
