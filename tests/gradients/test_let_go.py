"""What a micro-batch holds in memory: each layer's pair (a, b) until it is used and no longer,
never all gradients at once.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dpkfc.gradients import clipped_summer
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from dpkfc.linalg import blocks, norms
from dpkfc.linalg.blocks import ConvBlock, Lookup, MaterializedGradients, Outer, Tied
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.sides import Dense, Identity
from tests.gradients.loop import assert_equals_a_loop, record
from tests.gradients.whitened import metric_of

N, T, WIDE, DEPTH = 4, 3, 40, 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(DEPTH) for m in (nn.Linear(WIDE, WIDE), nn.Tanh()))
    ).double()


def record_calls(model):
    """The calls of one pass, of which nothing else refers to the inputs and the gradients."""
    return record(
        model,
        find_layers(model),
        lambda: model(torch.randn(N, T, WIDE, dtype=torch.float64)).square().sum((1, 2)),
    )


class Held:
    """Which layers' inputs and output gradients are still in memory, whatever view of them is
    held.
    """

    def __init__(self, calls):
        self._pairs = {
            name: [
                StorageWeakRef(x.untyped_storage())
                for call in of
                for x in (call.args[0], call.output_gradients[0])
            ]
            for name, of in calls.items()
        }

    def __call__(self):
        return [name for name, pair in self._pairs.items() if not all(x.expired() for x in pair)]

    def half(self):
        return [name for name, pair in self._pairs.items() if any(x.expired() for x in pair)]


def note_memory(monkeypatch, owner, what, held):
    """What was in memory whenever a function was called, and behind its last call."""
    seen, own = list[list[str]](), getattr(owner, what)

    def call_and_note(*args, **more):
        seen.append(held())
        return own(*args, **more)

    monkeypatch.setattr(owner, what, call_and_note)
    return seen


NAMES = [str(2 * i) for i in range(DEPTH)]
FROM_EACH_ON = [NAMES[i:] for i in range(DEPTH)]
CASES = {  # metric, method, whether its norm is the last that needs a pair
    "plain, Gram": ("none", "gram", False),
    "dense, Gram": ("dense", "gram", True),
    "low rank, Gram": ("lowrank", "gram", True),
    "dense, materialised": ("dense", "materialised", False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pair_is_let_go_when_it_has_been_used(name, monkeypatch):
    """By its norm where the sum is taken of whitened rows, else by its sum: at each layer only
    those still to come are held.
    """
    kind, method, at_once = CASES[name]
    model = network()
    layers, calls = find_layers(model), record_calls(model)
    held = Held(calls)
    assert held() == NAMES and not held.half()
    at_norms = note_memory(monkeypatch, clipped_summer, "per_example_norms", held)
    at_sums = note_memory(monkeypatch, Outer, "weighted_sum", held)
    metric = {} if kind == "none" else metric_of(layers, kind)
    monkeypatch.setattr(norms, "choose_norm_method", lambda block: method)
    summer = ClippedSummer(layers, metric, Clip(0.5))
    summer.add(calls, N)
    assert at_norms == (FROM_EACH_ON if at_once else [NAMES] * DEPTH)
    assert at_sums == ([[]] * DEPTH if at_once else FROM_EACH_ON)
    assert not held() and not calls


def test_gradients_that_were_formed_stand_in_for_their_pairs(monkeypatch):
    """A narrow layer's gradients are kept for the sum, and its pair is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, 3), nn.Tanh(), nn.Linear(3, WIDE)).double()
    calls = record_calls(model)
    held = Held(calls)
    at_norms = note_memory(monkeypatch, clipped_summer, "per_example_norms", held)
    at_sums = note_memory(monkeypatch, MaterializedGradients, "weighted_sum", held)
    ClippedSummer(find_layers(model), {}, Clip(0.5)).add(calls, N)
    assert at_norms == [["0", "2"], ["2"]] and at_sums == [[], []]


def test_an_error_lets_go_of_everything(monkeypatch):
    model = network()
    calls = record_calls(model)
    held = Held(calls)

    def fails(*_):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(Outer, "weighted_sum", fails)
    summer = ClippedSummer(find_layers(model), {}, Clip(0.5))
    with pytest.raises(RuntimeError, match="in the middle"):
        summer.add(calls, N)
    assert not held()


# -- gradients in chunks ---------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most entries of one tensor that an operation has made."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: PLW3201
        result = func(*args, **(kwargs or {}))
        made = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_flatten(result)[0]
            if isinstance(x, Tensor)
        ]
        self.entries = max(self.entries, *made, 0)
        return result


def dense(d, seed):
    g = torch.randn(d, d, generator=torch.Generator().manual_seed(seed))
    root = torch.eye(d) + 0.1 * (g + g.T)
    return Dense(root, float(torch.linalg.matrix_norm(root, 2)) * 1.001)


