"""What clients and server have in common as parties that add noise: a plan as a release reads it, and streams of their own."""

from __future__ import annotations

from dataclasses import dataclass

import dp_accounting
import numpy as np

from dpkfc.federated.plan import FederatedPlan
from dpkfc.privacy.grid import GAUSSIAN

__all__ = ["Mechanism", "stream_seed"]


@dataclass(frozen=True)
class Mechanism:
    """A plan as `privacy.mechanism.release` reads it, with the noise of one party and its divisor."""

    plan: FederatedPlan
    stddev: float
    expected_batch_size: int = 1
    clipping = "flat"

    @property
    def max_grad_norm(self) -> float:
        """C."""
        return self.plan.config.max_grad_norm

    @property
    def noise(self) -> str:
        """Kind of the noise; a sum without noise of its own is rounded by whoever adds the noise."""
        return self.plan.config.noise if self.stddev > 0 or self.plan.config.privacy.masked else GAUSSIAN

    @property
    def noise_multiplier(self) -> float:
        """Of the guarantee."""
        return self.plan.noise_multiplier

    @property
    def sensitivity(self) -> float:
        """Of the sum."""
        return self.plan.config.sensitivity

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Of one release."""
        return self.plan.event

    @property
    def test_mode(self) -> bool:
        """Whether noise is repeatable."""
        return self.plan.test_mode

    @property
    def hash(self) -> str:
        """Of the plan."""
        return self.plan.hash


def stream_seed(plan: FederatedPlan, party: int) -> int | None:
    """The test-mode seed of one party's streams, different for every client; None outside test mode."""
    seed = plan.config.test_mode_seed
    if seed is None:
        return None
    return int(np.random.SeedSequence(entropy=seed, spawn_key=(party,)).generate_state(1, np.uint64)[0])
