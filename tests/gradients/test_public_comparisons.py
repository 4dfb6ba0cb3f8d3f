"""The comparisons on public rows: every size of a batch counts, differences above rounding are
seen, and so are wrong rules.
"""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.rules import register_layer_rule
from dpkfc.verification import check as check_module
from dpkfc.verification.batch_comparison import check_sizes
from dpkfc.verification.constant_numbers import ConstantNumbers
from dpkfc.verification.differences import gradients_differ
from dpkfc.verification.public_passes import PublicPasses
from dpkfc.verification.row_functions import split_rows
from tests.models import randn
from tests.recording import Heard
from tests.sessions import assert_refused, open_session, train

COUNT = 8


class Rows:
    """Rows whose numbers alone decide their losses."""

    def __len__(self):
        return COUNT


class Sized(PublicPasses):
    """A loss that is another one in batches of one size."""

    def losses_of_rows(self, rows, indices):
        losses = torch.tensor([1.0 + i for i in indices], dtype=torch.float64)
        return losses * (1 + self.loss_fn(None, len(indices)))


def check(odd, difference):
    layers = find_layers(nn.Linear(2, 2).double())
    own = Sized(
        None,
        layers,
        lambda _, size: difference * (size == odd),
        None,
        torch.device("cpu"),
        COUNT,
        None,
    )
    check_sizes(own, Rows(), None)