BATCH, IN, OUT = 60, 48, 56
KRON = Kronecker(dense(IN, 1), dense(OUT, 2))
EIGEN = Eigenbasis(
    torch.rand(OUT, IN) + 0.5,
    torch.linalg.qr(torch.randn(IN, IN)).Q,
    torch.linalg.qr(torch.randn(OUT, OUT)).Q,
)


def outer(positions):
    return Outer(torch.randn(BATCH, positions, IN), torch.randn(BATCH, positions, OUT))


def tied_block():
    ids = torch.randint(OUT, (BATCH, 2))
    return Tied(
        Lookup(ids, torch.randn(BATCH, 2, IN), OUT),
        Outer(torch.randn(BATCH, 2, IN), torch.randn(BATCH, 2, OUT)),
    )


def conv():
    """Few positions of many channels, whose gradients are larger than what was read."""
    model = nn.Sequential(nn.Conv2d(IN // 4, OUT, 2))
    tape = Tape(model, layers := find_layers(model))
    with tape:
        losses = model(torch.randn(BATCH, IN // 4, 3, 3)).square().sum((1, 2, 3))
    from dpkfc.gradients.rules import blocks_of

    found = blocks_of(layers[0], tape.backward(losses)["0"], BATCH)
    assert isinstance(found, ConvBlock)
    return found


CHUNKED = {
    "identity": (lambda: outer(2), Kronecker(), "materialised"),
    "dense": (lambda: outer(2), KRON, "materialised"),
    "eigenbasis": (lambda: outer(2), EIGEN, None),
    "convolution": (conv, None, "materialised"),
    "tied": (tied_block, Kronecker(dense(IN, 1), Identity()), "materialised"),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_gradients_are_formed_a_few_examples_at_a_time(name, monkeypatch):
    """No tensor holds more than the bound, or than the batch's rows themselves; the norms are those
    of all at once.
    """
    torch.manual_seed(0)
    make, metric, method = CHUNKED[name]
    block = make()
    # gradients of this size would be kept for the sum
    for limit in ("_MAX_KEPT_ENTRIES", "_SMALL_CONVOLUTION"):
        monkeypatch.setattr(f"dpkfc.linalg.linear_norms.{limit}", 0)
    wide = per_example_norms(block, metric, method).norms
    bound = 4 * IN * OUT
    monkeypatch.setattr(blocks, "_CHUNK_ELEMENTS", bound)
    with Largest() as seen:
        found = per_example_norms(block, metric, method)
        found.block.weighted_sum(torch.ones(BATCH))
    torch.testing.assert_close(found.norms, wide, rtol=1e-6, atol=0)
    assert not isinstance(found.block, MaterializedGradients)
    parts = (block.lookup, block.outer) if isinstance(block, Tied) else (block,)
    rows = max(x.numel() for part in parts for x in vars(part).values() if isinstance(x, Tensor))
    whole = BATCH * IN * OUT
    assert seen.entries <= max(bound, 2 * rows) < whole / 4, (seen.entries, rows)


# -- norm layers -----------------------------------------------------------------------------------


class Normed(nn.Module):
    """A norm layer of the data, one of what a layer returns, called twice, and one for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.unused = (nn.LayerNorm(WIDE) for _ in range(3))
        self.layer, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.layer(self.first(x))).tanh()
        self.unused(x)
        return self.head(self.inner(x))


def test_a_norm_layer_becomes_rows_while_the_backward_pass_runs():
    """Its input and output gradient are as large as activations; where no layer lies behind it,
    they stay.
    """
    torch.manual_seed(0)
    model = Normed().double()
    x = torch.randn(N, T, WIDE, dtype=torch.float64)
    tape = Tape(model, find_layers(model))
    with tape:
        losses = model(x).square().sum((1, 2))
    first = next(x for x in tape._records if x.layers[0].name == "inner")
    read = StorageWeakRef(first.call.args[0].untyped_storage())
    del first
    calls = tape.backward(losses)
    found = {name: {type(call).__name__ for call in of} for name, of in calls.items()}
    assert found.pop("inner") == {"PerExample"} and len(calls["inner"]) == 2
    assert set.union(*found.values()) == {"Call"} and "unused" in found
    assert read.expired()


FROZEN = {"none": [], "layers": ["layer", "head"], "all but one": ["layer", "head", "first"]}


@pytest.mark.parametrize("frozen", FROZEN)
def test_norm_layers_have_the_gradients_of_a_loop(frozen):
    torch.manual_seed(0)
    model = Normed().double()
    for name in FROZEN[frozen]:
        model.get_submodule(name).requires_grad_(False)
    assert_equals_a_loop(model, (torch.randn(N, T, WIDE, dtype=torch.float64),))
