"""Secure aggregation: exact sums after every dropout, and what a server and its colluding clients
cannot open.
"""

import itertools

import pytest
import torch

from dpkfc.federated import SecureAggregation, TrustedServer, federate
from dpkfc.federated.key_agreement import PrivateKey, new_key, seal, uniform_integers, unseal
from dpkfc.federated.messages import select_prefix, split_rows, to_bytes
from dpkfc.federated.secure_aggregation import (
    RoundKeys,
    _pair_key,
    _pair_mask,
    _self_mask,
    channel_pair_keys,
    decode,
    encode,
    mask,
    open_shares,
    pair_keys,
    reveal,
    round_scope,
    seal_shares,
    total,
    unmask,
)
from dpkfc.federated.shamir import join
from dpkfc.federated.simulation import run_round
from dpkfc.report.card_files import to_markdown
from dpkfc.report.federated_card import build_federated_card
from tests.federated.worlds import (
    CLIENTS,
    datasets,
    head,
    loss_fn,
    open_round,
    plan_of,
    run_round_without,
    vector,
    world,
)

# a sum of a few small numbers in steps of the grid stays far below, a mask far above
FEW_STEPS = 2.0**55
SIZES = {"w": (7, 3), "b": (5,)}
CONTRACT = "c" * 64
SCOPE = round_scope(CONTRACT, 3)


class Cohort:
    """Clients of one round of the bare protocol, with everything that each of them knows."""

    def __init__(self, clients, threshold):
        self.members, self.threshold = range(clients), threshold
        generator = torch.Generator().manual_seed(0)
        self.channel = {i: PrivateKey(new_key()) for i in self.members}
        channels = {i: key.public for i, key in self.channel.items()}
        self.keys = {i: RoundKeys(contract=CONTRACT, round=3) for i in self.members}
        self.public = {i: keys.public for i, keys in self.keys.items()}
        sealed = {
            i: seal_shares(self.keys[i], i, self.channel[i], channels, threshold)
            for i in self.members
        }
        self.held = {
            i: open_shares(
                self.keys[i],
                i,
                self.channel[i],
                channels,
                public=self.public,
                sealed={j: sealed[j][i] for j in self.members},
            )
            for i in self.members
        }
        self.plain = {
            i: {
                n: torch.randint(-1000, 1000, shape, generator=generator)
                for n, shape in SIZES.items()
            }
            for i in self.members
        }
        self.sent = {
            i: mask(self.plain[i], i, pair_keys(self.keys[i], i, self.public), self.keys[i])
            for i in self.members
        }

    def pair(self, client, other):
        private = PrivateKey(bytes.fromhex(self.keys[client].mask_key))
        return _pair_mask(
            _pair_key(SCOPE, client, private, other, self.public[other]), client, other, SIZES
        )

    def own(self, client):
        return _self_mask(SCOPE, bytes.fromhex(self.keys[client].self_seed), SIZES)


def mean_size(integers):
    return float(torch.cat([x.flatten() for x in integers.values()]).double().abs().mean())


def minus(one, *others):
    return {
        name: x - sum(other[name] for other in others) if others else x for name, x in one.items()
    }


@pytest.mark.parametrize(
    "missing, silent",
    [((), ()), ((0, 4), ()), ((5,), (1,)), ((), (0, 3))],
)
def test_dropouts_leave_exactly_the_sum_of_the_survivors(missing, silent):
    """Clients that are missing send keys and no sum; silent ones send a sum and reveal no
    shares.
    """
    cohort = Cohort(6, 4)
    sums = {i: x for i, x in cohort.sent.items() if i not in missing}
    shares = {i: reveal(cohort.held[i], sums) for i in sums if i not in silent}
    opened = unmask(sums, cohort.public, shares, 4, SCOPE)
    expected = total(cohort.plain[i] for i in sums)
    assert all(torch.equal(x, expected[name]) for name, x in opened.items())
    grid = 2.0**-20
    numbers = decode(expected, grid, expected)
    assert all(torch.equal(x, expected[name]) for name, x in encode(numbers, grid).items())


