"""Weights and biases that a module reads through functions, without a layer around them, beside a
loop over single examples.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.one_pass import batch_tracker, follow_pass
from dpkfc.tracking.states import BatchAxis
from tests.gradients.loop import assert_equals_a_loop, loss_fn, record_gradients
from tests.models import randn
from tests.zoo.brute_force import gradients_of_each
from tests.zoo.registry import Network, parameter

N, D = 5, 4


class Placed(nn.Module):
    """Adds what a layer makes of public rows to the examples."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("rows", rows)
        self.places = nn.Linear(3, D) if rows.is_floating_point() else nn.Embedding(9, D)
        self.head = nn.Linear(D, 1)

    def forward(self, x):
        places = self.places(self.rows[: len(x)])
        return self.head(x + places.reshape(len(x), -1, D).sum(1)).squeeze(1)


@pytest.mark.parametrize(
    "rows", [torch.rand(9, 3), torch.arange(9)[:, None], torch.zeros(9, 2).long()]
)
def test_public_rows_of_a_layer_are_proved_where_they_are_equal(rows):
    """A batch of one reads the first row, whatever place its example had before."""
    model, x = Placed(rows), torch.rand(N, D)
    tape, losses = follow_pass(call_model, model, find_layers(model), x, batch_tracker(model, x, N))
    is_equal = bool((rows == rows[0]).all())
    assert (tape.failure(losses) is None) == is_equal


class Positions(nn.Embedding):
    """Reads the shape of the token ids alone, as in BART, or public rows, as in Whisper."""

    def __init__(self):
        super().__init__(20, D)

    def forward(self, ids, places=None):
        return super().forward(places_of(ids) if places is None else places)


def places_of(ids, by_place=False):
    """Return the positions of ids; with `by_place`, each row has others."""
    return torch.arange(ids.shape[1]) + by_place * torch.arange(len(ids))[:, None]


class Text(nn.Module):
    """Token ids `[n, t]` to a number, by embeddings and positions."""

    def __init__(self, *arguments):
        super().__init__()
        self.words, self.positions = nn.Embedding(7, D), Positions()
        self.head, self.arguments = nn.Linear(D, 1), arguments

    def forward(self, ids):
        places = self.positions(ids, *(make(ids) for make in self.arguments))
        return self.head((self.words(ids) + places).tanh().sum(1)).squeeze(1)


@pytest.mark.parametrize("arguments", [(), (places_of,)])
def test_equal_positions_of_a_module_of_ones_own_are_proved(arguments):
    model, ids = Text(*arguments).double(), torch.randint(7, (N, 3))
    found = record_gradients(model, call_model, ids, N)
    expected = gradients_of_each(model, ids.split(1), call_model)
    for one, other in zip(found, expected, strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(one[name], gradient, rtol=1e-9, atol=1e-11)


def test_positions_that_follow_the_place_in_the_batch_are_not_proved():
    model, ids = Text(lambda ids: places_of(ids, by_place=True)), torch.randint(7, (N, 3))
    tape, losses = follow_pass(
        call_model, model, find_layers(model), ids, batch_tracker(model, ids, N)
    )
    assert tape.failure(losses) is not None


class Scaled(Positions):
    """Positions times the sum of public numbers."""

    def forward(self, ids, numbers):
        return super().forward(ids, places_of(ids).expand(ids.shape)) * numbers.sum()


@pytest.mark.parametrize("shape", [(N,), (N, N), (N, 3)])
def test_a_public_tensor_as_long_as_the_batch_is_not_taken_for_rows(shape):
    model, ids = Text(lambda ids: torch.ones(shape)).double(), torch.randint(0, 7, (N, 3))
    model.positions = Scaled().double()
    assert_equals_a_loop(model, (ids,), lambda model, batch: model(*batch))


def call_model(model, batch):
    return model(batch)


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell])
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_public_state_is_proved_where_it_is_equal_for_all(kind, is_equal):
    model = nn.Sequential(kind(3, D))
    recurrent = model[0]
    state = torch.rand(9, D) * (not is_equal)

    def losses(_, x):
        if kind is nn.GRUCell:
            return recurrent(x[0], state[:N]).sum(1)
        return recurrent(x, state[None, :N])[0].sum((0, 2))

    x = torch.rand(1, N, 3)
    tracker = batch_tracker(model, None, N)
    tracker.set_state(x, BatchAxis(1))
    tape, summed = follow_pass(losses, model, find_layers(model), x, tracker)
    assert (tape.failure(summed) is None) == is_equal


