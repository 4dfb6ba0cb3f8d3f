"""Compile a model: torch runs it uncompiled wherever dpkfc follows a pass, and the weights are
the same.

The backend of these tests runs the captured graph as it is and counts, so that no compiler is
needed.
"""

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients import eager_mode
from dpkfc.gradients.eager_mode import run_eagerly
from dpkfc.session import Session
from tests.integrations import opacus_cases
from tests.test_session import data, loss_fn, plan, weights

pytestmark = pytest.mark.filterwarnings("ignore")


class Counting:
    """A backend: the captured graph itself. Counts graphs by the leading axis of the first tensor
    they were made for.
    """

    def __init__(self):
        self.graphs = Counter()

    def __call__(self, graph, inputs):
        self.graphs[
            next((int(x.shape[0]) for x in inputs if isinstance(x, Tensor) and x.dim()), 0)
        ] += 1
        return graph.forward


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


class Gate(nn.Module):
    """Nothing trainable, and more than one operation."""

    def forward(self, x):
        return torch.tanh(x) * torch.sigmoid(x) + x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.norm = nn.Linear(8, 8), Gate(), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.norm(self.gate(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.drop, self.head = (
            nn.Linear(6, 8),
            Block(),
            nn.Dropout(0.2),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.head(self.drop(self.block(self.first(x))))


def net():
    torch.manual_seed(0)
    return Net().double()


def run(change=None, loss=loss_fn, verify=True, **settings):
    """Weights after the noisy steps of a plan in test mode, of a model that was changed before the
    session.
    """
    model = net()
    if change is not None:
        change(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    torch.manual_seed(1)
    p = plan(1.0, **{"expected_batch_size": 12, "steps": 3, **settings})
    with Session(p, model, optimizer, data(), verify=verify) as session:
        for batch in session.batches():
            session.step(batch, loss)
    assert all(q.grad is None and not q._backward_hooks for q in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    return weights(model)


class Owning(nn.Module):
    """Holds a parameter itself, so that the whole module is run again for single examples."""

    def __init__(self):
        super().__init__()
        self.gain, self.gate = nn.Parameter(torch.ones(8)), Gate()

    def forward(self, x):
        return self.gate(x) * self.gain


# -- models and parts ------------------------------------------------------------------------------


def forward(model, backend):
    model.block.forward = torch.compile(model.block.forward, backend=backend)


def child(model, backend):
    model.block = torch.compile(model.block, backend=backend)


PARTS = {
    "the model in place": lambda m, b: m.compile(backend=b),
    "a block": child,
    "a layer in place": lambda m, b: m.head.compile(backend=b),
    "a part without layers": lambda m, b: m.block.gate.compile(backend=b),
    "a method": forward,
}


@pytest.mark.quick("*new")
@pytest.mark.parametrize("seen", [False, True], ids=["new", "with graphs from before"])
@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
def test_a_compiled_part_trains_as_it_does_uncompiled(backend, change, seen):
    """A graph from before the session holds no hook, so it must not run either."""

    def compiled(model):
        change(model, backend)
        if seen:
            for n in (1, 2, 6, 12):
                model(data()[0][:n]).sum().backward()
            model.zero_grad()

    assert torch.equal(run(compiled, steps=2), run(steps=2))


def test_a_compiled_model(backend):
    found = []
    for compiled in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        with Session(
            plan(1.0, steps=2),
            torch.compile(model, backend=backend) if compiled else model,
            optimizer,
            data(),
        ) as s:
            for batch in s.batches():
                s.step(batch, loss_fn)
        found.append(weights(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("part", ["a part", "the model"])
def test_in_an_opacus_script(backend, part):
    found = []
    for compiled in (False, True):
        model = opacus_cases.mlp()
        model[1] = Gate()
        if compiled:
            (model[1] if part == "a part" else model).compile(backend=backend)
        engine, model, optimizer, loader = opacus_cases.private(model, noise_multiplier=1.0)
        opacus_cases.train(model, optimizer, loader)
        found.append(weights(model))
        engine.close()
    assert torch.equal(*found)


# -- functions that call layers, or follow them ----------------------------------------------------


def call_in_loss(backend, part):
    """A loss in which one module is called by a compiled function."""
    call = torch.compile(lambda module, x: module(x), backend=backend, dynamic=False)

    def loss(model, batch):
        x = model.first(batch[0])
        x = call(model.block, x) if part == "block" else model.block(x)
        x = model.drop(x)
        return F.cross_entropy(
            call(model.head, x) if part == "head" else model.head(x), batch[1], reduction="none"
        )

    return loss


@pytest.mark.quick("head-True", "block-False")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("part", ["head", "block"])
def test_a_graph_from_before_the_session_does_not_run(backend, part, verify):
    loss = call_in_loss(backend, part)

    def add_owner(model):
        if part == "block":
            model.block = Owning().double()

    def use_model(model):
        add_owner(model)
        with torch._dynamo.config.patch(recompile_limit=64), torch.compiler.set_stance("default"):
            for training in (False, True):
                model.train(training)
                for n in (1, 2, 6, 8, 16):
                    loss(model, tuple(x[:n] for x in data())).sum().backward()
        model.zero_grad()
        assert backend.graphs

    found, expected = (
        run(change, loss, verify=verify, steps=2) for change in (use_model, add_owner)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_passes_that_end_out_of_order_leave_compilation_on(backend):
    model = net()
    child(model, backend)
    with torch.compiler.set_stance("default"):
        first, second = run_eagerly(), run_eagerly()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        model(data()[0])
        assert not backend.graphs
        second.__exit__(None, None, None)
        model(data()[0])
        assert backend.graphs


TRAIN = """
import sys
import torch
from torch import nn
from dpkfc import PrivacyConfig, Session
from dpkfc.app.optimizers import SGD

def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

def step(model):
    plan = PrivacyConfig(expected_batch_size=4, steps=1).with_noise(2.0, 1e-5, 8)
    optimizer = SGD(model.parameters(), lr=0.1)
    data = torch.randn(8, 4), torch.randint(2, (8,))
    session = Session(plan, model, optimizer, data, verify=False)
    for batch in session.batches():
        session.step(batch, loss_fn)

step(nn.Linear(4, 2))
print("torch._dynamo" in sys.modules)

class Late(nn.Linear):
    def forward(self, x):
        return torch.compile(torch.sin, backend="eager")(super().forward(x))

try:
    step(Late(4, 2))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_training_leaves_the_compiler_out_and_refuses_one_that_comes_late():
    done = subprocess.run([sys.executable, "-c", TRAIN], text=True, capture_output=True, check=True)
    found, message = done.stdout.splitlines()
    assert found == "False"
    assert message.startswith("the forward pass called torch.compile")


def test_a_pass_that_brings_the_compiler_is_refused_where_it_has_compiled(monkeypatch):
    monkeypatch.setattr(eager_mode, "_COMPILER", "late")
    for frames in (0, 1):
        with pytest.raises(RuntimeError, match="called") if frames else nullcontext():
            with run_eagerly():
                late = SimpleNamespace(counters={"frames": {"total": frames}})
                monkeypatch.setitem(sys.modules, "late", SimpleNamespace())
                monkeypatch.setitem(sys.modules, "late.utils", late)
        monkeypatch.delitem(sys.modules, "late")
