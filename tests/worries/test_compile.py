"""Worry: "I compile my model": a part without trainable layers may be, everything else is exact or refused by name.

The backend of most tests runs the captured graph as it is and counts, so that no compiler is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.curvature.preconditioner import KFAC
from dpkfc.curvature.probes import FeatureNoise
from dpkfc.session import Session
from tests.heard import Heard
from tests.integrations import opacus_cases
from tests.test_session import data, loss_fn, plan, weights

pytestmark = pytest.mark.filterwarnings("ignore")
Change = Callable[[nn.Module], Any]


class Counting:
    """A backend: the captured graph itself. Counts graphs by the leading axis of the first tensor they were made for."""

    def __init__(self) -> None:
        self.graphs: Counter[int] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs[next((int(x.shape[0]) for x in inputs if isinstance(x, Tensor) and x.dim()), 0)] += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


class Gate(nn.Module):
    """Nothing trainable, and more than one operation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sigmoid(x) + x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.norm = nn.Linear(8, 8), Gate(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.gate(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.drop, self.head = nn.Linear(6, 8), Block(), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.block(self.first(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def run(change: Change | None = None, loss: Any = loss_fn, verify: bool = True, **settings: Any) -> Tensor:
    """Weights after the noisy steps of a plan in test mode, of a model that was changed before the session."""
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


# -- parts without trainable layers: supported -------------------------------------------------------------------------


@pytest.mark.parametrize(("in_place", "settings"), [
    (True, {}),
    (False, {"preconditioner": KFAC(sides="both", probe=FeatureNoise(6), probe_size=32)}),
    (True, {"max_physical_batch_size": 4, "pad_to_multiple": 4}),
], ids=["module.compile()", "torch.compile(module), kfac", "micro-batches"])  # fmt: skip
def test_a_part_without_trainable_layers(backend: Counting, in_place: bool, settings: dict[str, Any]) -> None:
    def change(model: nn.Module) -> None:
        if in_place:
            model.block.gate.compile(backend=backend)
        else:
            model.block.gate = torch.compile(model.block.gate, backend=backend)

    assert torch.equal(run(change, **settings), run(**settings))
    assert backend.graphs


def test_a_frozen_block(backend: Counting) -> None:
    """A frozen part may hold layers: none of them is recorded."""

    def frozen(model: nn.Module) -> None:
        model.block.requires_grad_(False)

    def compiled(model: nn.Module) -> None:
        frozen(model)
        model.block.compile(backend=backend)

    assert torch.equal(run(compiled), run(frozen))
    assert backend.graphs


def test_the_function_that_makes_losses_of_outputs(backend: Counting) -> None:
    criterion = torch.compile(lambda out, y: F.cross_entropy(out, y, reduction="none"), backend=backend)
    assert torch.equal(run(loss=lambda model, batch: criterion(model(batch[0]), batch[1])), run())
    assert backend.graphs


def test_graphs_of_aot_autograd() -> None:
    """A compiled backward pass too, not only a captured forward pass."""
    torch._dynamo.reset()
    found = run(lambda model: model.block.gate.compile(backend="aot_eager"), steps=2)
    torch.testing.assert_close(found, run(steps=2), rtol=1e-10, atol=1e-12)


class Owning(nn.Module):
    """Holds a parameter itself, so that the whole module is run again for single examples."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.gate = nn.Parameter(torch.ones(8)), Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * self.gain


def test_a_part_of_a_module_that_holds_a_parameter_itself(backend: Counting) -> None:
    def owning(model: nn.Module) -> None:
        model.block = Owning().double()

    def compiled(model: nn.Module) -> None:
        owning(model)
        model.block.gate.compile(backend=backend)

    torch.testing.assert_close(run(compiled), run(owning), rtol=1e-10, atol=1e-12)


def test_a_part_in_an_opacus_script(backend: Counting) -> None:
    found = []
    for compiled in (False, True):
        model = opacus_cases.mlp()
        model[1] = Gate()
        if compiled:
            model[1].compile(backend=backend)
        engine, model, optimizer, loader = opacus_cases.private(model, noise_multiplier=1.0)
        opacus_cases.train(model, optimizer, loader)
        found.append(weights(model))
        engine.close()
    assert torch.equal(*found)
    assert backend.graphs


# -- how often -----------------------------------------------------------------------------------------------------------


def shapes(backend: Counting, dynamic: bool | None, **settings: Any) -> tuple[Counter[int], set[int]]:
    """Graphs made in a run of 25 Poisson batches, and the sizes of its micro-batches."""
    seen = Heard()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(batch[0]))
        return loss_fn(model, batch)

    def change(model: nn.Module) -> None:
        model.drop = nn.Identity()
        model.block.gate.compile(backend=backend, dynamic=dynamic)

    run(change, loss, verify=False, steps=25, **settings)
    return backend.graphs, set(seen)


@pytest.mark.parametrize("multiple", [4, 8])
def test_padding_bounds_the_graphs_by_the_number_of_multiples(backend: Counting, multiple: int) -> None:
    graphs, seen = shapes(backend, dynamic=False, pad_to_multiple=multiple)
    assert all(n % multiple == 0 for n in seen)
    assert set(graphs) == seen and set(graphs.values()) == {1}  # one for each multiple that occurred
    assert len(graphs) <= 24 // multiple  # batches of 12 expected, of 40


def test_micro_batches_of_one_multiple_need_one_graph(backend: Counting) -> None:
    graphs, _ = shapes(backend, dynamic=False, pad_to_multiple=8, max_physical_batch_size=8)
    assert graphs == {8: 1}


def test_dynamic_shapes_need_one_graph(backend: Counting) -> None:
    graphs, seen = shapes(backend, dynamic=True)
    assert sum(graphs.values()) == 1
    assert len(seen) > 8


def test_without_padding_the_compiler_gives_up(backend: Counting) -> None:
    """What the padding is for: past its limit of graphs, torch runs every new shape uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=8):
        graphs, seen = shapes(backend, dynamic=False)
    assert len(seen) > len(graphs) == 8


def test_verification_adds_a_constant(backend: Counting) -> None:
    """One, two and six examples, and as many as a batch may well have, in evaluation mode and in the model's own."""
    change = lambda model: model.block.gate.compile(backend=backend, dynamic=False)  # noqa: E731
    with torch._dynamo.config.patch(recompile_limit=64):
        run(change, steps=25, pad_to_multiple=8)
    assert {n for n in backend.graphs if n % 8} <= {1, 2, 6, 19}
    assert sum(backend.graphs.values()) <= 2 * 4 + 3


# -- what holds trainable layers: refused by name ------------------------------------------------------------------------


def forward(model: nn.Module, backend: Counting) -> None:
    model.block.forward = torch.compile(model.block.forward, backend=backend)


def decorated(model: nn.Module, backend: Counting) -> None:
    class Decorated(Block):
        forward = torch.compile(Block.forward, backend=backend)

    model.block = Decorated().double()


def child(model: nn.Module, backend: Counting) -> None:
    model.block = torch.compile(model.block, backend=backend)


HOLDING = {
    "the model in place": (lambda m, b: m.compile(backend=b), r"the model \(Net\)", "first.weight"),
    "a block": (child, r"module 'block' \(OptimizedModule\)", "_orig_mod.up.weight"),
    "a block in place": (lambda m, b: m.block.compile(backend=b), r"module 'block' \(Block\)", "up.weight"),
    "a layer in place": (lambda m, b: m.head.compile(backend=b), r"module 'head' \(Linear\)", "weight"),
    "a method": (forward, r"module 'block' \(Block\)", "up.weight"),
    "a class": (decorated, r"module 'block' \(Decorated\)", "up.weight"),
}


@pytest.mark.parametrize(("change", "where", "parameter"), HOLDING.values(), ids=HOLDING)
def test_compiled_layers_are_refused_by_name(
    backend: Counting, change: Callable[..., Any], where: str, parameter: str
) -> None:
    model = net()
    change(model, backend)
    with pytest.raises(ValueError, match=rf"{where} is compiled and holds the trainable parameter '{parameter}'.*compile"):
        Session(plan(1.0), model, torch.optim.SGD(model.parameters(), 0.1), data())
    with pytest.raises(ValueError, match="is compiled and holds the trainable parameter"):
        opacus_cases.PrivacyEngine().validate(module=model)


def test_a_compiled_model_is_refused_by_name(backend: Counting) -> None:
    model = torch.compile(net(), backend=backend)
    with pytest.raises(ValueError, match=r"the model \(OptimizedModule\) is compiled.*of torch.compile\(m\) pass m"):
        Session(plan(1.0), model, torch.optim.SGD(model.parameters(), 0.1), data())


def test_a_model_that_is_compiled_later_is_refused_before_the_next_release(backend: Counting) -> None:
    model = net()
    with Session(plan(1.0), model, torch.optim.SGD(model.parameters(), 0.1), data()) as session:
        batches = session.batches()
        session.step(next(batches), loss_fn)
        model.block.compile(backend=backend)
        before = weights(model)
        with pytest.raises(ValueError, match=r"module 'block' \(Block\) is compiled"):
            session.step(next(batches), loss_fn)
        assert session.ledger.count == 1
        assert torch.equal(weights(model), before)


def test_what_is_excluded_from_compilation_is_no_compiled_module() -> None:
    class Excluded(Block):
        forward = torch.compiler.disable(Block.forward)

    def change(model: nn.Module) -> None:
        torch.manual_seed(0)
        model.block = Excluded().double()

    def plain(model: nn.Module) -> None:
        torch.manual_seed(0)
        model.block = Block().double()

    assert torch.equal(run(change, steps=2), run(plain, steps=2))


# -- compiled functions that call layers: exact, or refused; never a graph from before -------------------------------------


def test_a_compiled_loss_function_is_cut_at_every_layer(backend: Counting) -> None:
    assert torch.equal(run(loss=torch.compile(loss_fn, backend=backend, dynamic=True), steps=2), run(steps=2))
    assert backend.graphs


def test_one_graph_cannot_hold_a_layer(backend: Counting) -> None:
    with pytest.raises(RuntimeError, match="a layer with trainable parameters cannot be a part of one compiled graph"):
        run(loss=torch.compile(loss_fn, backend=backend, fullgraph=True))


def through_a_function(backend: Any, part: str) -> Any:
    """A loss in which one module is called by a compiled function."""
    call = torch.compile(lambda module, x: module(x), backend=backend, dynamic=False)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = model.first(batch[0])
        x = call(model.block, x) if part == "block" else model.block(x)
        x = model.drop(x)
        return F.cross_entropy(call(model.head, x) if part == "head" else model.head(x), batch[1], reduction="none")

    return loss


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("part", ["head", "block"])
def test_a_graph_from_before_the_session_is_refused(backend: Counting, part: str, verify: bool) -> None:
    """Such a graph has no hooks in it, and torch does not look whether there are some by now."""

    def owning(model: nn.Module) -> None:
        if part == "block":
            model.block = Owning().double()
        with torch._dynamo.config.patch(recompile_limit=64):
            for training in (False, True):
                model.train(training)
                for n in (1, 2, 6, 8, 16):
                    loss(model, tuple(x[:n] for x in data())).sum().backward()
        model.zero_grad()

    loss = through_a_function(backend, part)
    name = {"head": "head.weight", "block": "block.gain"}[part]
    with pytest.raises(ValueError, match=rf"'{name}' differs from what its layer has shown.*torch.compile"):
        run(owning, loss, verify=verify, pad_to_multiple=8)


def test_a_graph_made_between_two_steps_changes_nothing(backend: Counting) -> None:
    """A user looks at a loss with gradients, through the same compiled function, in the shapes of the run."""
    loss = through_a_function(backend, "head")
    model, reference = net(), run(steps=3, pad_to_multiple=8, verify=False)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    p = plan(1.0, expected_batch_size=12, steps=3, pad_to_multiple=8)
    with Session(p, model, optimizer, data(), verify=False) as session:
        for batch in session.batches():
            session.step(batch, loss)
            state = torch.get_rng_state()
            for n in (8, 16, 24):
                loss(model, tuple(x[:n] for x in data())).sum().backward()
            torch.set_rng_state(state)
    assert torch.equal(weights(model), reference)


def test_a_weight_borrowed_late_is_refused_before_its_release() -> None:
    """The check is made in every batch, not only in the first ones."""

    def borrowing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model, batch) + late[0] * (batch[0] @ model.first.weight.T).sum(1)

    late, model = [0.0], net()
    with Session(plan(1.0), model, torch.optim.SGD(model.parameters(), 0.1), data()) as session:
        batches = session.batches()
        session.step(next(batches), borrowing)
        late[0] = 1.0
        with pytest.raises(ValueError, match=r"'first.weight' differs from what its layer has shown.*F\.linear"):
            session.step(next(batches), borrowing)
        assert session.ledger.count == 1