@pytest.mark.parametrize("odd", [COUNT // 2, COUNT // 2 + 1, 1])
@pytest.mark.parametrize("difference", [1.0, -0.1, 1e-4])
def test_a_loss_that_is_another_one_at_one_size_is_refused(odd, difference):
    with pytest.raises(
        ValueError, match=f"in a batch of {COUNT} differs from that in a batch of {odd}"
    ):
        check(odd, difference)


@pytest.mark.parametrize("odd", [COUNT, COUNT // 2, COUNT // 2 + 1, 1])
def test_rounding_is_no_difference(odd):
    check(odd, 1e-9)


def rows():
    return (randn(24, 3),)


def sine_loss(model, batch):
    return model(batch[0]).sin().sum(1)


def test_what_is_undefined_for_one_example_is_named_by_its_operation():

    class Normalised(nn.Linear):
        def forward(self, x):
            return F.batch_norm(super().forward(x), None, None, training=True)

    refused = open_session(Normalised(3, 2).double(), rows())
    assert_refused(refused, "batch_norm.*taken over the batch", sine_loss)


def test_a_layer_rule_that_gives_other_gradients_is_refused_before_a_release():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return x * self.gain

    register_layer_rule(Gain, lambda call: {"gain": 2 * call.gradient * call.input})
    model = nn.Sequential(nn.Linear(3, 3).double(), Gain())
    with open_session(model, rows()) as session:
        with pytest.raises(Exception, match="gain"):
            session.step(next(session.batches()), sine_loss)
        assert session.ledger.count == 0


FEATURES = Heard()


@pytest.fixture(autouse=True)
def _forget_features():
    FEATURES.clear()


def queue_features(h):
    """Add the features of the batch before, which no restored attribute holds."""
    FEATURES.append(h.detach())
    if len(FEATURES) > 1:
        return h + FEATURES.pop(0).mean(0)
    return h


def mixing_backward(h):
    """Let the backward pass read other values than the forward pass has saved."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x + x.flip(0)):
        return h * h.exp()


class Inner(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.change = change

    def forward(self, x):
        return self.b(self.change(self.a(x).tanh()))


@pytest.mark.parametrize("change", [queue_features, mixing_backward])
def test_a_model_that_mixes_where_no_operation_shows_it_is_refused(change):
    torch.manual_seed(0)
    session = open_session(Inner(change), rows())
    assert_refused(session, "earlier batch|backward pass reads", sine_loss)


def test_features_that_a_model_keeps_leave_it_one_pass_for_all_examples():
    def keep(h):
        FEATURES.append(h.detach())
        return h

    train(Inner(keep), rows(), sine_loss, steps=1)
    assert len(FEATURES.pop()) > 1


GENERATOR = torch.Generator()


def test_a_generator_that_a_model_reaches_has_a_secret_seed_in_each_pass():
    """One more example would shift the numbers of a known seed for all others."""
    before, numbers = GENERATOR.get_state(), Heard()

    def mask(h):
        drawn = torch.rand(len(h), 1, generator=GENERATOR)
        numbers.append(float(drawn.detach()[0]))
        return h * (drawn > 0.5)

    with open_session(Inner(mask), rows()) as session:
        batches = session.batches()
        session.step(next(batches), sine_loss)
        numbers.clear()
        session.step(next(batches), sine_loss)
    assert numbers and len(set(numbers)) == len(numbers)
    assert torch.equal(GENERATOR.get_state(), before)


def test_passes_over_the_same_rows_are_made_once():
    """Comparisons of sizes, repetitions and gradients share the passes that draw no numbers."""
    sizes = Heard()

    def note(h):
        sizes.append(len(h))
        return h

    train(Inner(note), rows(), sine_loss, steps=1)
    # The last one is private.
    assert sorted(sizes[:-1]) == [1] * 5 + [2, 4, 4, 8, 9, 16]


def test_passes_whose_values_alone_count_keep_no_activations():
    """The largest batch of the check takes less memory than a step."""
    hidden, kept = Heard(), Heard()

    def note(h):
        hidden.append(weakref.ref(h))
        return h

    def loss(model, batch):
        outputs = model(batch[0])
        kept.append((len(outputs), hidden[-1]() is not None))
        return outputs.sin().sum(1)

    train(Inner(note), rows(), loss, steps=1)
    # A row alone is differentiated later.
    assert (1, True) in kept
    assert (16, False) in kept
    assert (16, True) not in kept


def force_loss(model, batch):
    x = batch[0].clone().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return force.square().sum(1)


def test_a_loss_that_differentiates_is_checked_too():
    train(Inner(torch.sin), rows(), force_loss, steps=1)
    mixing = Inner(lambda h: h.sin() * h.mean(0))
    assert_refused(open_session(mixing, rows()), "mixes", force_loss)


def caught_force_loss(model, batch):
    try:
        return force_loss(model, batch)
    except RuntimeError:
        return model(batch[0]).sum(1)


def test_a_loss_that_goes_on_without_its_gradient_is_not_taken_for_one_that_mixes():
    train(Inner(torch.sin), rows(), caught_force_loss, steps=1)


@pytest.mark.parametrize(
    "value",
    [lambda i: i == 15, lambda i: i == 10, lambda i: i % 8],
    ids=["last", "in the middle", "periodic"],
)
def test_numbers_of_places_in_a_batch_are_refused(value):
    """The tracker takes them for numbers of the examples that are added to them."""
    table = torch.tensor([float(value(i)) for i in range(16)]).double()[:, None]
    model = Inner(lambda h: table[: len(h)].expand(len(h), 3).clone().add_(h))
    assert_refused(open_session(model, rows()), "mixes examples|the loss of a row in", sine_loss)


def seeded(h):
    torch.manual_seed(3)
    return h @ torch.randn(3, 3).double()


def seeded_aside(h):
    with torch.random.fork_rng():
        return seeded(h)


def dropped_aside(h):
    with torch.random.fork_rng():
        return F.dropout(h, 0.3)


@pytest.mark.parametrize("change", [seeded, seeded_aside, dropped_aside])
@pytest.mark.parametrize("mixes", [False, True])
def test_generators_that_a_model_sets_make_no_pass_another_one(change, mixes, recwarn):
    """Passes with numbers and with constants in their place are not compared."""
    session = open_session(Inner(lambda h: change(h) - mixes * h.detach().mean(0)), rows())
    if mixes:
        assert_refused(session, "aten.mean.dim mixes", sine_loss)
        return
    with session:
        session.step(next(session.batches()), sine_loss)
    assert not [x for x in recwarn if "could not be used" in str(x.message)]


class Texts:
    """Texts of other lengths, whose padding is id 0."""

    def __init__(self, first=4):
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for i in range(24):
            length = 2 + (i + first - 2) % 7
            self.rows.append((torch.randint(1, 9, (length,), generator=generator), i % 2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def padded(rows):
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    return ids, torch.tensor([label for _, label in rows])


def collate_lists(rows):
    return [ids for ids, _ in rows], torch.tensor([label for _, label in rows])


class Pooled(nn.Module):
    """Takes the largest of each feature, over the padding too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, padding_idx=0).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, ids):
        return self.head(self.table(ids).amax(1))


def train_on_texts(model, collate, first=4):
    train(model, Texts(first), collate_fn=collate, expected_batch_size=4)


def test_padding_that_a_program_has_registered_with_torch_is_refused(monkeypatch):
    def pad(rows, *, collate_fn_map):
        return pad_sequence(rows, batch_first=True)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, pad)
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        train_on_texts(Pooled(), None)


def test_a_gradient_from_the_padding_alone_is_refused():
    """Losses are zero, and so is the gradient of a text without padding."""

    class OfPadding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3).double())

        def forward(self, ids):
            zero = (self.weight - self.weight.detach())[None]
            return (ids == 99).sum(1, keepdim=True) * zero

    def collate(rows):
        ids = [ids for ids, _ in rows]
        return pad_sequence(ids, batch_first=True, padding_value=99), padded(rows)[1]

    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        train_on_texts(OfPadding(), collate)


def test_a_list_of_records_as_long_as_the_batch_is_no_mixing():
    class OfLists(Pooled):
        def forward(self, texts):
            return torch.cat([super(OfLists, self).forward(ids[None]) for ids in texts])

    train_on_texts(OfLists(), collate_lists)


def test_a_list_of_series_as_long_as_the_batch_is_no_mixing():
    """Numbers of public rows are scaled row by row, and a series has as many rows as the batch."""

    class OfSeries(Pooled):
        def forward(self, series):
            return torch.stack([self.head(steps).tanh().mean(0) for steps in series])

    def listed_series(rows):
        ids, labels = collate_lists(rows)
        return [x[:, None] * torch.ones(4).double() for x in ids], labels

    model = OfSeries()
    model.table.requires_grad_(False)
    train_on_texts(model, listed_series)