class Heads(nn.Module):
    """A matrix for each of two heads, beside a layer, read by a function."""

    def __init__(self, read):
        super().__init__()
        self.layer, self.heads, self.read = nn.Linear(D, D), nn.Parameter(randn(2, D, D)), read

    def forward(self, x):
        return self.read(self.layer(x), self.heads)


def repeat_heads(x, heads):
    """Fold the heads into the batch, as DeBERTa does with what it makes of relative positions."""
    return torch.bmm(x.repeat_interleave(2, 0), heads.repeat(len(x), 1, 1))


@pytest.mark.parametrize(
    "read",
    [
        repeat_heads,
        lambda x, heads: torch.einsum("ntd, hde -> nhte", x, heads),
        lambda x, heads: torch.einsum("hde,ntd->htne", heads, x).movedim(2, 0),
        lambda x, heads: torch.einsum("ntd,hde,hef->nf", x, heads, heads),
    ],
)
def test_matrices_of_heads_get_the_gradient_of_each_example_in_one_pass(read):
    torch.manual_seed(0)
    model, x = Heads(read).double(), randn(N, 3, D)

    def losses(module, batch):
        return loss_fn(module, batch).unflatten(0, (len(batch[0]), -1)).sum(1)

    assert_one_pass_equals_a_loop(model, losses, x)


def assert_one_pass_equals_a_loop(model, losses, x):
    found = record_gradients(model, losses, (x,), N)
    expected = gradients_of_each(model, [(x[i : i + 1],) for i in range(N)], losses)
    for one, other in zip(found, expected, strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(one[name], gradient, rtol=1e-9, atol=1e-11)


HEADS_OF_ONES_OWN = {
    "normalized": lambda x, w, b: F.linear(F.normalize(x, dim=-1), F.normalize(w)),
    "with a computed bias": lambda x, w, b: F.linear(x, w, b.exp()),
    "with a bias of one number": lambda x, w, b: F.linear(x, w) + b[:1],
    "computed twice": lambda x, w, b: F.linear(x, w.exp())[..., None] @ F.normalize(b[None]),
    "transposed": lambda x, w, b: F.linear(F.linear(x, w), w.T),
    "symmetric": lambda x, w, b: F.linear(x, w.T @ w),
    "times a vector": lambda x, w, b: F.linear(x, w[0].exp()),
    "named": lambda x, w, b: torch.matmul(x, other=w.T),
    "without a gradient": lambda x, w, b: F.linear(x, w.detach() * 2) + b,
    "cosines": lambda x, w, b: F.cosine_similarity(x[..., None, :], w, dim=-1),
    "distances": lambda x, w, b: F.pairwise_distance(x[..., None, :], w),
    "distances to the rows": lambda x, w, b: torch.cdist(x, w),
    "bounded": lambda x, w, b: torch.clamp(x[..., :3], min=b - 1, max=b + 1),
}


@pytest.mark.parametrize("read", HEADS_OF_ONES_OWN.values(), ids=HEADS_OF_ONES_OWN)
def test_a_head_of_ones_own_gets_the_gradient_of_each_example_in_one_pass(read):
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(D, D), "w": nn.Parameter(randn(3, D)), "b": nn.Parameter(randn(3))}
    model = Network(lambda m, x: read(m.layer(x), m.w, m.b), **parts).double()
    assert_one_pass_equals_a_loop(model, loss_fn, randn(N, 5, D))


