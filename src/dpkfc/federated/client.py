"""Answer the rounds of a server as one client, with its own records, noise and ledger.

Nothing but its messages leaves the client.

A client does not rely on the server for its budget. It charges its own ledger before its noise
exists, answers every round once, and refuses rounds beyond the plan. A refusal carries a constant
reason. A failure that the records have caused is not reported to the server. The failing records
add nothing to the sum, and the answer is a sum like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dpkfc.checkpoint import StrPath
from dpkfc.data.duplicates import check_once
from dpkfc.data.loading import Collate
from dpkfc.data.sampling import Poisson
from dpkfc.federated.client_masks import ClientMasks
from dpkfc.federated.guarded_work import GuardedLocalWork
from dpkfc.federated.local_model import ClientRecords, Indices, LocalModel, clip_as_one
from dpkfc.federated.local_work import LocalSteps
from dpkfc.federated.messages import (
    CLIENT_FAILED,
    CONTRACT_DIFFERS,
    HELLO,
    METRIC_DIFFERS,
    METRIC_MISSING,
    REPEATED,
    SPENT,
    Message,
    Received,
    Refusal,
    add_prefix,
    check_mapping,
    make_failure,
    select_prefix,
)
from dpkfc.federated.party import stream_seed
from dpkfc.federated.plan import FederatedPlan
from dpkfc.gradients.evaluation_points import swap_parameters
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.privacy.mechanism import ClippedSum
from dpkfc.privacy.rng import SamplingStream
from dpkfc.tensors import Tensors

logger = logging.getLogger(__name__)


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
            decides.

    Attributes:
        last_error: the last error, for this client's own operator; never sent.
        failed: whether no record contributed to the last answer because of an error; never sent.

    Raises:
        ValueError: a number outside the plan, more records than it allows, a record that stands
            twice, a channel key of another length; examples that mix, by name of the operation.

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
        verify: bool = True,
    ) -> None:
        if not 0 <= number < plan.config.clients:
            raise ValueError(f"client {number} is not one of the {plan.config.clients} of the plan")
        if local.plan.hash != plan.hash:
            raise ValueError("the local model was made for another plan; make both with one plan")
        self.number = number
        self.plan = plan
        self._config = plan.config
        self.local = local
        if plan.config.privacy.unit == "example":
            check_once(dataset, fix="leave repeats out")
        self.records = ClientRecords(dataset, collate_fn)
        if len(self.records) > plan.config.expected_records:
            raise ValueError(
                "a client holds more records than the plan's expected_records of all clients; make "
                "a new plan"
            )
        self._masks: ClientMasks | None = None
        if plan.config.privacy.masked:
            self._masks = ClientMasks(number, local, channel)
        self._sampling = SamplingStream(stream_seed(plan, number + 1))
        self.ledger = plan.open_ledger(ledger_path, client=number)
        # The server applies filters and read-out.
        self._pipeline = local.make_pipeline(number + 1, self.ledger, plan.client_stddev)
        if verify:
            local.verify(self.records)
        self._work = GuardedLocalWork(local, self.records)
        self.last_error: BaseException | None = None
        self.failed = False

    # -- messages ----------------------------------------------------------------------------------

    def hello(self) -> Message:
        """Return what the server compares before the first round."""
        message = HELLO | {"contract": self.local.contract, "client": self.number}
        if self._masks is not None:
            message["key"] = self._masks.key
        return message

    def answer(self, message: Received) -> Message:
        """Return the answer to a server's message; a refusal is a message with a constant reason.

        No record causes a refusal.
        """
        try:
            check_mapping(message)
            if message.get("contract") != self.local.contract:
                raise Refusal(CONTRACT_DIFFERS)
            if message.get("kind") == "keys":
                return self._make_keys(message)
            if message.get("kind") == "unmask":
                return self._reveal(message)
            self.last_error, self.failed = None, False
            return self._sum(message)
        except Exception as error:
            self.last_error, self.failed = error, True
            reason = CLIENT_FAILED
            if isinstance(error, Refusal):
                reason = str(error)
            elif isinstance(error, BudgetExhausted):
                reason = SPENT
            return make_failure(self.number, message, self.local.contract, reason)

    def _make_keys(self, message: Received) -> Message:
        """Answer a request for keys of a round that was not answered."""
        number = self._new_round(message)
        return self._answer("keys", number) | self._require_masks().make_keys(message, number)

    def _reveal(self, message: Received) -> Message:
        """Answer a request for shares of the last round."""
        number = message["round"]
        shares = self._require_masks().reveal(message, number)
        return self._answer("shares", number) | {"shares": shares}

    def _require_masks(self) -> ClientMasks:
        if self._masks is None:
            raise ValueError(
                "the server requests keys, and the plan sends messages in clear; start both with "
                "one plan"
            )
        return self._masks

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
            raise Refusal(REPEATED)
        return number

    def _sum(self, message: Received) -> Message:
        number = self._new_round(message)
        # Before anything is charged.
        pairs = self._masks.read_pair_keys(message, number) if self._masks else {}
        self.local.load(select_prefix(message, "theta"))
        self._take_metric(message, number)
        self._work = GuardedLocalWork(self.local, self.records)
        sums = self._make_noisy_sum(number)
        noisy = {name: x.cpu() for name, x in sums.items()}
        self._report_failures(number)
        if self._masks is not None:
            noisy = self._masks.mask(noisy, pairs)
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

    def _take_metric(self, message: Received, step: int) -> None:
        """Take the preconditioner of a round, and compare its digest with the server's."""
        wanted = message.get("metric_digest", "")
        if self._config.preconditioner is None or wanted == "":
            return
        if self.local.digest != wanted:
            state = select_prefix(message, "metric")
            if state:
                self.local.take_metric(state)
            else:
                raise Refusal(METRIC_MISSING)
        if self.local.digest != wanted:
            raise Refusal(METRIC_DIFFERS)
        self.local.advance_metric(step)

    # -- private sums ------------------------------------------------------------------------------

    # Programs that judge sums from outside replace this method by its name.
    def _released(self, sums: Tensors, step: int) -> Tensors:
        """Charge the ledger, then return the clipped sum with this client's noise."""
        if self._masks is not None:  # float32 is coarser than the grid
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
        return {} if self._masks is None else self._masks.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        if self._masks is not None:
            self._masks.load_state_dict(state)

    def close(self) -> None:
        """Close the client's ledger."""
        self.ledger.close()
