"""The release pipeline: the only way from a clipped sum to the gradients that an optimizer sees.

`Session`, the Opacus engine, federated clients and the federated server all use it, in this order:

    refresh the preconditioner → clipped sum (made by the host) → ledger line → noise
        → post-processing → `p.grad`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpkfc.distributed.context import SINGLE_PROCESS, DistributedContext, RankLost
from dpkfc.distributed.fsdp import shard_like
from dpkfc.gradients.layers import Layer
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import ClippedSum, MechanismPlan, Released, ReleaseLedger, release
from dpkfc.privacy.rng import NoiseStream
from dpkfc.tensors import NamedTensors


class ReleasePipeline:
    """Turns the clipped sums of one run into charged, noisy and post-processed releases.

    Args:
        plan: the sensitivity, the noise and the divisor of a release.
        noise: the noise stream of the run.
        ledger: the ledger of the same plan.
        layers: the layers of the model.
        preconditioning: builds and refreshes the preconditioner.
        postprocess: the post-processing of the run.
        ranks: the processes that share a release. The first process charges and adds the noise.

    Guarantee:
        A release exists only after its line is in the ledger. Steps after `release` read releases,
        never the clipped sum.
    """

    def __init__(
        self,
        plan: MechanismPlan,
        noise: NoiseStream,
        ledger: Ledger,
        *,
        layers: Sequence[Layer],
        preconditioning: PreconditionerManager,
        postprocess: PostprocessPipeline,
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> None:
        self.plan = plan
        self.noise = noise
        self.ledger = ledger
        self.layers = layers
        self.preconditioning = preconditioning
        self.postprocess = postprocess
        self._ranks = ranks

    def release(
        self, clipped: ClippedSum, step: int, *, ledger: ReleaseLedger | None = None
    ) -> Released:
        """Charge the ledger and add noise, on the first process; the others receive the release.

        Args:
            clipped: the clipped sum of one logical batch, over all processes.
            step: the number of the step.
            ledger: where to charge instead of the run's ledger (a charge that was made before).

        Raises:
            ValueError, BudgetExhausted, LedgerError: as `privacy.mechanism.release`.
            RankLost: another process is gone.
        """
        book = self.ledger if ledger is None else ledger
        make = partial(release, clipped, self.plan, self.noise, book, step)
        if self._ranks.world_size == 1:
            return make()
        device = next(iter(clipped.tensors.values())).device
        try:
            released = self._ranks.broadcast_release(make, device)
        except RankLost:
            raise
        except Exception:
            # The first process may have charged the ledger before it failed.
            self.match_release_count(
                step, self._ranks.broadcast_from_rank0(lambda: self.ledger.steps)
            )
            raise
        if not self._ranks.is_rank0:
            self.match_release_count(step, self.ledger.steps + 1)
        return released

    def match_release_count(self, step: int, steps: int) -> None:
        """Charge until the ledger of this process holds as many steps as the first process's.

        Args:
            step: the step in which the first process made its last release.
            steps: the number of steps in the ledger of the first process.
        """
        plan = self.plan
        for _ in range(steps - self.ledger.steps):
            self.ledger.charge(
                step, plan.event, plan.noise_multiplier, plan.stddev, plan.sensitivity
            )

    def make_update(self, released: Released, *, in_place: bool = False) -> Released:
        """Return the post-processed release.

        Args:
            released: the release of this step.
            in_place: whether the memory of `released` may hold the result.
        """
        return self.postprocess.apply(
            released, self.preconditioning.metric, self.layers, in_place=in_place
        )


def set_gradients(
    optimizer: torch.optim.Optimizer,
    parameters: NamedTensors,
    update: Released,
    *,
    scale: float | None = None,
) -> None:
    """Put an update into `p.grad`, in the type, sharding and memory order of each parameter.

    torch's fused optimizers run through the memory of a parameter, its gradient and its state in
    one order, whatever their strides. So the state is brought into that order too (a checkpoint
    keeps none), and a parameter with gaps between its entries becomes contiguous.

    Args:
        optimizer: steps next.
        parameters: the trainable parameters by name.
        update: from `ReleasePipeline.make_update`.
        scale: a number that multiplies every gradient first.
    """
    states: Mapping[Any, Any] = getattr(optimizer, "state", {})
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in parameters.items():
        if is_fused and not _is_dense(parameter):
            with torch.no_grad():
                parameter.set_(parameter.contiguous())  # type: ignore[call-overload]
        gradient = update.gradients[name]
        if scale is not None:
            gradient = gradient * scale
        parameter.grad = _order_like(shard_like(gradient.to(parameter.dtype), parameter), parameter)
        state = states.get(parameter, {})
        for key, x in state.items():
            if isinstance(x, Tensor) and x.shape == parameter.shape:
                state[key] = _order_like(x, parameter)


def _is_dense(x: Tensor) -> bool:
    """Return whether the entries fill their part of the memory without gaps."""
    sizes = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True))
    filled = 1
    for stride, size in sizes:
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _order_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor whose entries lie in memory in the order of a parameter without gaps."""
    if x.stride() == parameter.stride() or not _is_dense(parameter):
        return x
    return torch.empty_like(parameter, dtype=x.dtype, device=x.device).copy_(x)