FUNCTIONS = {
    "conv1d": ((3, 4, 3), lambda x, w: F.conv1d(x, w, w[:, 0, 0].exp(), padding=1)),
    "conv1d, computed": ((3, 4, 3), lambda x, w: F.conv1d(x, w - w.mean((1, 2), keepdim=True))),
    "conv1d of folded rows": ((3, 1, 2), lambda x, w: F.conv1d(x.flatten(0, 1)[:, None], w)),
    "conv1d of groups": ((4, 2, 3), lambda x, w: torch.conv1d(x, groups=2, weight=w)),
    "conv_transpose1d": ((4, 3, 2), lambda x, w: F.conv_transpose1d(x, w, stride=2)),
    "conv2d": ((3, 1, 3, 2), lambda x, w: F.conv2d(x[:, None], w)),
    "conv3d": ((3, 1, 1, 2, 2), lambda x, w: F.conv3d(x[:, None, None], w)),
    "layer_norm": ((6,), lambda x, w: F.layer_norm(x, (6,), w, w.exp())),
    "group_norm": ((4,), lambda x, w: F.group_norm(x, 2, w, w.exp())),
    "instance_norm": ((4,), lambda x, w: F.instance_norm(x, weight=w, bias=w.exp())),
    "batch_norm": (
        (4,),
        lambda x, w: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), w, w.exp()),
    ),
    "rms_norm": ((6,), lambda x, w: F.rms_norm(x, (6,), w)),
    "prelu": ((4,), lambda x, w: x.prelu(w)),
    "cdist": ((3, 6), lambda x, w: torch.cdist(x[:, 0], w)),
    "cdist from the left": ((3, 6), lambda x, w: torch.cdist(w.exp(), x[:, 0], p=1.0).T),
    "addmm": ((6, 6), lambda x, w: torch.addmm(w[0], x[:, 0], w.T)),
    "mv": ((6,), lambda x, w: x[:, 0].mv(w)[:, None]),
    "inner": ((3, 6), lambda x, w: torch.inner(x, w)),
    "tensordot": ((4, 6, 3), lambda x, w: torch.tensordot(x, w, ([1, 2], [0, 1]))),
    "gather": ((7, 3), lambda x, w: w.gather(0, places_in(x[:, 0, :3]))),
    "gather along a row": (
        (1, 7),
        lambda x, w: torch.gather(w.expand(len(x), 7), 1, places_in(x[:, 0])),
    ),
    "take_along_dim": (
        (7, 3),
        lambda x, w: torch.take_along_dim(w[None], places_in(x[:, 0, :3, None]), 1),
    ),
    "pairs of indices": ((7, 7), lambda x, w: w[places_in(x[:, 0]), places_in(x[:, 1])]),
    "pairs with learnt places": (
        (7, 7),
        lambda x, w: w[places_in(x[:, 0]), w[0].topk(6).indices],
    ),
    "columns": ((3, 7), lambda x, w: w[:, places_in(x[:, 0])].movedim(1, 0)),
}


def places_in(x):
    return (7 * x.detach().sigmoid()).long()


@pytest.mark.parametrize(("shape", "read"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_that_reads_a_weight_is_repeated_for_each_example(shape, read):
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(6, 6), "w": nn.Parameter(randn(*shape))}

    def forward(m, x):
        h = m.layer(x)
        return torch.cat([read(h, m.w).flatten().unflatten(0, (len(x), -1)), h.flatten(1)], 1)

    assert_one_pass_equals_a_loop(Network(forward, **parts).double(), loss_fn, randn(N, 4, 6))


AUTOCAST = {
    "conv1d": ((3, 4, 3), lambda x, w: F.conv1d(x, w)),
    "prelu": ((4,), lambda x, w: x.prelu(w)),
    "addmm": ((6, 6), lambda x, w: torch.addmm(w[0], x[:, 0], w)),
    "cdist": ((3, 6), lambda x, w: torch.cdist(x[:, 0], w)),
}


@pytest.mark.parametrize(("shape", "read"), AUTOCAST.values(), ids=AUTOCAST)
def test_a_function_is_repeated_in_the_precision_of_autocast(shape, read):
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(6, 6), "w": nn.Parameter(randn(*shape))}
    model = Network(lambda m, x: read(m.layer(x), m.w), **parts).float()

    def losses(module, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(module, batch)

    x = randn(N, 4, 6).float()
    found = record_gradients(model, losses, (x,), N)
    expected = gradients_of_each(model, [(x[i : i + 1],) for i in range(N)], losses)
    for one, other in zip(found, expected, strict=True):
        for name, gradient in other.items():
            error = (one[name] - gradient).norm() / gradient.norm()
            assert error < 0.05


def test_an_input_that_is_changed_after_a_function_has_read_it_is_not_proved():
    """The function has read a copy of the transposed input, which autograd keeps."""

    def forward(m, x):
        h = m.layer(x).mT
        normed = F.group_norm(h, 2, m.w)
        h.mul_(3)
        return normed.flatten(1).sin().sum(1)

    model = Network(forward, layer=nn.Linear(6, 4), w=parameter(4)).double()
    x = randn(N, 3, 6)
    tape, losses = follow_pass(call_model, model, find_layers(model), x, batch_tracker(model, x, N))
    assert "memory that .data or .detach() shares" in tape.failure(losses).reason


@pytest.mark.parametrize("size", [N, 2 * N])
def test_a_weight_with_a_row_for_each_example_is_not_repeated(size):
    """Repeated for one example, the call would still read the rows of all."""

    def forward(m, x):
        return torch.cdist(m.layer(x), torch.ones(len(x), 1, 1) * m.w)

    model = Network(forward, layer=nn.Linear(6, 6), w=parameter(3, 6))
    assert_equals_a_loop(model.double(), (randn(size, 4, 6),))


def test_a_table_with_a_row_for_each_example_is_not_repeated():
    """One example alone would meet all its rows, by broadcasting."""

    def forward(m, x):
        rows = torch.ones(len(x), 1) * m.w
        return torch.take_along_dim(rows, places_in(x), 1) + m.layer(x)

    model, x = Network(forward, layer=nn.Linear(3, 3), w=parameter(7)).double(), randn(N, 3)
    tape, losses = follow_pass(
        lambda m, x: loss_fn(m, (x,)), model, find_layers(model), x, batch_tracker(model, x, N)
    )
    assert tape.failure(losses).reason == "an example alone gives another shape"
    assert_equals_a_loop(model, (x,))


STATES = {
    "of zeros": lambda n, w: torch.zeros(n, 6, dtype=w.dtype),
    "of one learnt row": lambda n, w: torch.ones(n, 1, dtype=w.dtype) * w[1],
    "of sequences": lambda n, w: torch.zeros(1, n, 6, dtype=w.dtype)[0],
}


@pytest.mark.parametrize("begin", STATES.values(), ids=STATES)
def test_a_state_with_a_learnt_decay_gets_the_gradient_of_each_example_in_one_pass(begin):
    def forward(m, x):
        state = begin(len(x), m.w)
        for step in m.layer(x).unbind(1):
            state = m.w[0].sigmoid() * state + step
        return state

    parts = {"layer": nn.Linear(6, 6), "w": nn.Parameter(randn(2, 6))}
    assert_one_pass_equals_a_loop(Network(forward, **parts).double(), loss_fn, randn(N, 4, 6))


def test_a_learnt_state_of_another_value_in_each_place_is_not_proved():
    def forward(m, x):
        return (torch.arange(N)[:, None] * m.w + m.layer(x)).sum(1)

    model = Network(forward, layer=nn.Linear(6, 6), w=parameter(6)).double()
    x = randn(N, 6)
    tape, losses = follow_pass(call_model, model, find_layers(model), x, batch_tracker(model, x, N))
    assert tape.failure(losses) is not None


class Made(nn.Module):
    """Makes a tensor of its parameters alone, which reads no example."""

    def __init__(self, make):
        super().__init__()
        self.make, self.code, self.layer = make, nn.Parameter(randn(3, D)), nn.Linear(D, 2 * D)

    def forward(self, n):
        return self.make(self.layer(self.code), n)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda made, n: made.expand(n, 3, -1), lambda x, made: made @ x.mT.repeat(1, 2, 1)),
        (lambda made, n: made.view(-1, D), F.linear),
        (lambda made, n: made.sum().exp(), torch.mul),
    ],
)
def test_a_module_that_reads_no_example_gets_the_gradient_of_each_in_one_pass(make, read):
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(D, D), "made": Made(make)}
    model = Network(lambda m, x: read(m.layer(x), m.made(len(x))), **parts).double()
    assert_one_pass_equals_a_loop(model, loss_fn, randn(N, 5, D))


