"""One party of a run: its model, its noise, and the contract that all parties compare."""

from __future__ import annotations

import hashlib

import numpy as np
from torch import nn

from dpkfc.distributed.fsdp import trainable_tensors
from dpkfc.federated.messages import Shapes
from dpkfc.federated.plan import FederatedPlan
from dpkfc.gradients.discovery import find_layers
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.grid import GAUSSIAN
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.rng import NoiseStream
from dpkfc.release_pipeline import ReleasePipeline
from dpkfc.tensors import Tensors, content_bytes


class PartyModel:
    """The model of one party of a run, and its preconditioner.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; its trained parameters are overwritten.

    Attributes:
        numbers: of the trained parameters, d.

    Raises:
        ValueError: no plan, or a model that the gradient engine does not cover.
    """

    def __init__(self, plan: FederatedPlan, model: nn.Module) -> None:
        if not isinstance(plan, FederatedPlan):
            raise ValueError(
                f"plan must be a FederatedPlan, got {type(plan).__name__}; make it with"
                " FederatedConfig(...).calibrate(epsilon, delta)"
            )
        self.plan = plan
        self._config = plan.config
        self.model = model
        self.layers = find_layers(model)
        self.parameters: Tensors = trainable_tensors(model)
        self.shapes: Shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.numbers = sum(p.numel() for p in self.parameters.values())
        self.contract = contract_of(plan.hash, model)
        self.coordinates = PreconditionerManager(plan.config.preconditioner, model, self.layers)

    def make_pipeline(
        self,
        party: int,
        ledger: Ledger,
        stddev: float,
        divisor: int = 1,
        postprocess: PostprocessPipeline | None = None,
    ) -> ReleasePipeline:
        """Return the way from a clipped sum to a release of one party.

        Args:
            party: 0 for the server, 1 and above for clients.
            ledger: of the party.
            stddev: of the party's noise.
            divisor: of a release.
            postprocess: filters and read-out; None for a party that leaves them to another.
        """
        return ReleasePipeline(
            PartyMechanism(self.plan, stddev, divisor),
            NoiseStream(stream_seed(self.plan, party)),
            ledger,
            layers=self.layers,
            preconditioning=self.coordinates,
            postprocess=postprocess or PostprocessPipeline(()),
        )


class PartyMechanism:
    """A plan as `privacy.mechanism.release` reads it, with the noise of one party.

    Args:
        plan: of the run.
        stddev: of the party's noise.
        divisor: of a release.
    """

    clipping = "flat"
    bands = 1

    def __init__(self, plan: FederatedPlan, stddev: float, divisor: int = 1) -> None:
        self.stddev = stddev
        self.expected_batch_size = divisor
        self.max_grad_norm = plan.config.max_grad_norm
        self.noise_multiplier = plan.noise_multiplier
        self.sensitivity = plan.sensitivity
        self.event = plan.event
        self.test_mode = plan.test_mode
        self.hash = plan.hash
        # The party that adds the noise rounds the sum.
        is_rounded = stddev > 0 or plan.config.privacy.masked
        self.noise = plan.config.noise if is_rounded else GAUSSIAN


def stream_seed(plan: FederatedPlan, party: int) -> int | None:
    """Return the test-mode seed of one party's streams; None outside test mode."""
    seed = plan.config.test_mode_seed
    if seed is None:
        return None
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(party,))
    return int(sequence.generate_state(1, np.uint64)[0])


def contract_of(plan_hash: str, model: nn.Module) -> str:
    """Return the SHA-256 of the plan, of the form of trained parameters, and of all frozen values.

    Clients compare it at the start, so that a different plan, model or pre-trained weights are
    found before a round.
    """
    digest = hashlib.sha256(plan_hash.encode())
    trained = trainable_tensors(model)
    frozen = {name: x for name, x in model.state_dict().items() if name not in trained}
    tensors = [*sorted(trained.items()), *sorted(frozen.items())]
    for name, x in tensors:
        form = f"{name} {tuple(x.shape)} {x.dtype}\n"
        digest.update(form.encode())
        if name in frozen and x.numel():
            digest.update(content_bytes(x))
    return digest.hexdigest()
