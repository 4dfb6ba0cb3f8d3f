"""Answer the rounds of a server as one client, with its own records, noise and ledger.

Nothing but its messages leaves the client.

A client does not rely on the server for its budget. It charges its own ledger before its noise
exists, answers every round once, and refuses rounds beyond the plan. A refusal carries a constant
reason. A failure that the records have caused is not reported to the server. The failing records
add nothing to the sum, and the answer is a sum like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpkfc.checkpoint import StrPath
from dpkfc.data.loading import Collate, MicroBatches, Part, layout
from dpkfc.data.sampling import Poisson
from dpkfc.federated import messages
from dpkfc.federated.messages import (
    Message,
    PartyModel,
    Received,
    Tensors,
    accumulation_dtype,
    add_prefix,
    check_mapping,
    make_failure,
    select_prefix,
    split_rows,
    stack_rows,
    to_tensor,
    total_norm,
    zero_sums,
)
from dpkfc.federated.plan import (
    SEED,
    FederatedPlan,
    LocalSteps,
    PartyMechanism,
    stream_seed,
)
from dpkfc.federated.secure_aggregation import (
    FEWEST_STEPS,
    NamedTensors,
    PrivateKey,
    ReceivedShares,
    RoundKeys,
    channel_pair_keys,
    encode,
    mask,
    new_key,
    open_shares,
    pair_keys,
    reveal,
    round_scope,
    seal_shares,
)
from dpkfc.gradients.clipped_sum import (
    Clip,
    GradientMode,
    LossFn,
    clip_factors,
    clipped_sum,
    move_batch,
    swap_parameters,
)
from dpkfc.gradients.fallback import gradient_of
from dpkfc.gradients.state import make_stateless, restored_attributes, restored_state
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.privacy.mechanism import ClippedSum
from dpkfc.privacy.rng import NoiseStream, SamplingStream
from dpkfc.private_step import ReleasePipeline
from dpkfc.public_rows import UNREADABLE, find_template
from dpkfc.rng_state import device_of, randomize_generators
from dpkfc.verification import check_on_public_rows, check_verify_setting

# --------------------------------------------------------------------------------------------------
# A client's model, and the private sums that it forms from per-example gradients.

Indices = NDArray[np.int64]
# Relative error of a norm in float32 against a sum of squares in float64.
_ROUNDING = 1 + 1e-6


class Records:
    """A client's own data.

    Args:
        dataset: a map-style dataset, or a tuple of tensors with a common first axis.
        collate_fn: maps a list of examples to a batch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        self.dataset = dataset
        self.loader = MicroBatches(dataset, collate_fn=collate_fn)
        self.all = np.arange(len(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def micro_batches(self, indices: Indices, bound: int | None) -> Iterable[tuple[Any, Part]]:
        """Return micro-batches with their rows.

        Args:
            indices: of records, as `data.loading.layout` takes them.
            bound: most rows of a micro-batch.
        """
        parts = layout(indices, bound)
        return zip(self.loader.load([part.records for part in parts]), parts, strict=True)


class LocalModel(PartyModel):
    """The model of one or several clients of one process, and its preconditioner.

    The parameters are those of the last round.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; its trained parameters are overwritten by every
            round.
        loss_fn: maps (model, batch) to one loss per example.

    Raises:
        ValueError: a model that the gradient engine does not cover.
    """

    def __init__(self, plan: FederatedPlan, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__(plan, model)
        self.loss_fn = make_stateless(loss_fn)
        self.digest = ""
        self._clip = Clip(plan.config.max_grad_norm)
        self._gradient_mode = GradientMode()
        self._is_verified = False

    def load(self, values: NamedTensors) -> None:
        """Take the parameters of a round.

        Raises:
            ValueError: as `check_values`; nothing is taken then.
        """
        self.check_values(values)
        with torch.no_grad():
            for name, x in values.items():
                self.parameters[name].copy_(x)

    def check_values(self, values: NamedTensors) -> None:
        """Refuse tensors of a round that do not fit the parameters of this model.

        Raises:
            ValueError: different names or shapes, or numbers that the parameters' type cannot hold.
        """
        if {name: tuple(x.shape) for name, x in values.items()} != self.shapes:
            raise ValueError(
                "the parameters of the round have different names or shapes than this model's"
            )
        for name, x in values.items():
            if not x.to(self.parameters[name]).isfinite().all():
                raise ValueError(f"'{name}' among the parameters of the round is not finite")

    def take_metric(self, state: NamedTensors) -> None:
        """Take a preconditioner that the server built."""
        preconditioner = self.coordinates.restore(state)
        self.coordinates.current = preconditioner
        self.digest = preconditioner.digest

    def build_metric(self, step: int) -> None:
        """Build the preconditioner from synthetic probes and the parameters of the round."""
        self.coordinates.refresh(step)
        if self.coordinates.current is not None:
            self.digest = self.coordinates.current.digest

    def advance_metric(self, step: int) -> None:
        """Set the number of the round, for a preconditioner that changes between refreshes.

        Raises:
            ValueError: the preconditioner should have been rebuilt.
        """
        current = self.coordinates.current
        self.coordinates.refresh(step)
        if self.coordinates.current is not current:
            raise ValueError(
                f"the preconditioner of round {step} is older than its schedule allows; send a new "
                "one"
            )

    def zeros(self) -> Tensors:
        """Return the sum over no records."""
        return zero_sums(self.parameters)

    def verify(self, records: Records, *, strict: bool = False) -> None:
        """Check model and loss once, on public rows.

        No value of a record is used, and no type that most records do not share. Where no record
        can be read, nothing is checked: such records contribute zero. Where the loss takes no
        public rows, a `UserWarning` says so, and the examples of every micro-batch that is not
        proved are differentiated one at a time.

        Args:
            records: of a client.
            strict: refuse an operation that the tracker does not know.

        Raises:
            ValueError: the loss mixes examples, by name of the operation.
            UnknownOperation: under `strict`, by name.
        """
        if self._is_verified:
            return
        template = find_template(records.dataset)
        if template.problem == UNREADABLE:
            return
        template.warn(stacklevel=4)
        collate = records.loader.collate
        verdict = check_on_public_rows(
            self.model,
            self.layers,
            self.loss_fn,
            template.attempts(collate, device_of(self.layers)),
            expected=self._config.local_divisor,
            bound=self._config.max_physical_batch_size,
            strict=strict,
        )
        verdict.warn(stacklevel=4)
        self._gradient_mode.unproved_operation = verdict.operation
        self._is_verified = True

    def clipped_sum(self, records: Records, indices: Indices, *, together: bool = False) -> Tensors:
        """PRIVATE: return the sum of clipped gradients of some records, in preconditioned space.

        Args:
            records: of the client.
            indices: of the records, `[n]`.
            together: clip the mean gradient of all records once, as that of one unit.

        Raises:
            ValueError: the sum is not finite, as under a preconditioner that is not.
        """
        table = indices[None, :] if together and indices.size else indices
        sums, _ = clipped_sum(
            self.model,
            self.layers,
            self.coordinates.metric,
            self._clip,
            loss_fn=self.loss_fn,
            micro_batches=records.micro_batches(table, self._config.max_physical_batch_size),
            one_record=records.loader.alone,
            mode=self._gradient_mode,
            repeatable=self.plan.test_mode,
        )
        if not all(x.sum().isfinite() for x in sums.values()):
            raise ValueError("a clipped sum is not finite; check the preconditioner of the round")
        return sums

    def mean_gradient(self, records: Records) -> Tensors:
        """PRIVATE and unclipped: return the gradient of the mean loss over all records.

        A parameter without a gradient has zeros.
        """
        with (
            torch.enable_grad(),
            randomize_generators(self.plan.test_mode),
            restored_attributes(self.model),
            restored_state(self.model),
        ):
            batch = move_batch(records.loader.batch(records.all), device_of(self.layers))
            gradients = gradient_of(self.model, self.loss_fn(self.model, batch).mean())
        return zero_sums(self.parameters) | gradients


def clip_as_one(tensors: NamedTensors, max_grad_norm: float) -> Tensors:
    """Clip a whole contribution to norm C; return zeros for a contribution that is not finite."""
    # A product in 16 bits could exceed C.
    tensors = {name: x.to(accumulation_dtype(x)) for name, x in tensors.items()}
    norm = torch.tensor([total_norm(tensors) * _ROUNDING], dtype=torch.float64)
    factor = float(clip_factors(norm, max_grad_norm)[0])
    if factor == 0:
        # A product with 0 would keep NaN.
        return {name: torch.zeros_like(x) for name, x in tensors.items()}
    return {name: x * factor for name, x in tensors.items()}


# --------------------------------------------------------------------------------------------------
# Work on records can fail. Whether a client takes part must not depend on one of its records, so
# the server does not learn of an exception from the loss or the collate function. The round is
# charged and answered with its noise, on a sum to which the failing records add nothing:
#
#     single examples   Halving finds the records that fail. All others add what they add without
#                       them, so one record moves the sum by its own clipped gradient at most.
#     clipped as one    The sum is zero, as for a client without records. A missing contribution of
#                       norm C moves the sum by C.


class GuardedLocalWork:
    """One round's work of a client on its records, and the first error in it.

    Args:
        local: model of the client.
        records: of the client.

    Attributes:
        error: the first error, None where there was none; PRIVATE.
    """

    def __init__(self, local: LocalModel, records: Records) -> None:
        self._local = local
        self._records = records
        self._has_contribution = False
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        """PRIVATE: return whether no record contributed to the message because of an error."""
        return self.error is not None and not self._has_contribution

    def sum_examples(self, indices: Indices) -> Tensors:
        """PRIVATE: return the sum of clipped gradients; a record that fails adds zeros.

        Args:
            indices: of the records, `[n]`.
        """
        if not indices.size:
            return self._local.zeros()
        try:
            sums = self._local.clipped_sum(self._records, indices)
        except Exception as error:
            self.error = self.error or error
            if indices.size == 1:
                return self._local.zeros()
            first, second = (self.sum_examples(half) for half in np.array_split(indices, 2))
            return {name: x + second[name] for name, x in first.items()}
        self._has_contribution = True
        return sums

    def contribute_as_one(self, work: Callable[[], Tensors]) -> Tensors:
        """PRIVATE: return a contribution clipped as one; zeros without records or after an error.

        Args:
            work: returns the clipped contribution.
        """
        if not len(self._records):
            return self._local.zeros()
        try:
            contribution = work()
        except Exception as error:
            self.error = self.error or error
            return self._local.zeros()
        self._has_contribution = True
        return contribution


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class _Refusal(Exception):
    """Refuses a round, with one of the constant reasons in `messages`."""


class Client:
    """One party with records.

    Args:
        number: of the client, 0 … n − 1.
        plan: of the run.
        local: its model; clients of one process may share one.
        dataset: its own records, a map-style dataset or a tuple of tensors; at most
            `expected_records`, possibly none.
        collate_fn: maps a list of examples to a batch.
        ledger_path: file of the client's own ledger; None keeps the ledger in memory.
        channel: private key of the client's channels to the others, 32 bytes, for secure
            aggregation; None makes one. Use a key with one ledger only: with a second ledger it
            could mask two messages of a round alike.
        verify: check model and loss on public rows before the first round; no value of a record
            decides. "strict" refuses operations without a batch rule.

    Attributes:
        last_error: the last error, for this client's own operator; never sent.
        failed: whether no record contributed to the last answer because of an error; never sent.

    Raises:
        ValueError: a number outside the plan, more records than it allows, a channel key of another
            length; examples that mix, by name of the operation.

    Guarantee:
        At most `plan.releases` releases ever, each on the client's ledger before it exists. What is
        protected from whom is `plan.config.privacy`. Under `TrustedServer("server")` the messages
        are NOT private, and the server must keep them to itself.
    """

    def __init__(
        self,
        number: int,
        plan: FederatedPlan,
        local: LocalModel,
        dataset: Any,
        *,
        collate_fn: Collate | None = None,
        ledger_path: StrPath | None = None,
        channel: bytes | None = None,
        verify: bool | str = True,
    ) -> None:
        verify = check_verify_setting(verify)
        if not 0 <= number < plan.config.clients:
            raise ValueError(f"client {number} is not one of the {plan.config.clients} of the plan")
        if local.plan.hash != plan.hash:
            raise ValueError("the local model was made for another plan; make both with one plan")
        self.number = number
        self.plan = plan
        self._config = plan.config
        self.local = local
        self._channel = PrivateKey(new_key() if channel is None else channel)
        self.records = Records(dataset, collate_fn)
        if len(self.records) > plan.config.expected_records:
            raise ValueError(
                "a client holds more records than the plan's expected_records of all clients; make "
                "a new plan"
            )
        self._check_grid()
        self._sampling = SamplingStream(stream_seed(plan, number + 1))
        self.ledger = plan.open_ledger(ledger_path, client=number)
        self._pipeline = ReleasePipeline(
            PartyMechanism(plan, plan.client_stddev),
            NoiseStream(stream_seed(plan, number + 1)),
            self.ledger,
            layers=local.layers,
            preconditioning=local.coordinates,
            postprocess=PostprocessPipeline(()),  # the server post-processes
        )
        if verify:
            local.verify(self.records, strict=verify == "strict")
        self._work = GuardedLocalWork(local, self.records)
        # Keys of the last round that this client sent keys for.
        self._keys: RoundKeys | None = None
        # Shares of the last round that this client sent a masked sum for.
        self._shares: ReceivedShares | None = None
        self.last_error: BaseException | None = None
        self.failed = False

    def _check_grid(self) -> None:
        """Check that noise on the grid of secure aggregation is close enough to a Gaussian."""
        stddev = self.plan.client_stddev
        if not self._masked or stddev == 0:
            return
        if stddev / self.plan.grid(self.local.numbers) < FEWEST_STEPS:
            raise ValueError(
                "the noise of one client is too small for the grid of secure aggregation; raise "
                "the noise"
            )

    # -- messages ----------------------------------------------------------------------------------

    def hello(self) -> Message:
        """Return what the server compares before the first round."""
        message: Message = {"kind": "hello", "contract": self.local.contract, "client": self.number}
        if self._masked:
            message["key"] = to_tensor(self._channel.public)
        return message

    def answer(self, message: Received) -> Message:
        """Return the answer to a server's message; a refusal is a message with a constant reason.

        No record causes a refusal.
        """
        try:
            check_mapping(message)
            if message.get("contract") != self.local.contract:
                raise _Refusal(messages.CONTRACT_DIFFERS)
            if message.get("kind") == "keys":
                return self._make_keys(message)
            if message.get("kind") == "unmask":
                return self._reveal(message)
            self.last_error, self.failed = None, False
            return self._sum(message)
        except Exception as error:
            self.last_error, self.failed = error, True
            reason = messages.CLIENT_FAILED
            if isinstance(error, _Refusal):
                reason = str(error)
            elif isinstance(error, BudgetExhausted):
                reason = messages.SPENT
            return make_failure(self.number, message, self.local.contract, reason)

    def _answer(self, kind: str, number: int) -> Message:
        return {
            "kind": kind,
            "round": number,
            "contract": self.local.contract,
            "client": self.number,
        }

    def _new_round(self, message: Received) -> int:
        """Return the number of a round; refuse one that was answered: it would be released twice.

        Raises:
            ValueError: no number of a round.
        """
        number: int = message["round"]
        if type(number) is not int or number < 0:
            raise ValueError("a round must have an integer >= 0; send what open_round returned")
        releases = self.ledger.releases
        if releases and number <= releases[-1]["step"] // self.plan.per_round:
            raise _Refusal(messages.REPEATED)
        return number

    def _sum(self, message: Received) -> Message:
        number = self._new_round(message)
        pairs = self._pair_keys(message, number) if self._masked else {}
        self.local.load(select_prefix(message, "theta"))
        self._take_metric(message, number)
        self._work = GuardedLocalWork(self.local, self.records)
        sums = self._make_noisy_sum(number)
        noisy = {name: x.cpu() for name, x in sums.items()}
        self._report_failures(number)
        if self._masked:
            noisy = self._mask(noisy, pairs)
        return self._answer("sum", number) | add_prefix("sum", noisy)

    def _report_failures(self, number: int) -> None:
        """Tell the client's own operator which records failed; the answer does not."""
        self.last_error = self._work.error
        self.failed = self._work.failed
        if self.last_error is not None:
            logger.error(
                "client %d, round %d: %s of its records failed and add nothing: %r",
                self.number,
                number,
                "all" if self.failed else "some",
                self.last_error,
            )

    # -- secure aggregation ------------------------------------------------------------------------

    @property
    def _masked(self) -> bool:
        return self._config.privacy.masked

    def _cohort(self, message: Received) -> list[int]:
        """Return the clients to mask a message with; refuse fewer than the plan needs.

        With fewer clients there would be too few masks and too little noise.
        """
        cohort: list[int] = message["cohort"].tolist()
        are_registered = {self.number} <= set(cohort) <= set(range(self._config.clients))
        is_sorted = cohort == sorted(set(cohort))
        if not are_registered or not is_sorted or len(cohort) < self._config.survivors:
            raise _Refusal(messages.CLIENT_FAILED)
        return cohort

    def _make_keys(self, message: Received) -> Message:
        """Make the secrets of an unanswered round, and seal shares of them for the cohort."""
        if not self._masked:
            raise ValueError(
                "the server requests keys, and the plan sends messages in clear; start both with "
                "one plan"
            )
        number = self._new_round(message)
        channels = split_rows(message["channels"], self._cohort(message))
        keys = RoundKeys(contract=self.local.contract, round=number)
        sealed = seal_shares(keys, self.number, self._channel, channels, self._config.survivors)
        self._keys = keys
        return self._answer("keys", number) | {
            "key": to_tensor(keys.public),
            "sealed": stack_rows(sealed),
        }

    def _pair_keys(self, message: Received, number: int) -> dict[int, bytes]:
        """Return the key of the mask shared with each other client, before anything is charged."""
        if "mask_keys" in message:
            return self._take_shares(message, number)
        # No share of a round without recovery is ever revealed.
        self._keys = self._shares = None
        channels = split_rows(message["channels"], self._cohort(message))
        if channels[self.number] != self._channel.public:
            raise ValueError(
                f"the channel key of this client was changed in round {number}; enrol this client "
                "again"
            )
        return channel_pair_keys(
            self.number, self._channel, channels, round_scope(self.local.contract, number)
        )

    def _take_shares(self, message: Received, number: int) -> dict[int, bytes]:
        """Open the shares sealed for this client; return its mask key with each other client."""
        keys = self._keys
        cohort = self._cohort(message)
        public = split_rows(message["mask_keys"], cohort)
        if keys is None or keys.round != number:
            raise ValueError(
                f"this client has no keys for round {number}; the server must request keys first"
            )
        if public[self.number] != keys.public:
            raise ValueError(
                f"the mask key of this client was changed in round {number}; the server must "
                "request keys again"
            )
        channels = split_rows(message["channels"], cohort)
        sealed = split_rows(message["sealed"], cohort)
        self._shares = open_shares(
            keys, self.number, self._channel, channels, public=public, sealed=sealed
        )
        return pair_keys(keys, self.number, public)

    def _mask(self, noisy: Tensors, pairs: Mapping[int, bytes]) -> Tensors:
        """Mask the noisy sum, then forget the secrets of the round; others store shares of them."""
        integers = encode(noisy, self.plan.grid(self.local.numbers))
        keys, self._keys = self._keys, None
        return mask(integers, self.number, pairs, keys)

    def _reveal(self, message: Received) -> Message:
        """Reveal one share of each client, for one survivor set of the last answered round."""
        number = message["round"]
        received = self._shares
        survivors = tuple(sorted(message["survivors"].tolist()))
        if received is None or received.round != number or self._keys is not None:
            raise ValueError(
                f"this client has sent no masked sum in round {number}, so it reveals no shares"
            )
        are_enough = len(set(survivors)) == len(survivors) >= self._config.survivors
        are_in_cohort = set(survivors) <= set(received.cohort)
        if self.number not in survivors or not are_enough or not are_in_cohort:
            raise ValueError(
                f"the survivors of round {number} are too few, lack this client or lie outside its "
                "cohort"
            )
        # Shares for a second survivor set would reveal both secrets of a client.
        if received.survivors not in ((), survivors):
            raise _Refusal(messages.REPEATED)
        self._shares = replace(received, survivors=survivors)
        return self._answer("shares", number) | {"shares": stack_rows(reveal(received, survivors))}

    def _take_metric(self, message: Received, step: int) -> None:
        """Take or build the preconditioner of a round, and compare its digest with the server's."""
        wanted = message.get("metric_digest", "")
        if self._config.preconditioner is None or wanted == "":
            return
        if self.local.digest != wanted:
            state = select_prefix(message, "metric")
            if state:
                self.local.take_metric(state)
            elif self._config.metric == SEED:
                self.local.build_metric(step)
            else:
                raise _Refusal(messages.METRIC_MISSING)
        if self.local.digest != wanted:
            raise _Refusal(messages.METRIC_DIFFERS)
        self.local.advance_metric(step)

    # -- private sums ------------------------------------------------------------------------------

    # Programs that judge sums from outside replace this method by its name.
    def _released(self, sums: Tensors, step: int) -> Tensors:
        """Charge the ledger, then return the clipped sum with this client's noise."""
        if self._masked:  # float32 is coarser than the grid
            sums = {name: x.double() for name, x in sums.items()}
        clipped = ClippedSum(sums, self._config.max_grad_norm)
        return self._pipeline.release(clipped, step).gradients

    def _sample(self, step: int) -> Indices:
        """Return the indices of all records, or of a Poisson sample of them."""
        size = len(self.records)
        rate = self._config.example_rate
        if rate == 1 or size == 0:
            return self.records.all
        return Poisson(rate, size).indices(step, self._sampling.generator(step))

    def _make_noisy_sum(self, number: int) -> Tensors:
        """Return the noisy sum of a round."""
        work = self._config.local
        is_clipped_whole = self._config.privacy.unit == "client"
        first = number * self.plan.per_round
        if isinstance(work, LocalSteps):
            if not is_clipped_whole:
                return self._steps(work, first)
            sums = self._change(work)
        else:
            indices = self._sample(first)
            if is_clipped_whole:
                sums = self._work.contribute_as_one(
                    lambda: self.local.clipped_sum(self.records, indices, together=True)
                )
            else:
                sums = self._work.sum_examples(indices)
        return self._released(sums, first)

    def _walk(self, work: LocalSteps, gradient: Callable[[int], Tensors]) -> Tensors:
        """Return θ₀ − θ_K after K steps; `gradient(k)` returns the gradient of step k."""
        parameters = self.local.parameters
        start = {name: p.detach().clone() for name, p in parameters.items()}
        with swap_parameters(self.local.layers, start):
            for k in range(work.steps):
                gradients = gradient(k)
                with torch.no_grad():
                    for name, p in parameters.items():
                        p.sub_(work.learning_rate * gradients[name].to(p))
            return {name: start[name] - p.detach() for name, p in parameters.items()}

    def _change(self, work: LocalSteps) -> Tensors:
        """Return the change of a client that is protected as a whole, clipped as one."""

        def change() -> Tensors:
            walked = self._walk(work, lambda k: self.local.mean_gradient(self.records))
            return clip_as_one(walked, self._config.max_grad_norm)

        return self._work.contribute_as_one(change)

    def _steps(self, work: LocalSteps, first: int) -> Tensors:
        """Return the change by K private steps, each of which is a release."""
        divisor = self._config.local_divisor

        def gradient(k: int) -> Tensors:
            sums = self._work.sum_examples(self._sample(first + k))
            return {name: x / divisor for name, x in self._released(sums, first + k).items()}

        return self._walk(work, gradient)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """PRIVATE: return the state that a client saves beside its ledger, on its own disk only."""
        return {
            "keys": None if self._keys is None else asdict(self._keys),
            "shares": None if self._shares is None else asdict(self._shares),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        keys = state.get("keys")
        shares = state.get("shares")
        self._keys = None if keys is None else RoundKeys(**keys)
        self._shares = None if shares is None else ReceivedShares(**shares)

    def close(self) -> None:
        """Close the client's ledger."""
        self.ledger.close()