LOOKUPS = {
    "rows": lambda ids, table: table[ids],
    "selected": lambda ids, table: table.index_select(0, ids[:, 0]),
    "selected by name": lambda ids, table: torch.index_select(table, dim=0, index=ids[:, 1]),
    "from the end": lambda ids, table: table[ids - 7],
    "numbers": lambda ids, table: table[:, 0].exp()[ids],
    "computed": lambda ids, table: table.exp()[ids],
    "transposed": lambda ids, table: table.T.exp().T[ids],
    "matrices": lambda ids, table: table.view(7, 2, 2)[ids],
    "last row of padding": lambda ids, table: F.embedding(ids, table, -1),
    "computed, with padding": lambda ids, table: F.embedding(ids, table.exp(), padding_idx=-1),
    "no rows": lambda ids, table: table[ids[:, :0]].sum(1) + table[ids].sum(1),
}


@pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS)
def test_a_table_that_is_indexed_gets_the_gradient_of_each_example_in_one_pass(look_up):
    """`padding_idx` may count from the end, as an index may."""
    parts = {"words": nn.Embedding(7, D), "table": nn.Parameter(randn(7, D))}

    def forward(m, ids):
        return torch.cat([m.words(ids).flatten(1), look_up(ids, m.table).flatten(1)], 1)

    ids = torch.randint(7, (N, 3))
    ids[::2, 1] = 6
    assert_one_pass_equals_a_loop(Network(forward, **parts).double(), loss_fn, ids)


def test_a_bias_of_one_number_for_all_outputs_is_taken_alone():
    parts = {"w": nn.Parameter(randn(3, D)), "b": nn.Parameter(randn(1)), "layer": nn.Linear(D, D)}
    model = Network(lambda m, x: F.linear(m.layer(x), m.w, m.b), **parts).double()
    assert_equals_a_loop(model, (randn(N, D),))
