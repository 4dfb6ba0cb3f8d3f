"""Charge each round before it is sent, add up the answers, and release their noisy mean.

    request_keys    sample the cohort and request its keys, under secure aggregation; nothing is
                    charged yet. Without this call the round has one exchange and no recovery: a
                    lost client costs the round (`secure_aggregation`)
    open_round      charge (on the disk), sample the cohort, build the preconditioner, return
                    messages for the clients
    receive         accept one answer, or reject and count it
    fix_survivors   let no later answer count; return requests for the survivors' shares, under
                    secure aggregation
    close_round     add up the survivors' messages, add noise if the server does so, divide by the
                    public divisor, apply filters and rule

A round with fewer than `min_survivors` answers ends without a release and stays charged. Messages
of single clients are dropped with the round: no attribute, log or checkpoint holds them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from dpkfc import checkpoint, resume_checks
from dpkfc.checkpoint import StrPath
from dpkfc.curvature.base import PreconditionerState
from dpkfc.federated.key_exchange import KeyExchange
from dpkfc.federated.messages import Message, Received, add_prefix, find_problem, to_bytes
from dpkfc.federated.party import PartyModel, stream_seed
from dpkfc.federated.plan import FederatedPlan
from dpkfc.federated.rounds import MetricDelivery, OpenRound, RoundCharge, RoundRecord
from dpkfc.federated.secure_aggregation import decode
from dpkfc.federated.sums import total_norm
from dpkfc.gradients.layers import device_of_layers
from dpkfc.linalg.blocks import accumulation_dtype
from dpkfc.postprocess.pipeline import PostprocessPipeline
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.ledger import BudgetExhausted
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.privacy.rng import SamplingStream
from dpkfc.tensors import Tensors, copy_tensors, copy_to_device, unique_tensors
from dpkfc.weights import ReleasedWeights

logger = logging.getLogger(__name__)


class Server(PartyModel):
    """Holds the model, the ledger and the state of filters and rule; engines carry its messages.

    Args:
        plan: of the run.
        model: any module that a `Session` takes; trained in place.
        ledger_path: file of the ledger; None keeps it in memory.
        budget: of all people whose records the clients have; the whole plan is charged to it when
            the first round begins.

    Raises:
        ValueError: a model that the gradient engine does not cover.
        LedgerError: the ledger belongs to another plan, or cannot be written.
        BudgetExhausted: the plan does not fit into the budget.

    Guarantee:
        All that leaves the server is computed from at most `plan.releases` releases. Each is in
        the ledger before its round is sent.
    """

    def __init__(
        self,
        plan: FederatedPlan,
        model: nn.Module,
        *,
        ledger_path: StrPath | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(plan, model)
        plan.check_accounting()
        self.ledger = plan.open_ledger(ledger_path)
        self._sampling = SamplingStream(stream_seed(plan, 0))
        self._pipeline = self.make_pipeline(
            0,
            self.ledger,
            plan.stddev,
            plan.config.divisor,
            PostprocessPipeline(plan.config.filters, plan.config.readout),
        )
        self._state: Tensors = {}
        self._delivery = MetricDelivery()
        self._exchange: KeyExchange | None = None
        self._open: OpenRound | None = None
        # Public channel key of each client, under secure aggregation.
        self._channels: dict[int, bytes] = {}
        self.enrolled: set[int] = set()
        self.rejected: Counter[str] = Counter()
        self._weights = ReleasedWeights(model)
        # Releases of earlier runs in the ledger; 0 after `restore`.
        self._unrestored_releases = self.ledger.count
        if budget is not None:
            budget.charge_on_begin(plan, self.ledger)

    # -- the protocol ------------------------------------------------------------------------------

    def enroll(self, message: Received) -> bool:
        """Enrol a client by its hello, if it has the same plan, model and frozen weights.

        Returns:
            Whether the client takes part; a rejection is counted.
        """
        reason = self._find_hello_problem(message)
        if reason is not None:
            self._reject(reason, None)
            return False
        number = message["client"]
        self.enrolled.add(number)
        if self._config.privacy.masked:
            self._channels[number] = to_bytes(message["key"])
        return True

    def request_keys(self) -> dict[int, Message]:
        """Sample the next round's cohort and return requests for its keys; nothing is charged.

        Without secure aggregation the answer is empty.

        Raises:
            BudgetExhausted: every release is spent, or another run has spent the budget.
            RuntimeError: a round is in progress, or fewer clients are enrolled than the plan needs.
        """
        self._check_ready()
        if not self._config.privacy.masked:
            return {}
        self._exchange = self._new_exchange(recovers=True)
        return self._exchange.requests(self.contract, self._config.survivors)

    def open_round(self) -> dict[int, Message]:
        """Charge the next round, then return its messages, by client.

        Under secure aggregation without a call of `request_keys` the round has no recovery. All
        clients of its cohort must answer, or the round ends without a release and stays charged.

        Raises:
            BudgetExhausted: every release is spent, or another run has spent the budget; nothing
                was charged, nothing may be sent.
            RuntimeError: a round is in progress, or too few clients are enrolled.
            TooFewKeys: fewer clients have keys than the plan needs; nothing was charged, nothing
                may be sent.
            LedgerError: the charge could not be written; nothing may be sent.
        """
        self._check_ready()
        number = self.next_round
        exchange = self._exchange or self._new_exchange(recovers=False)
        cohort = exchange.select_cohort(self._config.survivors)
        self._pipeline.preconditioning.refresh(number)
        round_charge = RoundCharge.write(self.ledger, self.plan, number)
        self._open = OpenRound(
            number=number,
            cohort=cohort,
            round_charge=round_charge,
            recovers=exchange.recovers,
            keys=exchange.keys,
            rejected=exchange.rejected,
        )
        self._exchange = None
        theta = {name: p.detach().cpu().clone() for name, p in self.parameters.items()}
        common: Message = {"kind": "round", "round": number, "contract": self.contract}
        common |= add_prefix("theta", theta)
        messages = {}
        for client in cohort:
            metric = self._delivery.round_fields(client, self.preconditioner)
            messages[client] = common | metric | exchange.round_fields(client)
        return messages

    def receive(self, message: Received) -> bool:
        """Take an answer; an invalid answer is counted and changes nothing.

        Returns:
            Whether the answer was accepted. A client's error is accepted, and counts as its
            absence.
        """
        stage = self._open or self._exchange
        if stage is None:
            self._reject("no-round", None)
            return False
        reason = self._find_problem(message, stage)
        if reason is not None:
            self._reject(reason, stage)
            return False
        client = message["client"]
        if message["kind"] == "error":
            stage.failed.add(client)
            self._reject(message["reason"], stage)
            self._delivery.note_failure(client)
            return True
        stage.store(message)
        if message["kind"] == "sum":
            self._delivery.note_answer(client, self.preconditioner)
        return True

    def _reject(self, reason: str, stage: KeyExchange | OpenRound | None) -> None:
        self.rejected[reason] += 1
        if stage is not None:
            stage.rejected[reason] += 1

    def fix_survivors(self) -> dict[int, Message]:
        """Close the round to further sums, and return requests for the survivors' shares.

        Without recovery the answer is empty.

        Raises:
            RuntimeError: no round is open.
        """
        this_round = self._current_round()
        if this_round.survivors is None:
            this_round.survivors = tuple(sorted(this_round.sums))
        if not this_round.recovers or len(this_round.survivors) < self._config.survivors:
            return {}
        request: Message = {
            "kind": "unmask",
            "round": this_round.number,
            "contract": self.contract,
            "survivors": torch.tensor(this_round.survivors, dtype=torch.int64),
        }
        return dict.fromkeys(this_round.survivors, request)

    def close_round(self) -> RoundRecord:
        """Release the sum of the survivors and step, or drop the round.

        Raises:
            RuntimeError: no round is open, or other code has written a parameter since the last
                release; the round stays open then.
        """
        self._weights.check_parameters()
        self.fix_survivors()
        this_round = self._current_round()
        # Whatever happens below, no message outlives the round.
        self._open = None
        survivors = this_round.survivors or ()
        count = len(survivors)
        summed = self._sum_survivors(this_round, survivors)
        notes: Mapping[str, float] = {}
        if summed is not None:
            released = self._make_release(this_round, summed, count)
            notes = self._apply_release(released)
        record = RoundRecord(
            round=this_round.number,
            cohort=len(this_round.cohort),
            survivors=count,
            dropped=summed is None,
            rejected=dict(this_round.rejected),
            notes=notes,
        )
        if self._config.samples_clients_secretly:
            return replace(record, cohort=None, survivors=None)
        return record

    def accept_weights(self) -> None:
        """Continue from weights that you have written between two rounds; the card says so.

        As `Session.accept_weights`.
        """
        self._weights.accept(self.ledger.count)

    # -- inside ------------------------------------------------------------------------------------

    def _current_round(self) -> OpenRound:
        if self._open is None:
            raise RuntimeError("no round is open; call open_round first")
        return self._open

    def _check_ready(self) -> None:
        """Check that a round can begin, before anything is sent, and charge the budget once."""
        needed = self._config.survivors
        if self._open is not None:
            raise RuntimeError("a round is in progress; close it first")
        self._weights.check_parameters()
        if len(self.enrolled) < needed:
            raise RuntimeError(
                f"{len(self.enrolled)} clients are enrolled and a round needs {needed}; start more"
                " clients, or make a plan with a smaller min_survivors"
            )
        if self.rounds_left < 1:
            raise BudgetExhausted(
                f"all {self._config.rounds} rounds of the plan are spent (ε ="
                f" {self.epsilon:.3g}); nothing was sent"
            )
        self.ledger.begin()

    def _new_exchange(self, *, recovers: bool) -> KeyExchange:
        """Sample the next round's cohort for an exchange of keys."""
        cohort = self._sample_cohort(self.next_round)
        enrolled = self._channels.keys() & self.enrolled
        channels = {client: self._channels[client] for client in cohort if client in enrolled}
        return KeyExchange(self.next_round, cohort, channels, recovers, self._config.privacy.masked)

    def _sample_cohort(self, number: int) -> tuple[int, ...]:
        """Sample registered clients at the plan's rate; an absent client counts as lost."""
        draws = self._sampling.generator(number).random(self._config.clients)
        return tuple((draws < self._config.client_rate).nonzero()[0].tolist())

    def _find_hello_problem(self, message: Received) -> str | None:
        """Return why a client is not enrolled; None if it is."""
        reason = find_problem(
            message, self.shapes, self.contract, masked=self._config.privacy.masked
        )
        if reason is not None:
            return reason
        if message["kind"] != "hello" or message["client"] not in range(self._config.clients):
            return "unknown-client"
        return "duplicate" if message["client"] in self.enrolled else None

    def _find_problem(self, message: Received, stage: KeyExchange | OpenRound) -> str | None:
        """Return why an answer does not count; None if it counts."""
        reason = find_problem(
            message,
            self.shapes,
            self.contract,
            max_norm=self.plan.largest_message(self.numbers),
            masked=self._config.privacy.masked,
            rows=len(stage.cohort),
        )
        return reason or stage.find_problem(message, self.enrolled)

    def _sum_survivors(self, this_round: OpenRound, survivors: Sequence[int]) -> Tensors | None:
        """Return the sum of the survivors' messages; None for too few, or wrong shares."""
        needed = self._config.survivors
        if len(survivors) < needed:
            return None
        if not self._config.privacy.masked:
            return this_round.sum_survivors(self.parameters)
        try:
            integers = this_round.unmask_survivors(needed, self.contract)
        except ValueError as error:
            logger.error(
                "round %d: %s. The round ends without a release and stays charged",
                this_round.number,
                error,
            )
            self._reject("wrong-shares", this_round)
            return None
        if integers is None:
            return None
        summed = decode(integers, self.plan.grid(self.numbers), self.parameters)
        # A larger sum is not a sum of honest messages: a client sent a wrong message or share.
        if total_norm(summed) > len(survivors) * self.plan.largest_message(self.numbers):
            self._reject("oversized", this_round)
            return None
        return summed

    def _make_release(self, this_round: OpenRound, summed: Tensors, survivors: int) -> Released:
        """Return the noisy mean over the public divisor.

        A trusted server adds its noise here. Elsewhere the messages carry the noise.
        """
        plan, divisor = self.plan, self._config.divisor
        step = this_round.number * plan.per_round
        if plan.config.privacy.noise_by == "server":
            clipped = ClippedSum(summed, plan.config.max_grad_norm)
            return self._pipeline.release(clipped, step, ledger=this_round.round_charge)
        number = this_round.round_charge.charge(step, plan.event)
        mean = {
            name: x.div_(divisor).to(accumulation_dtype(self.parameters[name]))
            for name, x in summed.items()
        }
        return Released(
            gradients=mean, noise_variance=plan.mean_variance(survivors), step=step, release=number
        )

    def _apply_release(self, released: Released) -> Mapping[str, float]:
        """Filter a release and move the parameters; return public numbers of filters and rule."""
        direction = self._pipeline.make_update(released, in_place=True)
        with torch.no_grad():
            update, self._state = self._config.rule.step(direction.gradients, self._state)
            for name, p in self.parameters.items():
                p.sub_(update[name].to(p.dtype))
        self._weights.record()
        return direction.notes

    # -- what was spent, and checkpoints -----------------------------------------------------------

    @property
    def unprotected_figures(self) -> dict[str, str]:
        """Return what ε does not cover: weights that other code has written."""
        return self._weights.unprotected_figures

    @property
    def rounds_left(self) -> int:
        """Return the number of rounds that may still be sent out."""
        return cast(int, self.ledger.remaining) // self.plan.per_round

    @property
    def next_round(self) -> int:
        """Return the number of the next round that is charged."""
        return self.ledger.count // self.plan.per_round

    @property
    def round(self) -> int:
        """Return the number of the round in progress.

        Raises:
            RuntimeError: no round is open.
        """
        return self._current_round().number

    @property
    def epsilon(self) -> float:
        """Return ε of all releases in the ledger at the plan's δ; dropped rounds count."""
        return self.plan.curve.epsilon(self.ledger.count)

    @property
    def preconditioner(self) -> PreconditionerState | None:
        """Return the preconditioner that the clients use now; None without one."""
        return self.coordinates.current

    def write_card(
        self, folder: StrPath, records: Sequence[RoundRecord], **statements: Any
    ) -> dict[str, Any]:
        """Write weights, a copy of the ledger and the privacy card, as `Session.write_card` does.

        Args:
            folder: made if it is missing.
            records: what `close_round` returned, one of each round.
            statements: `title`, `chosen_by`, `results`, `not_private`, `declared` and `total` of
                `dpkfc.report.federated_card.build_federated_card`.

        Raises:
            RuntimeError: no round was released, or the model does not hold what was released last.
            CheckpointError: the folder holds another run, or cannot be written.
        """
        from dpkfc.report.card_files import write_weights_and_card
        from dpkfc.report.federated_card import build_federated_card

        state = self.released_state()
        card = build_federated_card(self, records, **statements)
        return write_weights_and_card(folder, state, self.ledger, card)

    def released_state(self) -> Tensors:
        """Return the released weights.

        Raises:
            RuntimeError: no round was released, or the model does not hold what was released last.
        """
        self._weights.check()
        state = self.model.state_dict()
        self._weights.check_state(state)
        return copy_tensors(state)

    def save(self, folder: StrPath, extra: Any = None) -> None:
        """Write a checkpoint between rounds.

        The checkpoint holds released parameters, the states of filters and rule, and the
        preconditioner. It holds no message.

        Raises:
            RuntimeError: a round is open.
            CheckpointError: a folder that cannot be written, or a checkpoint that this server did
                not continue from.
        """
        if self._open is not None:
            raise RuntimeError(
                "a round is open, and a checkpoint holds no messages; close the round first"
            )
        resume_checks.refuse_foreign_checkpoint(
            folder, self._unrestored_releases, self.ledger.contains
        )
        groups = {
            "model": unique_tensors(self.model.state_dict()),
            "filters": self._pipeline.postprocess.state_dict(),
            "rule": self._state,
        }
        if self.preconditioner is not None:
            groups["preconditioner"] = self.preconditioner.state_dict()
        meta = {
            "plan": self.plan.hash,
            "contract": self.contract,
            "ledger_count": self.ledger.count,
            "ledger_head": self.ledger.head,
            "accepted": self._weights.accepted,
            "extra": extra,
        }
        filled = {name: tensors for name, tensors in groups.items() if tensors}
        checkpoint.write(folder, filled, meta)

    def restore(self, folder: StrPath) -> Any:
        """Continue from a checkpoint of the same plan and ledger; later rounds stay charged.

        Returns:
            The `extra` that was given to `save`.

        Raises:
            CheckpointError: damaged, or of another plan, model or ledger; nothing is loaded then.
        """
        tensors, meta = checkpoint.read(folder)
        if meta.get("contract") != self.contract or "model" not in tensors:
            raise checkpoint.CheckpointError(
                f"the checkpoint {folder} belongs to another plan or model; resume with its own"
            )
        count = meta["ledger_count"]
        is_own = self.ledger.contains(count, meta["ledger_head"])
        resume_checks.check_ledger(is_own, count, folder)
        with resume_checks.explain_misfits(folder):
            state = unique_tensors(self.model.state_dict())
            resume_checks.check_same_tensors(state, tensors["model"])
            device = device_of_layers(self.layers)
            preconditioner = None
            if "preconditioner" in tensors:
                preconditioner = self.coordinates.restore(tensors["preconditioner"])
            self._pipeline.postprocess.load_state_dict(
                copy_to_device(tensors.get("filters", {}), device)
            )
            self._state = copy_to_device(dict(tensors.get("rule", {})), device)
            self.coordinates.current = preconditioner
            self.model.load_state_dict(tensors["model"], strict=False)
            self._weights = ReleasedWeights(self.model, meta.get("accepted", ()))
            self._weights.record()
        self._unrestored_releases = 0
        self._delivery.forget()
        return meta["extra"]

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()