@pytest.mark.parametrize("colluding", [(), (0, 2, 5)])
def test_a_server_with_colluding_clients_sees_only_the_sum_of_the_others(colluding):
    """Subtract the masks that they know from each sum of messages: only the sum of all others is
    small.
    """
    cohort = Cohort(7, 4)
    assert len(colluding) < cohort.threshold
    missing = {6}
    survivors = {i: x for i, x in cohort.sent.items() if i not in missing}
    honest = [i for i in survivors if i not in colluding]
    known = {}
    # The server computes self masks of survivors and pair masks with missing clients. Colluding
    # clients know their own masks.
    for i in honest:
        pairs = [cohort.pair(i, j) for j in cohort.members if j in missing or j in colluding]
        known[i] = total([cohort.own(i), *pairs])
    check_opened(cohort, {i: minus(cohort.sent[i], known[i]) for i in honest})


def check_opened(cohort, opened):
    """Check that the sum of all messages is small, and no other sum, without the known masks."""
    for size in range(1, len(opened)):
        for chosen in itertools.combinations(opened, size):
            assert mean_size(total([opened[i] for i in chosen])) > FEW_STEPS
    expected = total(cohort.plain[i] for i in opened)
    assert all(torch.equal(x, expected[name]) for name, x in total(opened.values()).items())


@pytest.mark.parametrize("colluding", [(), (0, 2, 4)])
def test_without_recovery_a_server_with_colluding_clients_sees_only_the_sum_of_the_others(
    colluding,
):
    cohort = Cohort(5, 3)
    channels = {i: key.public for i, key in cohort.channel.items()}
    pairs = {i: channel_pair_keys(i, cohort.channel[i], channels, SCOPE) for i in cohort.members}
    sent = {i: mask(cohort.plain[i], i, pairs[i]) for i in cohort.members}
    honest = [i for i in cohort.members if i not in colluding]
    opened = {
        i: minus(sent[i], *[_pair_mask(pairs[j][i], i, j, SIZES) for j in colluding])
        for i in honest
    }
    check_opened(cohort, opened)


def test_without_recovery_pair_masks_of_two_rounds_plans_or_cohorts_differ():
    channel = {i: PrivateKey(new_key()) for i in range(4)}
    public = {i: key.public for i, key in channel.items()}
    cohorts = (public, {i: public[i] for i in (0, 1, 2)}, {i: public[i] for i in (0, 1, 3)})
    scopes = (SCOPE, round_scope(CONTRACT, 4), round_scope("d" * 64, 3))
    keys = {
        channel_pair_keys(0, channel[0], some, scope)[1] for some in cohorts for scope in scopes
    }
    assert len(keys) == len(cohorts) * len(scopes)
    assert channel_pair_keys(1, channel[1], public, SCOPE)[0] in keys
    assert channel[0].agree(public[1], f"pair mask: clients 0 and 1 in {SCOPE}") not in keys


def test_a_late_message_stays_masked_when_all_its_pair_masks_are_known():
    cohort, late = Cohort(5, 3), 4
    sums = {i: x for i, x in cohort.sent.items() if i != late}
    shares = {i: reveal(cohort.held[i], sums) for i in sums}
    rows = {i + 1: [row[late]] for i, row in shares.items()}
    assert join(rows, 3)[0].hex() == cohort.keys[late].mask_key  # the server has its mask key
    opened = minus(cohort.sent[late], *[cohort.pair(late, i) for i in range(4)])
    assert mean_size(opened) > FEW_STEPS
    assert all(
        torch.equal(x, cohort.plain[late][n]) for n, x in minus(opened, cohort.own(late)).items()
    )


def test_a_sealed_text_that_was_changed_or_moved_is_one_clear_error():
    key, context = new_key(), "shares of client 3: for client 1"
    sealed = seal(key, b"text", context)
    assert unseal(key, sealed, context) == b"text" and seal(key, b"text", context) != sealed
    changed = [
        (key, sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :], context)
        for i in (0, 12, len(sealed) - 1)
    ]
    for wrong in [
        *changed,
        (new_key(), sealed, context),
        (key, sealed, context + " in round 4"),
        (key, sealed[:20], context),
    ]:
        with pytest.raises(ValueError, match="the sealed shares of client 3 cannot be opened"):
            unseal(*wrong)


