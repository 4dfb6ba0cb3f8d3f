"""A loss function remembers nothing from one call to the next, wherever it would keep it."""

from __future__ import annotations

import random
import threading
from array import array
from collections import deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Queue, SimpleQueue
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.gradients.loss_state import make_stateless
from dpkfc.gradients.replica import replicate
from dpkfc.gradients.state_check import checked_state
from tests.sessions import cross_entropy, open_session

N = 24
BANK = []
MEAN = 0.0


def classifier(n=6):
    """Build a model and a batch for it."""
    torch.manual_seed(0)
    return nn.Linear(4, 3), (torch.randn(n, 4), torch.arange(n) % 3)


def shift_losses(losses, bank):
    return losses * (1 + float(torch.stack(list(bank)).mean())) if len(bank) > 3 else losses


class Memory:
    """Cross-batch memory: past rows count, once there are enough of them."""

    def __init__(self):
        self.rows, self.seen, self.inner = deque(maxlen=8), 0, {"mean": [np.zeros(2)]}

    def __call__(self, model, batch):
        losses = shift_losses(cross_entropy(model, batch), self.rows)
        self.rows.extend(batch[0].mean(1))
        self.seen += len(batch[0])
        self.inner["mean"][0] += float(batch[0].mean())
        return losses * (2 if self.seen > 100 else 1)

    def loss(self, model, batch):
        return self(model, batch)

    def state(self):
        return len(self.rows), self.seen, int(self.inner["mean"][0].any())


def remember_in_partial(memory, model, batch, *, factor=1.0):
    return memory(model, batch) * factor


def remember_in_closure(memory):
    rebound, holders = 0.0, {"own": [memory]}

    def loss(model, batch):
        nonlocal rebound
        rebound = 0.9 * rebound + float(batch[0].mean())
        return holders["own"][0](model, batch) * (1 + 0.0 * (rebound > 1e9))

    def outer(model, batch):
        return loss(model, batch)

    outer.rebound = lambda: rebound
    return outer


