"""A forward pass leaves nothing in the model that it has computed from private examples."""

from collections import Counter, deque
from contextlib import nullcontext
from functools import partial
from optparse import Values

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.gradients.replica import replicate
from dpkfc.gradients.state import copy_extra_states, restore_extra_states
from dpkfc.gradients.state_check import checked_state
from tests.integrations import opacus_cases
from tests.recording import Heard
from tests.sessions import assert_refused, cross_entropy, open_session

N = 24


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64) + 100
    return x, torch.randint(0, 3, (N,), generator=generator)


def session(first, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(first, nn.Linear(4, 3)).double()
    return open_session(model, data(), lr=0.01, expected_batch_size=12, steps=steps, **options)


def train(s):
    for batch in s.batches():
        s.step(batch, cross_entropy)


def private_loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=12)


class Changeable(nn.Module):
    """Leaves training mode for good where it meets a rare value."""

    def forward(self, x):
        if bool((x > 1000).any()):
            self.eval()
        return x if self.training else -x


def test_a_pass_does_not_change_the_mode_of_later_passes():
    module = Changeable()
    with replicate(module):
        module(torch.full((2, 4), 2000.0))
    assert module.training


# -- parameters ------------------------------------------------------------------------------------


class ActNorm(nn.Module):
    """Sets its offset from the first batch."""

    def __init__(self, how):
        super().__init__()
        self.loc, self.ready, self.how = nn.Parameter(torch.zeros(4)), False, how
        self.loc.requires_grad_(how != "frozen")

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                if self.how == "past the counter":
                    self.loc.data.copy_(-x.mean(0))
                elif self.how in ("in place", "frozen"):
                    self.loc.copy_(-x.mean(0))
                elif self.how == "storage":
                    self.loc.data = -x.mean(0)
                else:
                    self.loc = nn.Parameter(-x.mean(0))
            self.ready = True
        return x + self.loc


@pytest.mark.parametrize(
    ("how", "verify"),
    [
        ("past the counter", True),
        ("in place", True),
        ("frozen", True),
        ("storage", True),
        ("a new one", True),
        ("a new one", False),
    ],
)
def test_weights_set_from_private_data_are_refused_and_put_back_each_time(how, verify):
    s = session(ActNorm(how), verify=verify)
    own = s.model[0].loc
    assert_refused(s, "writes to the parameter '0.loc'", times=3)
    assert s.model[0].loc is own and not s.model[0].ready
    assert torch.equal(own, torch.zeros(4, dtype=own.dtype))