def test_both_ends_of_a_pair_agree_and_purposes_differ():
    one, other = PrivateKey(new_key()), PrivateKey(new_key())
    assert (
        one.agree(other.public, "a") == other.agree(one.public, "a") != one.agree(other.public, "b")
    )
    with pytest.raises(ValueError):
        one.agree(bytes(32), "a")  # a point of low order gives a key that everyone knows
    assert (
        abs(float(torch.from_numpy(uniform_integers(new_key(), 20_000)).double().mean()))
        < 2.0**63 / 50
    )


# -- clients and server ----------------------------------------------------------------------------


def masked_round(min_survivors=3):
    """A round that clients 0, 1 and 2 have answered, and the message of client 3, which is still on
    its way.
    """
    server, clients = world(plan_of(privacy=SecureAggregation(), min_survivors=min_survivors))
    sent = open_round(server, clients)
    messages = {i: clients[i].answer(sent[i]) for i in clients}
    assert all(server.receive(messages[i]) for i in (0, 1, 2))
    return server, clients, messages


def test_keys_are_new_in_every_round_and_forgotten_with_the_message():
    server, clients = world(plan_of(privacy=SecureAggregation()))
    seen = set()
    for _ in range(2):
        for number, message in server.request_keys().items():
            answer = clients[number].answer(message)
            assert server.receive(answer) and not server.receive(answer)
            seen |= {
                to_bytes(answer["key"]),
                clients[number]._masks._keys.mask_key,
                clients[number]._masks._keys.self_seed,
            }
        sent = server.open_round()
        for number, message in sent.items():
            answer = clients[number].answer(message)
            assert server.receive(answer) and clients[number]._masks._keys is None
            assert clients[number].answer(message)["reason"] == "repeated-round"
            words = torch.cat([x.flatten() for x in select_prefix(answer, "sum").values()])
            assert words.dtype == torch.int64 and float(words.double().abs().mean()) > 2.0**60
        for number, message in server.fix_survivors().items():
            assert server.receive(clients[number].answer(message))
        assert not server.close_round().dropped
    assert len(seen) == 2 * 3 * CLIENTS


def test_a_round_without_recovery_gives_the_same_step_in_one_exchange():
    moved = []
    for recovers in (True, False):
        server, clients = world(plan_of(privacy=SecureAggregation(), rounds=2))
        for _ in range(2):
            sent = open_round(server, clients) if recovers else server.open_round()
            for number, message in sent.items():
                answer = clients[number].answer(message)
                assert server.receive(answer)
                assert mean_size(select_prefix(answer, "sum")) > 2.0**60
                assert clients[number].answer(message)["reason"] == "repeated-round"
            requests = server.fix_survivors()
            assert bool(requests) == recovers
            for number, message in requests.items():
                assert server.receive(clients[number].answer(message))
            assert not server.close_round().dropped
        moved.append(vector(server.parameters))
    assert torch.equal(*moved) and not torch.equal(moved[0], vector(head().state_dict()))


def test_without_recovery_a_lost_client_costs_the_round_and_no_share_is_revealed():
    server, clients = world(plan_of(privacy=SecureAggregation(), min_survivors=3))
    assert not run_round(server, clients).dropped  # its shares are for another round
    before, sent = vector(server.parameters), server.open_round()
    answers = {i: clients[i].answer(message) for i, message in sent.items()}
    assert all(server.receive(answers[i]) for i in (0, 1, 2)) and server.fix_survivors() == {}
    for number in (0, 1):
        request = {
            "kind": "unmask",
            "round": number,
            "contract": server.contract,
            "survivors": torch.tensor([0, 1, 2]),
        }
        assert clients[0].answer(request)["reason"] == "client-failed"
    assert not server.receive(answers[3]) and server.rejected["late"] == 1
    record = server.close_round()
    assert (
        record.dropped and (record.cohort, record.survivors) == (4, 3) and server.ledger.count == 2
    )
    assert torch.equal(before, vector(server.parameters)) and not run_round(server, clients).dropped