WAYS = {
    "the object itself": lambda memory: memory,
    "its method": lambda memory: memory.loss,
    "a partial": lambda memory: partial(remember_in_partial, memory, factor=1.0),
    "a closure": remember_in_closure,
    "a default": lambda memory: lambda model, batch, held=memory: held(model, batch),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_memory_is_put_back_after_each_call(way, caplog):
    memory = Memory()
    loss_fn = WAYS[way](memory)
    model, data = classifier(N)
    settings = {"expected_batch_size": 12, "max_physical_batch_size": 4, "steps": 3}
    with open_session(model, data, **settings) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
            assert memory.state() == (0, 0, 0) and not getattr(loss_fn, "rebound", lambda: 0.0)()
    assert caplog.text.count("loss_fn changes variables that may depend on private examples") == 1


def remember_globally(model, batch):
    global MEAN
    MEAN = 0.9 * MEAN + float(batch[0].mean())
    losses = shift_losses(cross_entropy(model, batch), BANK)
    BANK.extend(batch[0].mean(1))
    return [one for one in (losses + 0 * MEAN for _ in range(1))][0]


def test_global_variables_too():
    model, batch = classifier()
    first, second = (make_stateless(remember_globally)(model, batch) for _ in range(2))
    assert torch.equal(first, second) and not BANK and MEAN == 0.0


def remember(model, batch):
    global FIRST
    earlier = globals().get("FIRST", 0.0)
    FIRST = batch[0].sum()
    return cross_entropy(model, batch) + earlier


def test_variables_that_did_not_exist_are_removed(caplog):
    model, batch = classifier()
    if model.bias is None:
        latest = None

    def remember_in_closure(model, batch):
        nonlocal latest
        try:
            earlier = latest
        except NameError:
            earlier = 0.0
        latest = batch[0].sum()
        return cross_entropy(model, batch) + earlier

    for loss_fn in (remember, remember_in_closure):
        with checked_state(model):
            first, second = (make_stateless(loss_fn)(model, batch) for _ in range(2))
        assert torch.equal(first, second)
    assert "FIRST" not in globals() and "FIRST" in caplog.text and "latest" in caplog.text


class Centred(nn.Module):
    def __init__(self, moves):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.total, self.moves = torch.zeros(()), moves

    def forward(self, out, y):
        if self.moves:
            self.centre.mul_(0.9).add_(out.detach().mean(0))
        self.total = self.total + out.detach().sum()
        return F.cross_entropy(out - self.centre, y, reduction="none")


def test_modules_beside_the_model_keep_their_buffers_or_are_refused(caplog):
    model, batch = classifier()
    for held in (Centred(moves=False), Centred(moves=True)):
        for way in (
            partial(lambda c, m, b: c(m(b[0]), b[1]), held),
            lambda m, b, held=held: [held][0](m(b[0]), b[1]),
        ):
            if held.moves:
                with (
                    pytest.raises(ValueError, match="changes the buffer 'centre'"),
                    checked_state(model),
                ):
                    make_stateless(way)(model, batch)
            else:
                with checked_state(model):
                    assert make_stateless(way)(model, batch).shape == (6,)
            assert not held.centre.any() and held.total == 0
    assert "attributes of the module '' (Centred)" in caplog.text


def test_a_large_tensor_is_not_copied_and_may_not_be_written():
    (model, batch), queue = classifier(), torch.zeros(2**19)

    def loss(model, batch):
        queue[: len(batch[0])] = batch[0].mean(1)
        return cross_entropy(model, batch)

    with pytest.raises(
        ValueError, match="tensor that it reaches by 'queue', and that is too large"
    ):
        make_stateless(loss)(model, batch)


def test_ordinary_losses_are_left_cross_entropy(caplog):
    """The model itself, constants, a cache of the loss's own and an error inside."""
    model, batch = classifier()
    weight, table = torch.ones(3), {"a": [1, 2]}

    def loss(other, batch):
        assert other is model
        return F.cross_entropy(model(batch[0]) * table["a"][0], batch[1], weight, reduction="none")

    losses = make_stateless(loss)(model, batch)
    losses.sum().backward()
    assert torch.equal(losses, loss(model, batch)) and weight.sum() == 3 and not caplog.text
    model.shown = []

    def append_and_interrupt(model, batch):
        model.shown.append(batch[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_stateless(append_and_interrupt)(model, batch)
    assert len(model.shown) == 1  # looked after by the pass, which needs it until its end


# -- what may hold a state -------------------------------------------------------------------------


class Slots:
    __slots__ = ("__hidden", "value")

    def __init__(self):
        self.value = self.__hidden = 0

    def bump(self):
        self.__hidden += 1
        self.value += 1


@dataclass(frozen=True, slots=True)
class Frozen:
    items: list[int] = field(default_factory=list)
    inner: Slots = field(default_factory=Slots)


Pair = namedtuple("Pair", "items")


class Key:
    """What a weak reference may point to."""


KEY = Key()


def set_item(x, key, value):
    x[key] = value


def read(name):
    return lambda x: getattr(x, name)


def local():
    x = threading.local()
    x.value = 0
    return x


def bump(x):
    x.value += 1


# A holder, what changes it, and what is then read.
HOLDERS = {
    "slots": (Slots, Slots.bump, lambda x: (x.value, x._Slots__hidden)),
    "a frozen dataclass with slots": (
        Frozen,
        lambda x: (x.items.append(1), x.inner.bump()),
        lambda x: (list(x.items), x.inner.value),
    ),
    "a named tuple": (lambda: Pair([]), lambda x: x.items.append(1), lambda x: len(x.items)),
    "Queue": (Queue, lambda x: x.put(1), lambda x: (x.qsize(), x.unfinished_tasks)),
    "SimpleQueue": (SimpleQueue, lambda x: x.put(1), lambda x: x.qsize()),
    "a thread's own": (local, bump, read("value")),
    "WeakKeyDictionary": (WeakKeyDictionary, lambda x: set_item(x, KEY, 1), len),
    "array": (lambda: array("d", [0.0]), lambda x: x.append(1.0), list),
    "count": (lambda: count(3), next, repr),
    "the iterator of a list": (lambda: iter([1, 2, 3]), next, lambda x: x.__length_hint__()),
    "random.Random": (lambda: random.Random(0), lambda x: x.random(), lambda x: x.getstate()),
    "numpy's Generator": (
        lambda: np.random.default_rng(0),
        lambda x: x.random(),
        lambda x: x.bit_generator.state,
    ),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda x: torch.rand(1, generator=x),
        lambda x: x.get_state().tolist(),
    ),
}
# Draws of a generator, which no two passes may share.
DRAWS = {
    "random.Random": lambda x: x.random(),
    "numpy's Generator": lambda x: x.random(),
    "torch.Generator": lambda x: float(torch.rand(1, generator=x)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_state_is_put_back_whatever_holds_it(name):
    make, change, contents = HOLDERS[name]
    in_loss, model, x = make(), nn.Linear(2, 2), torch.zeros(1, 2)
    model.memory = make()

    def loss(model, batch):
        change(in_loss)
        change(model.memory)
        return model(batch).sum(1)

    before = [contents(in_loss), contents(model.memory)]
    with replicate(model):
        make_stateless(loss)(model, x)
        assert contents(model.memory) != before[1]
    assert [contents(in_loss), contents(model.memory)] == before


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_its_own_draws_as_torch_does(name):
    generator = HOLDERS[name][0]()

    def loss(model, batch):
        return batch * DRAWS[name](generator)

    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        for _ in range(2):
            found.append(float(make_stateless(loss)(nn.Linear(2, 2), torch.ones(1))))
    assert found[:2] == found[2:4] and len(set(found)) == 4


def test_a_generator_that_advances_is_refused():
    def numbers():
        yield from range(9)

    generator = numbers()

    def loss(model, batch):
        return model(batch).sum(1) * next(generator)

    with pytest.raises(ValueError, match="advances a generator") as error:
        make_stateless(loss)(nn.Linear(2, 2), torch.zeros(1, 2))
    assert len(str(error.value)) <= 160
