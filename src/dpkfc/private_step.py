"""The release pipeline: the only way from a clipped sum to the gradients that an optimizer sees.

`Session`, the Opacus engine, federated clients and the federated server all use it, in this order:

    refresh the preconditioner → clipped sum (made by the host) → ledger line → noise
        → the preconditioner observes the release → post-processing → `p.grad`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from dpkfc.distributed import DistributedContext, RankLost
from dpkfc.fsdp import divided_as
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.metric import Metric
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.preconditioning import PreconditionerManager
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import ClippedSum, MechanismPlan, Released, release
from dpkfc.privacy.rng import NoiseStream

_SINGLE_PROCESS = DistributedContext()


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
        ranks: DistributedContext = _SINGLE_PROCESS,
    ) -> None:
        self.plan = plan
        self.noise = noise
        self.ledger = ledger
        self.layers = layers
        self.preconditioning = preconditioning
        self.postprocess = postprocess
        self._ranks = ranks

    @property
    def metric(self) -> Metric:
        """The preconditioner map in which this step clips and adds noise."""
        return self.preconditioning.metric

    def refresh(self, step: int) -> None:
        """Rebuild the preconditioner before a step if its interval has passed."""
        self.preconditioning.refresh(step)

    def release(self, clipped: ClippedSum, step: int, *, ledger: Ledger | None = None) -> Released:
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
        """Charge until the ledger of this process holds as many steps as that of the first one.

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
        """Return the post-processed release, after the preconditioner has observed the release.

        Args:
            released: the release of this step.
            in_place: whether the memory of `released` may hold the result.
        """
        self.preconditioning.observe(released)
        return self.postprocess.apply(released, self.metric, self.layers, in_place=in_place)


def set_gradients(
    parameters: Mapping[str, Tensor], update: Released, *, scale: float | None = None
) -> None:
    """Put an update into `p.grad`, in the type and the sharding of each parameter.

    Args:
        parameters: the trainable parameters by name.
        update: from `ReleasePipeline.make_update`.
        scale: a number that multiplies every gradient first.
    """
    for name, parameter in parameters.items():
        gradient = update.gradients[name]
        if scale is not None:
            gradient = gradient * scale
        parameter.grad = divided_as(gradient.to(parameter.dtype), parameter)