class Counting(Inner):
    """Scale by the number of examples, or of passes, that a module has counted."""

    def __init__(self, counts_examples):
        super().__init__(lambda h: h)
        self.counts_examples, self.count = counts_examples, 0

    def forward(self, x):
        self.count += len(x) if self.counts_examples else 1
        return super().forward(x) * (1 + self.count / 10)


def test_a_module_may_count_passes_and_not_examples():
    train(Counting(False), rows(), sine_loss)
    refused = open_session(Counting(True), rows())
    assert_refused(refused, "the loss of a row in a batch of 16 differs", sine_loss)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_every_row_is_kept_while_any_other_row_is_replaced(size):
    pairs = set()
    for _, kept, batch in split_rows(size):
        replaced = [i for i in range(size) if batch[i] != i]
        assert sorted(kept + replaced) == list(range(size))
        assert all(batch[i] == i + size for i in replaced)
        pairs |= {(k, r) for k in kept for r in replaced}
    assert pairs == {(k, r) for k in range(size) for r in range(size) if k != r}


@pytest.mark.parametrize(
    ("one", "other", "dtype", "differ"),
    [
        (100.0, 101.0, torch.float32, False),
        (100.0, 102.0, torch.float32, True),
        (100.0, 105.2, torch.bfloat16, False),
        (100.0, 106.0, torch.bfloat16, True),
        (1e-3, 0.0, torch.float32, True),
        (0.0, 0.0, torch.float32, False),
    ],
)
def test_gradients_differ_by_more_than_the_rounding_of_their_type(one, other, dtype, differ):
    direction = torch.tensor([0.6, 0.8], dtype=torch.float64)
    dtypes = {torch.float64, dtype}
    assert gradients_differ(one * direction, other * direction, dtypes) == differ
    assert gradients_differ(other * direction, one * direction, dtypes) == differ


def test_constant_numbers_are_numbers_that_could_have_been_drawn():
    with ConstantNumbers():
        assert sorted(torch.randperm(5).tolist()) == list(range(5))
        assert 0 <= float(torch.rand(())) < 1
        assert 3 <= float(torch.empty(()).uniform_(3, 4)) < 4
        assert torch.randint(2, 5, ()) in (2, 3, 4)
        assert torch.zeros((), dtype=torch.int64).random_(3, 9) in range(3, 9)
        x = torch.tensor([-2.0, 3.0], requires_grad=True)
        y = F.rrelu(x, 0.5, 0.7, training=True)
        (slopes,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, torch.tensor([-1.2, 3.0]))
    torch.testing.assert_close(slopes, torch.tensor([0.6, 1.0]))


def test_a_check_that_does_not_fit_is_made_of_half_of_the_rows_down_to_two(monkeypatch):
    tried = []

    def judge(passes, attempts, expected):
        tried.append(passes.max_rows)
        if len(tried) > 9:
            pytest.fail("tried without end")
        raise MemoryError

    monkeypatch.setattr(check_module, "_judge", judge)
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="needs two examples in memory"):
        check_module.check_on_public_rows(model, find_layers(model), None, [], expected=4)
    assert tried == [8, 4, 2]


def test_a_collate_function_that_draws_numbers_runs_and_one_that_mixes_is_refused():
    """Losses that depend on drawn numbers stand for no other pass."""
    data = TensorDataset(*rows())

    def noisy(records, mix=0.0):
        (x,) = default_collate(records)
        return (x + 0.1 * torch.randn_like(x) - mix * x.mean(0),)

    with open_session(nn.Linear(3, 3).double(), data, collate_fn=noisy) as session:
        session.step(next(session.batches()), sine_loss)
    mixing = open_session(nn.Linear(3, 3).double(), data, collate_fn=partial(noisy, mix=0.5))
    assert_refused(mixing, "mixes", sine_loss)


def test_an_error_that_is_raised_once_is_not_lost():
    """FSDP refuses weights that are tied across its parts at the first pass alone."""
    passed = Heard()

    def loss(model, batch):
        passed.append(len(batch[0]))
        if len(passed) == 1:
            raise RuntimeError("weights are tied across parts")
        return sine_loss(model, batch)

    session = open_session(
        nn.Linear(3, 3).double(), rows(), public_records=[(x,) for x in rows()[0]]
    )
    assert_refused(session, "weights are tied across parts", loss)


class Reread(nn.Module):
    """A head that reads a table with a row of padding by a function."""

    def __init__(self, **padding):
        super().__init__()
        self.words = nn.Embedding(5, 3, dtype=torch.float64, **padding)

    def forward(self, ids):
        return F.linear(self.words(ids).mean(1), self.words.weight)


def test_a_row_of_padding_that_a_function_reads_too_is_refused():
    """No step moves the row, though examples have gradients in it."""
    ids = (torch.randint(5, (24, 4)),)
    assert_refused(open_session(Reread(padding_idx=0), ids), "has padding_idx=0, and", sine_loss)
    train(Reread(), ids, sine_loss, steps=1)