class NonNegative(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(x)


def test_a_constraint_inside_of_forward_is_named_with_the_way_out():
    model = nn.Sequential(NonNegative(4, 3)).double()
    before = model[0].weight.detach().clone()
    engine, model, optimizer, batches = opacus_cases.private(model, data_loader=private_loader())
    with pytest.raises(ValueError, match="'0.weight'; use a parametrization, or write after"):
        opacus_cases.train(model, optimizer, batches)
    assert torch.equal(model[0].weight, before) and engine.ledger.count == 0


class Loaded(nn.Module):
    """A frozen weight that is brought in for the length of a pass, as offloading does."""

    def __init__(self, factor):
        super().__init__()
        self.gain, self.factor = nn.Parameter(torch.ones(4), requires_grad=False), factor

    def forward(self, x):
        self.gain = nn.Parameter(
            self.gain.detach() * (1 if self.factor == 1 else x.mean(0).detach()),
            requires_grad=False,
        )
        return x * self.gain


def test_frozen_weights_may_be_other_objects_with_the_same_values():
    with session(Loaded(1.0)) as s:
        train(s)
        assert torch.equal(s.model[0].gain, torch.ones(4, dtype=torch.float64))
    s = session(Loaded(2.0))
    assert_refused(s, "'0.gain'|mixes examples|autograd")
    assert torch.equal(s.model[0].gain, torch.ones(4, dtype=torch.float64))


class Late(nn.Module):
    """Writes its parameter when it is told to."""

    def __init__(self, trains):
        super().__init__()
        self.loc, self.now = nn.Parameter(torch.zeros(4), requires_grad=trains), []

    def forward(self, x):
        if self.now:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
        return x + self.loc


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_written_in_a_later_step_is_erased_and_named(trains):
    """No copy of it is kept in every step, so what it was cannot be had back; what it is must not
    stay.
    """
    with session(Late(trains)) as s:
        for _ in range(2):  # each looked at
            s.step(next(s.batches()), cross_entropy)
        s.model[0].now.append(True)
        batch = next(s.batches())
        with pytest.raises(ValueError, match="'0.loc'.*has been erased.*checkpoint"):
            s.step(batch, cross_entropy)
        assert s.model[0].loc.isnan().all() and s.ledger.count == 2


# -- buffers and extra state -----------------------------------------------------------------------


class CountsOdd(nn.Module):
    """Counts batches with a value beyond 130. The data have one only where it is planted."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.number = 0

    def forward(self, x):
        if bool((x > 130).any()):
            self.count += 1
            self.number += 1
        return x


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_rare_private_value_ends_no_run_and_logs_nothing(is_planted, caplog):
    with session(CountsOdd()) as s:
        if is_planted:
            s._dataset[0][3] = 131.0
        train(s)
        assert s.ledger.count == 3
        assert float(s.model[0].count) == s.model[0].number == 0
    assert not [x for x in caplog.records if "put back" in x.getMessage()]


class Writer(nn.Module):
    """Keeps a statistic of what passes through it, from its n-th call in training mode on."""

    def __init__(self, write, after):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4), persistent=write is not WRITES["in place"])
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.write, self.after, self.calls = write, after, Heard()

    def forward(self, x):
        self.calls.extend([1] if self.training and len(x) else [])
        if self.training and len(self.calls) > self.after:
            self.write(self, x.detach())
        return x


WRITES = {
    "in place": lambda m, x: m.seen.add_(x.mean(0)),
    "through data": lambda m, x: m.seen.data.add_(x.mean(0)),
    "replaced": lambda m, x: setattr(m, "seen", x.mean(0)),
    "counted": lambda m, x: m.count.add_(len(x)),
    "resized": lambda m, x: setattr(m, "seen", torch.cat([m.seen, x.mean(0)])),
    "another one": lambda m, x: m.register_buffer("more", x.mean(0)),
}


@pytest.mark.quick("True-0-*", "False-3-in place", "False-3-counted")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("verify", "after"), [(True, 0), (False, 0), (False, 3), (True, 8)])
def test_a_forward_pass_leaves_no_private_statistic_in_a_buffer(write, verify, after):
    """Whether it begins at once, behind the back of verification, or in the middle of a run.

    The check on public rows refuses it. Later a private value may have caused it, so that the run
    goes on.
    """
    s = session(Writer(WRITES[write], after), 8, max_physical_batch_size=3, verify=verify)
    initial = {name: b.clone() for name, b in s.model.named_buffers()}
    if verify:
        assert_refused(s, "changes the buffer '0.")
    else:
        with s:
            train(s)
        assert s.ledger.count == 8
    found = dict(s.model.named_buffers())
    assert set(found) == set(initial)
    assert all(torch.equal(found[name], b) for name, b in initial.items())


class Largest(nn.Module):
    """Keeps the largest values seen for its extra state, as layers with 8-bit numbers do."""

    def __init__(self, on=True):
        super().__init__()
        self.amax, self.on = torch.zeros(4, dtype=torch.float64), on

    def forward(self, x):
        if self.on:
            self.amax = torch.maximum(self.amax, x.detach().abs().amax(0))
        return x

    def get_extra_state(self):
        return self.amax

    def set_extra_state(self, state):
        self.amax = state


@pytest.mark.parametrize("verify", [True, False])
def test_extra_state_that_follows_the_data_is_refused(verify):
    s = session(Largest(), verify=verify)
    assert_refused(s, r"extra state of the module '0' \(Largest.get_extra_state\)", times=2)
    assert not s.model[0].amax.any()


def test_extra_state_is_restored_where_attributes_do_not_show_it():
    model = nn.Sequential(Largest())
    before = copy_extra_states(model)
    model(torch.ones(2, 4, dtype=torch.float64))
    assert "Largest.get_extra_state" in restore_extra_states(model, before)
    assert not model[0].amax.any()


# -- plain attributes ------------------------------------------------------------------------------


def remember_first(m, x):
    if m.state is None:
        m.state = x.mean(0)
    return x - m.state


def remember_average(m, x):
    m.state = x.mean(0) if m.state is None else 0.9 * m.state + 0.1 * x.detach().mean(0)
    return x - m.state if not m.training else x


def remember_in_place(m, x):
    m.state = torch.zeros(4, dtype=x.dtype) if m.state is None else m.state
    y = x + m.state
    m.state.data.add_(x.detach().mean(0))
    return y


def previous(m, x):
    m.state = m.state or deque(maxlen=1)
    y = x + (m.state[0] if m.state else 0)
    m.state.append(x.detach().mean(0))
    return y


def remember_array(m, x):
    y = x if m.state is None else x + torch.from_numpy(m.state["mean"])
    m.state = {"mean": x.detach().numpy().mean(0)}
    return y


class Keeps(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.state, self.work = None, work

    def forward(self, x):
        return self.work(self, x)


MEMORIES = [remember_first, remember_average, remember_in_place, previous, remember_array]


@pytest.mark.parametrize("work", MEMORIES, ids=lambda f: f.__name__)
def test_a_memory_of_examples_is_refused_by_module_and_attribute(work):
    s = session(Keeps(work))
    message = r"keeps 'state' of the module '0' \(Keeps\)|mixes examples|in a batch of"
    assert_refused(s, message, times=2)
    assert s.model[0].state is None


def test_an_opacus_script_refuses_it_too():
    model = nn.Sequential(Keeps(remember_average), nn.Linear(4, 3)).double()
    engine, model, optimizer, batches = opacus_cases.private(model, data_loader=private_loader())
    with pytest.raises(ValueError, match="keeps 'state' of the module '0'|example alone"):
        opacus_cases.train(model, optimizer, batches)
    assert engine.ledger.count == 0 and model[0].state is None


class Rotary(nn.Module):
    """A cache of positions that grows with the batch, with a number that says how far it
    reaches.
    """

    def __init__(self):
        super().__init__()
        self.reach, self.cos, self.built = 0, None, 0
        self.table = {}

    def forward(self, x):
        if x.shape[1] > self.reach:
            self.reach, self.cos = x.shape[1], torch.arange(x.shape[1], dtype=x.dtype).cos()
            self.table[x.shape[1]] = torch.ones(x.shape[1], dtype=x.dtype)
            self.built += 1
        return x * self.cos[: x.shape[1]] * self.table[x.shape[1]]


def test_caches_that_depend_on_no_example_are_built_once(caplog):
    with session(Rotary()) as s:
        train(s)
        kept = s.model[0]
        assert kept.reach == 4 and torch.equal(kept.cos, torch.arange(4, dtype=torch.float64).cos())
        assert list(kept.table) == [4] and kept.built == 1
    assert "put back" not in caplog.text


class Hooked(nn.Module):
    """Registers a hook in its first pass and says so, as transformers do for hidden states."""

    def __init__(self, early):
        super().__init__()
        self.inner, self.is_hooked = nn.Linear(4, 4), False
        if early:
            self.add_hook()

    def add_hook(self):
        self.inner.register_forward_hook(lambda _, __, output: -output)
        self.is_hooked = True

    def forward(self, x):
        if not self.is_hooked:
            self.add_hook()
        return self.inner(x)


def test_a_hook_of_the_first_pass_is_there_in_every_pass():
    trained = []
    for early in (False, True):
        torch.manual_seed(0)
        with session(Hooked(early)) as s:
            train(s)
            module = s.model[0]
            assert module.is_hooked == bool(module.inner._forward_hooks) == early
            trained.append(module.inner.weight)
    assert torch.equal(*trained)


class Shown(nn.Module):
    """Leaves its attention and an additional loss for whoever wants to look."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.attention, self.penalty, self.history = None, 0.0, []

    def forward(self, x):
        self.attention = self.inner(x).softmax(1)
        self.penalty = self.attention.square().sum(1)
        self.history.append(self.attention.detach())
        return x * self.attention


def add_penalty(model, batch):
    return cross_entropy(model, batch) + 0.1 * model[0].penalty


@pytest.mark.parametrize("verify", [True, False])
def test_what_a_pass_leaves_to_look_at_is_gone_after_it(verify, caplog):
    """The loss reads it, and the gradients are right; nothing of the examples stays on the
    model.
    """
    with session(Shown(), verify=verify) as s:
        before = s.model[0].inner.weight.detach().clone()
        for batch in s.batches():
            s.step(batch, add_penalty)
            shown = s.model[0]
            assert shown.attention is None and shown.penalty == 0.0 and shown.history == []
        assert not torch.equal(before, s.model[0].inner.weight)
    said = caplog.text.count("put back after every pass: attention, history, penalty")
    assert said == verify


def test_an_opacus_loss_reads_it_until_the_step():
    model = nn.Sequential(Shown(), nn.Linear(4, 3)).double()
    engine, model, optimizer, batches = opacus_cases.private(model, data_loader=private_loader())
    for x, y in batches:
        out = model(x)
        (F.cross_entropy(out, y) + model[0].penalty.mean()).backward()
        optimizer.step()
        assert model[0].attention is None and model[0].penalty == 0.0 and model[0].history == []
    assert engine.ledger.count == 2


def opacus_script(first):
    """Yield the model, inputs and outputs of each batch, between its pass and its step."""
    model = nn.Sequential(first, nn.Linear(4, 3)).double()
    _, model, optimizer, batches = opacus_cases.private(model, data_loader=private_loader())
    for x, y in batches:
        out = model(x)
        yield model, x, out
        F.cross_entropy(out, y).backward()
        optimizer.step()


@pytest.mark.parametrize("most", [3, 14, 100], ids=["never proved", "not for all", "proved"])
def test_an_opacus_script_begins_every_pass_with_the_variables_that_it_had(most):
    """Whether its batch is proved or each example is repeated alone."""
    memory = []

    class Remembers(nn.Module):
        def forward(self, x):
            memory.append(len(x))
            if len(x) > most:
                x = x + 0 * torch.tensor(x.detach().numpy())  # hides the examples
            return x * len(memory)

    sizes = []
    for model, x, out in opacus_script(Remembers()):
        assert torch.allclose(out, model[1](x))
        sizes.append(len(x))
    assert sizes == [13, 15] and memory == []


def test_an_opacus_loss_reads_variables_until_the_step():
    """Two calls of the model, and a script that keeps values of its own beside them."""

    class Trainer:
        def __init__(self):
            self.steps, self.shown, self.last, self.store = 0, [], None, {}

        def keep(self, module, args, output):
            self.shown.append(output)
            self.last = output

    def store_output(store, module, args, output):
        store["last"] = output

    trainer, store = Trainer(), {}
    first = nn.Identity()
    first.register_forward_hook(trainer.keep)
    first.register_forward_hook(partial(store_output, store))
    for model, x, _ in opacus_script(first):
        model(x + 1)
        assert len(trainer.shown) == 2 and trainer.last is trainer.shown[1] is store["last"]
        trainer.steps += 1
    assert trainer.steps == 2 and trainer.shown == [] and trainer.last is None and store == {}


class Counts(nn.Module):
    """How many examples there were is private: a module that computes otherwise after so many tells
    of them.
    """

    def __init__(self, factor):
        super().__init__()
        self.seen, self.labels, self.late = 0, set(), False
        self.tau, self.factor = factor and 1.0, factor

    def forward(self, x):
        self.seen += len(x)
        self.tau = self.factor and self.tau * self.factor
        self.labels.add(int(len(x)))
        self.late = self.late or self.seen > 30
        return x * (-1 if self.late else 1)


@pytest.mark.parametrize("factor", [None, 0.9])
@pytest.mark.parametrize("verify", [True, False])
def test_counters_and_schedules_of_a_modules_own_are_put_back(verify, factor, caplog):
    with session(Counts(factor), verify=verify) as s:
        train(s)
        kept = s.model[0]
        assert (kept.seen, kept.tau, kept.labels, kept.late) == (0, factor and 1.0, set(), False)
    said = (
        "how many there are; they are put back after every pass: labels, late, seen" in caplog.text
    )
    assert said == verify


class Amax(nn.Module):
    """No ordinary record moves it."""

    def __init__(self):
        super().__init__()
        self.amax, self.table = torch.tensor(1.0), None

    def forward(self, x):
        self.table = torch.ones(4) if self.table is None else self.table
        self.amax = torch.maximum(self.amax, x.detach().abs().max())
        return x * self.table / self.amax


def test_a_running_maximum_that_no_example_has_moved_is_refused():
    x, y = data()
    model = nn.Sequential(Amax(), nn.Linear(4, 3)).double()
    assert_refused(open_session(model, ((x - 100) / 10, y)), "mixes examples")
    assert float(model[0].amax) == 1.0


class Bank:
    """Features of past examples, in an object that is no module."""

    def __init__(self, size):
        self.rows, self.size, self.other = [], size, {"bank": self}

    def push(self, h):
        self.rows = (self.rows + list(h))[-self.size :]


class Compares(nn.Module):
    def __init__(self, bank):
        super().__init__()
        self.bank = bank

    def forward(self, x):
        y = x + torch.stack(self.bank.rows).mean(0) if len(self.bank.rows) == self.bank.size else x
        self.bank.push(x.detach())
        return y


def test_a_memory_in_an_object_of_ones_own_is_put_back_or_refused(caplog):
    with session(Compares(Bank(10**6))) as s:  # later than the check
        own = s.model[0].bank
        train(s)
        assert s.model[0].bank is own and own.rows == [] and own.other == {"bank": own}
    assert "put back after every pass: bank" in caplog.text
    s = session(Compares(Bank(2)))
    assert_refused(s, "keeps 'bank' of the module '0'|an earlier batch left")
    assert s.model[0].bank.rows == []


class Remembering(nn.Module):
    """Keeps what it computes in an object of an installed package, as a cache of keys does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = Values({"layers": [Values()]})

    def forward(self, x):
        self.cache.layers[0].keys = self.linear(x)
        return self.cache.layers[0].keys


def test_an_object_of_a_package_that_keeps_results_is_refused():
    assert_refused(session(Remembering()), r"'cache' of the module '0' \(.*\) keeps results of a")


def test_lists_of_parameters_are_no_attributes_of_a_pass(caplog):
    """A recurrent layer lists its weights, which a filter that looks ahead moves for the length of
    a pass.
    """
    model = nn.LSTM(3, 2)
    with replicate(model), torch.no_grad():
        model.weight_ih_l0.add_(1)
    assert not caplog.text and model._flat_weights[0] is model.weight_ih_l0


def test_every_kind_of_value_is_thrown_away():
    model = nn.Module()
    model.tensor, model.array, model.number = torch.arange(3.0), np.arange(3.0), 1.5
    model.rows = [torch.zeros(2), {"a": np.zeros(2), "b": (torch.ones(2), 3)}]
    model.queue, model.view = deque([torch.zeros(1)], maxlen=2), torch.zeros(4)[::2]
    model.sparse, model.text, model.grown = torch.eye(2).to_sparse(), "as it was", torch.zeros(3)
    model.seen, model.long = {1.0, 2.0}, [float(i) for i in range(2000)]
    model.inside, model.counts = [{3, 4}, {"long": list(range(1500))}], Counter(a=1)
    objects, before = dict(vars(model)), repr(vars(model))
    with replicate(model) as replica:
        assert not replica.changed_attributes() and repr(vars(model)) == before
        model.tensor.data.add_(1)
        model.array += 1
        model.number, model.text = 2.5, "other"
        model.rows[0].add_(1)
        model.rows[1]["a"][0] = 7
        model.rows[1]["b"][0].mul_(3)
        model.rows[1]["c"] = torch.ones(1)
        model.rows.append(1.0)
        model.queue.append(torch.ones(1))
        model.view.fill_(2)
        model.grown.resize_(5).fill_(1.0)
        model.seen.discard(1.0)
        model.long[0] = 9.0
        model.inside[0].clear()
        model.inside[1]["long"][3] = -1
        model.counts.update("aab")
        model.other = torch.ones(2)
        del model.sparse
        model.add_module("layer", nn.Linear(1, 1))
        model.forward = model.register_forward_hook(print)
        names = {*objects, "other", "forward"} - set(vars(nn.Module()))
        assert replica.changed_attributes() == {model: names}
    assert vars(model) is not None and repr(vars(model)) == before
    assert all(vars(model)[name] is x for name, x in objects.items())


class WritesItsFrozenTable(nn.Module):
    """A frozen parameter of more than a megabyte, which the forward pass writes to behind torch's
    counter.
    """

    def __init__(self, writes):
        super().__init__()
        self.table = nn.Parameter(torch.ones(600, 500), requires_grad=False)
        self.head, self.writes = nn.Linear(4, 2), writes

    def forward(self, x):
        if self.writes:
            self.table.data[0, 0] += x.sum()
        return self.head(x) * self.table[1, 1]


def test_a_large_frozen_parameter_is_watched_by_a_digest_and_erased_where_it_was_written():
    for writes in (False, True):
        model = WritesItsFrozenTable(writes)
        with (
            pytest.raises(ValueError, match=r"'table'.*erased") if writes else nullcontext(),
            checked_state(model),
        ):
            model(torch.randn(3, 4))
        assert bool(torch.isnan(model.table).all()) == writes