def test_without_recovery_a_changed_cohort_or_channel_key_is_refused_before_the_client_is_charged():
    server, clients = world(plan_of(privacy=SecureAggregation(), min_survivors=3))
    message = server.open_round()[0]
    changed = message["channels"].clone()
    changed[0, 20] ^= 1
    wrong = [
        {"channels": changed},
        {"channels": message["channels"] * 0},
        {"cohort": torch.tensor([1, 2, 3])},
    ]
    wrong += [{"cohort": torch.tensor([0, 1]), "channels": message["channels"][:2]}]
    for fields in wrong:
        assert (
            clients[0].answer({**message, **fields})["reason"] == "client-failed"
            and clients[0].ledger.count == 0
        )
    assert clients[0].answer(message)["kind"] == "sum"


def test_too_few_shares_end_the_round_without_a_release():
    plan = plan_of(privacy=SecureAggregation(), min_survivors=3, rounds=1)
    server, clients = world(plan)
    before = vector(server.parameters)
    record = run_round_without(server, clients, (1, 2), "shares")
    assert record.dropped and record.rejected == {"wrong-shares": 1} and server.ledger.count == 1
    assert torch.equal(before, vector(server.parameters))


def test_a_tampered_share_is_refused_before_the_client_is_charged():
    server, clients = world(plan_of(privacy=SecureAggregation(), min_survivors=3))
    sent = open_round(server, clients)
    for name, row in (("sealed", 2), ("channels", 2), ("mask_keys", 2), ("mask_keys", 0)):
        changed = sent[0][name].clone()
        changed[row, 20] ^= 1
        answer = clients[0].answer({**sent[0], name: changed})
        assert (answer["kind"], answer["reason"]) == ("error", "client-failed") and clients[
            0
        ].ledger.count == 0
        assert len(str(clients[0].last_error)) <= 160
    other = clients[0].answer({**sent[1], "sealed": sent[1]["sealed"]})  # sealed for client 1
    assert other["reason"] == "client-failed" and "cannot be opened" in str(clients[0].last_error)
    assert clients[0].answer(sent[0])["kind"] == "sum"
    clients[1]._masks._keys = None
    assert clients[1].answer(sent[1])["reason"] == "client-failed"
    assert clients[1].ledger.count == 0


@pytest.mark.parametrize("cohort", [[0], [0, 0, 0, 0], [1, 2, 3], [0, 1, 2, 9], [1, 0, 2, 3]])
def test_a_client_does_not_answer_for_a_cohort_that_is_too_small_or_wrong(cohort):
    server, clients = world(plan_of(privacy=SecureAggregation(), min_survivors=3))
    for message in (server.request_keys()[0], open_round(server, clients)[0]):
        answer = clients[0].answer({**message, "cohort": torch.tensor(cohort)})
        assert answer["reason"] == "client-failed" and clients[0].ledger.count == 0


@pytest.mark.parametrize("missing", [True, False])
def test_a_wrong_share_is_counted_and_changes_no_weight(missing):
    server, clients, messages = masked_round()
    if not missing:
        assert server.receive(messages[3])
    before = vector(server.parameters)
    answers = {i: clients[i].answer(message) for i, message in server.fix_survivors().items()}
    answers[1]["shares"][3 if missing else 0, 30] ^= 1
    assert all(server.receive(answer) for answer in answers.values())
    record = server.close_round()
    # A wrong self mask may be as large as an honest one, and is then found by the size of the sum.
    reasons = {"wrong-shares"} if missing else {"wrong-shares", "oversized"}
    assert record.dropped and record.rejected and set(record.rejected) <= reasons
    assert torch.equal(before, vector(server.parameters)) and server.ledger.count == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: {**m, "key": m["key"][:31]}, "wrong-shape"),
        (lambda m: {k: v for k, v in m.items() if k != "sealed"}, "other-fields"),
        (lambda m: {**m, "round": m["round"] + 1}, "stale"),
    ],
)
def test_keys_off_the_list_are_rejected_and_counted(change, reason):
    server, clients = world(plan_of(privacy=SecureAggregation()))
    request = server.request_keys()
    answer = clients[0].answer(request[0])
    assert not server.receive(change(answer)) and server.rejected == {reason: 1}
    assert server.receive(answer)


