"""A client: its records, its noise, its own ledger, and one answer to a round. Nothing else leaves it.

A client trusts nobody with its budget: it charges its own ledger before its noise exists, answers every round once, refuses
rounds beyond the plan, and says no more about a refusal than that there was one. A failure that its records have caused is not
said at all: the records that failed add nothing to its sum (`tried`), and the answer is a sum like any other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpkfc.curvature.probe_pass import copy_to_device
from dpkfc.data.sampling import Poisson
from dpkfc.federated import messages
from dpkfc.federated.local_training import LocalModel, Records, Tensors, clipped_whole
from dpkfc.federated.messages import Message, flat, group, split_rows, stack_rows, to_tensor
from dpkfc.federated.options import FedNewStep, LocalSteps, ScaffoldSteps
from dpkfc.federated.plan import SEED, FederatedPlan, Mechanism, stream_seed
from dpkfc.federated.secure_aggregation import (
    FEWEST_STEPS,
    PrivateKey,
    ReceivedShares,
    RoundKeys,
    channel_pair_keys,
    encoded,
    mask,
    mask_pairs,
    new_key,
    open_shares,
    pair_keys,
    reveal,
    round_scope,
    seal_shares,
)
from dpkfc.privacy.ledger import BudgetExhausted, Ledger
from dpkfc.privacy.mechanism import ClippedSum, release
from dpkfc.privacy.rng import NoiseStream, SamplingStream
from dpkfc.verification.examples import checked_verify

# --------------------------------------------------------------------------------------------------
# What a client sends where work on its records fails: whether it takes part must not depend on one
# of them.
#
# An exception from the loss or the collate function is not told to the server. The round is charged
# and answered with the noise that is owed, on a sum to which the records that failed add nothing:
#
#     single examples   those that fail are found by halving; all others add what they add without them, so that one record moves
#                       the sum by no more than its own clipped gradient, whatever it does to a batch
#     clipped as one    zeros, as of a client without records: a contribution of norm C that is missing moves the sum by C


class Tried:
    """One round's work of a client on its records, and what went wrong in it.

    Args:
        local: model of the client.
        records: of the client.

    Attributes:
        error: the first that was met, None where there was none; PRIVATE.
    """

    def __init__(self, local: LocalModel, records: Records) -> None:
        self._local, self._records = local, records
        self._worked = False
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        """PRIVATE: whether nothing of the records is in what was sent."""
        return self.error is not None and not self._worked

    def examples(self, drawn: NDArray[np.int64]) -> Tensors:
        """PRIVATE: the sum of clipped gradients of the records drawn; where a batch fails, that of its halves.

        A record that fails alone adds zeros.

        Args:
            drawn: indices `[n]`.
        """
        if not drawn.size:
            return self._local.zeros()
        try:
            sums = self._local.clipped_sum(self._records, drawn)
        except Exception as error:
            self._met(error)
            if drawn.size == 1:
                return self._local.zeros()
            one, other = (self.examples(half) for half in np.array_split(drawn, 2))
            return {name: x + other[name] for name, x in one.items()}
        self._worked = True
        return sums

    def whole(self, work: Callable[[], Tensors]) -> Tensors:
        """PRIVATE: a contribution that is clipped as one; zeros where there are no records, or where it fails.

        Args:
            work: gives the clipped contribution.
        """
        if not len(self._records):
            return self._local.zeros()
        try:
            found = work()
        except Exception as error:
            self._met(error)
            return self._local.zeros()
        self._worked = True
        return found

    def _met(self, error: Exception) -> None:
        self.error = self.error or error


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """A round that is not answered, for one of the reasons on the list."""


class Client:
    """One party with records.

    Args:
        number: of the client, 0 … n − 1.
        plan: of the run.
        local: its model; clients of one process may share one.
        dataset: its own records, a map-style dataset or a tuple of tensors; at most `expected_records`, possibly none.
        collate_fn: list of examples to a batch.
        ledger_path: file of the client's own ledger; None keeps it in memory.
        channel: private key of the client's channels to the others, 32 bytes, for secure aggregation; None makes one. A key
            goes with one ledger: a second ledger would let it mask a second message of a round alike.
        verify: check model and loss on public rows before the first round; no value of a record decides. "strict" refuses
            operations without a batch rule.

    Raises:
        ValueError: a number outside the plan, more records than it allows, a channel key of another length; examples that mix, by
            name of the operation.

    Guarantee:
        At most `plan.releases` releases ever, each on the client's ledger before it exists. What is protected from whom is
        `plan.config.privacy`; under `TrustedServer("server")` the messages are NOT private, and the server must be.
    """

    def __init__(
        self,
        number: int,
        plan: FederatedPlan,
        local: LocalModel,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        ledger_path: str | os.PathLike[str] | None = None,
        channel: bytes | None = None,
        verify: bool | str = True,
    ) -> None:
        verify = checked_verify(verify)
        if not 0 <= number < plan.config.clients:
            raise ValueError(f"client {number} is not one of the {plan.config.clients} of the plan")
        if local.plan.hash != plan.hash:
            raise ValueError("the local model was made for another plan")
        self.number, self.plan, self.local = number, plan, local
        self._channel = PrivateKey(new_key() if channel is None else channel)
        self.records = Records(dataset, collate_fn)
        if len(self.records) > plan.config.expected_records:
            raise ValueError(
                "a client holds more records than the plan's expected_records of all clients; make a plan anew"
            )
        if plan.config.privacy.masked and plan.share > 0 and plan.share / plan.grid(local.numbers) < FEWEST_STEPS:
            raise ValueError("the noise of one client is too small for the grid of secure aggregation; raise the noise")
        seed = stream_seed(plan, number + 1)
        self._noise = NoiseStream.secure() if seed is None else NoiseStream.repeatable(seed)
        self._sampling = SamplingStream.secure() if seed is None else SamplingStream.repeatable(seed)
        header = {**plan.ledger_header, "client": number}
        opened = Ledger.in_memory if ledger_path is None else lambda *a: Ledger.open(ledger_path, *a)
        self.ledger: Ledger = opened(plan.hash, header, plan.releases)
        if verify:
            local.verify(self.records, strict=verify == "strict")
        self._tried = Tried(local, self.records)
        self._control: Tensors = {}  # c_i of SCAFFOLD, λ_i of FedNew: never sent
        self._last: Tensors = {}  # ŷ_i of FedNew, and the round it was made in
        self._last_round = -1
        self._keys: RoundKeys | None = None  # of the round that this client sent keys for last
        self._shares: ReceivedShares | None = None  # of the round that this client sent a masked sum for last
        # For this client's own operator, never sent: what went wrong last, and whether nothing of its records was in its answer.
        self.last_error: BaseException | None = None
        self.failed = False

    # -- messages ------------------------------------------------------------------------------------------------------

    def hello(self) -> Message:
        """What is compared before the first round."""
        plain: Message = {"kind": "hello", "contract": self.local.contract, "client": self.number}
        return plain | ({"key": to_tensor(self._channel.public)} if self._masked else {})

    def answer(self, message: Mapping[str, Any]) -> Message:
        """The answer to a server's message; a refusal, which no record has caused, becomes a message with a constant reason."""
        try:
            if message.get("contract") != self.local.contract:
                raise _Refused(messages.CONTRACT_DIFFERS)
            if message.get("kind") == "keys":
                return self._new_keys(message)
            if message.get("kind") == "unmask":
                return self._reveal(message)
            self.last_error, self.failed = None, False
            return self._sum(message)
        except Exception as error:
            self.last_error, self.failed = error, True
            known = str(error) if isinstance(error, _Refused) else messages.CLIENT_FAILED
            reason = messages.SPENT if isinstance(error, BudgetExhausted) else known
            found = message.get("round")
            number = found if type(found) is int else -1
            return self._answer("error", number) | {"reason": reason}

    def _answer(self, kind: str, number: int) -> Message:
        return {"kind": kind, "round": number, "contract": self.local.contract, "client": self.number}

    def _check_new(self, number: int) -> None:
        """Refuse a round that was answered: a second answer would be a second release of it."""
        done = self.ledger.releases
        if done and number <= done[-1]["step"] // self.plan.per_round:
            raise _Refused(messages.REPEATED)

    def _sum(self, message: Mapping[str, Any]) -> Message:
        number = int(message["round"])
        self._check_new(number)
        pairs = self._pair_keys(message, number) if self._masked else {}
        self.local.load(group(message, "theta"))
        self._take_metric(message, number)
        self._tried = Tried(self.local, self.records)
        extra, made = group(message, "extra"), int(message.get("extra_round", -1))
        noisy = {name: x.cpu() for name, x in self._noisy(number, extra, made).items()}
        self._note(number, self._tried)
        if self._masked:
            noisy = self._mask(noisy, pairs)
        return self._answer("sum", number) | flat("sum", noisy)

    def _note(self, number: int, tried: Tried) -> None:
        """What its records did, for the client's own operator: the answer does not tell."""
        self.last_error, self.failed = tried.error, tried.failed
        if tried.error is not None:
            what = "all of its records" if tried.failed else "some of its records"
            logger.error("client %d, round %d: %s failed and add nothing: %r", self.number, number, what, tried.error)

    # -- secure aggregation --------------------------------------------------------------------------------------------

    @property
    def _masked(self) -> bool:
        return self.plan.config.privacy.masked

    def _cohort(self, message: Mapping[str, Any]) -> list[int]:
        """The clients to mask a message with: fewer than the plan needs are too few masks, and too little noise."""
        cohort: list[int] = message["cohort"].tolist()
        known = all(0 <= other < self.plan.config.clients for other in cohort)
        if not known or cohort != sorted(set(cohort)) or self.number not in cohort:
            raise _Refused(messages.CLIENT_FAILED)
        if len(cohort) < self.plan.config.survivors:
            raise _Refused(messages.CLIENT_FAILED)
        return cohort

    def _new_keys(self, message: Mapping[str, Any]) -> Message:
        """Make the secrets of a round that is not answered yet, and seal shares of them for every client of the cohort."""
        if not self._masked:
            raise ValueError("the server requests keys, and the plan sends messages in clear; start both with one plan")
        number = int(message["round"])
        self._check_new(number)
        channels = split_rows(message["channels"], self._cohort(message))
        keys = RoundKeys(contract=self.local.contract, round=number)
        sealed = seal_shares(keys, self.number, self._channel, channels, self.plan.config.survivors)
        self._keys = keys
        return self._answer("keys", number) | {"key": to_tensor(keys.public), "sealed": stack_rows(sealed)}

    def _pair_keys(self, message: Mapping[str, Any], number: int) -> dict[int, bytes]:
        """Agree with the others on pair masks, before anything is charged: by new mask keys, or by channel keys."""
        if "mask_keys" in message:
            return self._take_shares(message, number)
        self._keys = self._shares = None  # no share of a round without recovery is ever revealed
        channels = split_rows(message["channels"], self._cohort(message))
        if channels[self.number] != self._channel.public:
            raise ValueError(f"the channel key of this client was changed in round {number}; enrol this client again")
        return channel_pair_keys(self.number, self._channel, channels, round_scope(self.local.contract, number))

    def _take_shares(self, message: Mapping[str, Any], number: int) -> dict[int, bytes]:
        """Open what the others sealed for this client, and agree on pair masks with them."""
        keys, cohort = self._keys, self._cohort(message)
        public = split_rows(message["mask_keys"], cohort)
        if keys is None or keys.round != number:
            raise ValueError(f"this client has no keys for round {number}; the server must request keys first")
        if public[self.number] != keys.public:
            raise ValueError(f"the mask key of this client was changed in round {number}; the server must request keys again")
        channels, sealed = split_rows(message["channels"], cohort), split_rows(message["sealed"], cohort)
        self._shares = open_shares(keys, self.number, self._channel, channels, public=public, sealed=sealed)
        return pair_keys(keys, self.number, public)

    def _mask(self, noisy: Tensors, pairs: Mapping[int, bytes]) -> Tensors:
        """Mask the noisy sum, then forget the secrets of the round: the others store the shares of them."""
        integers, keys = encoded(noisy, self.plan.grid(self.local.numbers)), self._keys
        self._keys = None
        return mask_pairs(integers, self.number, pairs) if keys is None else mask(integers, self.number, keys, pairs)

    def _reveal(self, message: Mapping[str, Any]) -> Message:
        """Reveal one share of each client, for one survivor set of the round that was answered last."""
        number, received = int(message["round"]), self._shares
        survivors = tuple(sorted(message["survivors"].tolist()))
        if received is None or received.round != number or self._keys is not None:
            raise ValueError(f"this client has sent no masked sum in round {number}, so it reveals no shares")
        enough = len(set(survivors)) == len(survivors) >= self.plan.config.survivors
        if self.number not in survivors or not enough or not set(survivors) <= set(received.cohort):
            raise ValueError(f"the survivors of round {number} are too few, lack this client or lie outside its cohort")
        if received.survivors not in ((), survivors):
            raise _Refused(messages.REPEATED)  # a second set would reveal both secrets of a client
        self._shares = replace(received, survivors=survivors)
        return self._answer("shares", number) | {"shares": stack_rows(reveal(received, survivors))}

    def _take_metric(self, message: Mapping[str, Any], step: int) -> None:
        wanted = message.get("metric_digest", "")
        if self.plan.config.preconditioner is None or wanted == "":
            return
        state, seeded = group(message, "metric"), self.plan.config.metric == SEED
        if self.local.digest != wanted and state:
            self.local.take_metric(state)
        elif self.local.digest != wanted and seeded:
            self.local.build_metric(step)
        if self.local.digest != wanted:
            raise _Refused(messages.METRIC_DIFFERS if state or seeded else messages.METRIC_MISSING)
        self.local.at_step(step)

    # -- private sums --------------------------------------------------------------------------------------------------

    def _released(self, sums: Tensors, step: int) -> Tensors:
        """A share of the noise on a sum that was clipped; on the ledger first."""
        if self.plan.config.privacy.masked:  # the grid needs more digits than float32 has
            sums = {name: x.double() for name, x in sums.items()}
        clipped = ClippedSum(sums, self.plan.config.max_grad_norm)
        return release(clipped, Mechanism(self.plan, self.plan.share), self._noise, self.ledger, step).gradients

    def _drawn(self, step: int) -> NDArray[np.int64]:
        """All records, or a Poisson sample of them."""
        size, rate = len(self.records), self.plan.config.example_rate
        if rate == 1 or size == 0:
            return self.records.all
        return Poisson(rate, size).indices(step, self._sampling.generator(step))

    def _noisy(self, number: int, extra: Tensors, made: int) -> Tensors:
        """The sum of a round with its noise; `extra` is what the rule shares, of the round `made`."""
        work, first = self.plan.config.local, number * self.plan.per_round
        whole = self.plan.config.privacy.unit == "client"
        if isinstance(work, FedNewStep):
            return self._released(self._newton(work, number, extra, made), first)
        if isinstance(work, LocalSteps):
            return self._released(self._change(work, extra), first) if whole else self._steps(work, extra, first)
        drawn = self._drawn(first)
        if not whole:
            return self._released(self._tried.examples(drawn), first)
        return self._released(self._tried.whole(lambda: self.local.clipped_sum(self.records, drawn, together=True)), first)

    def _correction(self, work: LocalSteps, extra: Tensors) -> Tensors:
        """Control variates c − c_i; nothing without them."""
        if not isinstance(work, ScaffoldSteps):
            return {}
        zeros = {name: torch.zeros_like(p) for name, p in self.local.parameters.items()}
        own = self._control or zeros
        return {name: extra.get(name, zeros[name]).to(own[name]) - own[name] for name in zeros}

    def _walk(self, work: LocalSteps, extra: Tensors, gradient: Callable[[int], Tensors]) -> Tensors:
        """θ₀ − θ_K of K steps along a gradient."""
        correction = self._correction(work, extra)
        with self.local.moving() as start:
            for k in range(work.steps):
                found = gradient(k)
                with torch.no_grad():
                    for name, p in self.local.parameters.items():
                        p.sub_(work.learning_rate * (found[name].to(p) + correction.get(name, 0)))
            return {name: start[name] - p.detach() for name, p in self.local.parameters.items()}

    def _controlled(self, work: LocalSteps, extra: Tensors, sent: Tensors) -> Tensors:
        """What is sent, after c_i ← c_i − c + sent / (K η): the server's c follows what it is sent, hence so must c_i."""
        scale = 1 / (work.steps * work.learning_rate)
        correction = self._correction(work, extra)
        if correction:
            self._control = {name: sent[name].to(x) * scale - x for name, x in correction.items()}
        return sent

    def _change(self, work: LocalSteps, extra: Tensors) -> Tensors:
        """The change of a client that is protected as a whole, clipped as one."""

        def change() -> Tensors:
            walked = self._walk(work, extra, lambda k: self.local.mean_gradient(self.records))
            return clipped_whole(walked, self.plan.config.max_grad_norm)

        return self._controlled(work, extra, self._tried.whole(change))

    def _steps(self, work: LocalSteps, extra: Tensors, first: int) -> Tensors:
        """The change by K private steps: every one a release of its own, so that the change is one."""

        def gradient(k: int) -> Tensors:
            sums = self._tried.examples(self._drawn(first + k))
            return {n: x / self.plan.config.local_divisor for n, x in self._released(sums, first + k).items()}

        return self._controlled(work, extra, self._walk(work, extra, gradient))

    def _newton(self, work: FedNewStep, number: int, y: Tensors, made: int) -> Tensors:
        """FedNew's direction, clipped as one; the dual variable follows the clipped one and y, where both are of one round.

        A round that was dropped has no y, and one that the client missed has no direction of its own: λ_i stays.
        """
        names = list(self.local.parameters)
        zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.local.parameters.items()}
        y = {name: y[name].to(zeros[name]) if y else zeros[name] for name in names}
        dual = self._control or zeros
        if self._last and self._last_round == made:
            dual = {n: dual[n] + work.rho * (self._last[n].double() - y[n]) for n in names}
        self._control = dual
        self._last, self._last_round = self._tried.whole(lambda: self._direction(work, dual, y)), number
        return self._last

    def _direction(self, work: FedNewStep, dual: Tensors, y: Tensors) -> Tensors:
        names = list(self.local.parameters)
        g = self.local.mean_gradient(self.records)
        right = torch.cat([(g[n].double() - dual[n] + work.rho * y[n]).flatten() for n in names])
        matrix = self.local.fisher(self.records)
        matrix.diagonal().add_(work.alpha + work.rho)
        solved = torch.linalg.solve(matrix, right).split([p.numel() for p in self.local.parameters.values()])
        pieces = zip(self.local.parameters.items(), solved, strict=True)
        direction = {n: x.view(p.shape).to(p.dtype) for (n, p), x in pieces}
        return clipped_whole(direction, self.plan.config.max_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """PRIVATE: what outlives a process beside the ledger, for this client's own disk and nothing else."""
        return {
            "control": dict(self._control),
            "last": dict(self._last),
            "last_round": self._last_round,
            "keys": None if self._keys is None else asdict(self._keys),
            "shares": None if self._shares is None else asdict(self._shares),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state_dict` gave."""
        device = next(iter(self.local.parameters.values())).device
        self._control, self._last = (copy_to_device(dict(state[name]), device) for name in ("control", "last"))
        self._last_round = int(state.get("last_round", -1))
        keys, shares = state.get("keys"), state.get("shares")
        self._keys = None if keys is None else RoundKeys(**keys)
        self._shares = None if shares is None else ReceivedShares(**shares)

    def close(self) -> None:
        """Close the client's ledger."""
        self.ledger.close()