def test_noise_too_small_for_the_grid_is_refused():
    with pytest.raises(ValueError, match="too small for the grid of secure aggregation"):
        world(plan_of(noise=1e-5, privacy=SecureAggregation()))


@pytest.mark.parametrize("clients", [3, 5])
def test_keys_of_more_or_fewer_clients_than_named_are_refused(clients):
    with pytest.raises(ValueError, match="zip"):
        split_rows(torch.zeros(4, 32, dtype=torch.uint8), range(clients))


def test_keys_have_no_place_where_messages_are_in_clear():
    server, clients = world(plan_of(privacy=TrustedServer()))
    assert server.request_keys() == {} and "key" not in clients[0].hello()
    request = {"kind": "keys", "round": 0, "contract": server.contract, "cohort": torch.arange(4)}
    assert clients[0].answer(request)["reason"] == "client-failed"
    server.open_round()
    assert not server.receive(
        {"kind": "keys", "round": 0, "contract": server.contract, "client": 0}
    )
    assert server.rejected == {"unknown-kind": 1}


def test_a_drawn_cohort_that_is_too_small_is_charged_and_dropped():
    plan = plan_of(
        privacy=SecureAggregation(), client_rate=0.3, min_survivors=3, rounds=6, test_mode_seed=2
    )
    run = federate(plan, head(), loss_fn, datasets())
    assert len(run.records) == 6 and any(r.dropped for r in run.records)
    assert all(r.dropped == (r.survivors < 3) for r in run.records) and not run.server.rejected


def test_epsilon_is_that_of_the_collusion_that_the_plan_names():
    """Noise of t - k clients is left where k tell theirs; a server that opens messages meets the
    noise of one.
    """
    plan = plan_of(
        privacy=SecureAggregation(), clients=8, min_survivors=6, colluding=2, test_mode_seed=None
    )
    spent = [plan.epsilon_at(plan.hiding_stddev(6, k)) for k in range(6)]
    assert spent == sorted(spent) and spent[2] == pytest.approx(plan.epsilon(), rel=1e-6)
    assert plan.views()["a server that sees every message"] == pytest.approx(spent[5], rel=1e-6)
    server, _ = world(plan)
    card = build_federated_card(server, [], title="x", chosen_by="nobody")
    text = card["mechanism"]["secure_aggregation"]
    assert (
        "threshold 6" in text
        and "up to 5 colluding clients" in text
        and "computed for 2 colluding" in text
    )
    assert (
        text in to_markdown(card) and "any 2 other clients together" in card["guarantee"]["against"]
    )


def test_a_client_answers_for_one_survivor_set():
    server, clients, messages = masked_round(min_survivors=2)
    request = server.fix_survivors()[0]
    assert clients[0].answer(request)["kind"] == "shares"
    # client 2 missing: the other kind of its shares
    other = {
        **request,
        "survivors": torch.tensor([0, 1]),
    }
    assert clients[0].answer(other)["reason"] == "repeated-round"
    for survivors in ([1], [1, 1, 1], [0, 2], [0, 1, 7]):
        assert (
            clients[1].answer({**request, "survivors": torch.tensor(survivors)})["reason"]
            == "client-failed"
        )
    assert clients[1].answer({**request, "round": 1})["reason"] == "client-failed"
    assert clients[1].answer(request)["kind"] == "shares"
    assert clients[3].answer(request)["reason"] == "client-failed"  # it is no survivor
    assert not server.receive(messages[3]) and server.rejected["late"] == 1
