"""Modules without a rule: attention, encoders and whatever a user may write, against a loop in
float64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from tests.gradients.loop import assert_equals_a_loop, loss_fn, record_gradients
from tests.models import randn
from tests.sessions import open_session

# as many positions as examples: a mask [T, T] must not be taken for one row an example
N, T, D = (
    4,
    4,
    4,
)


# -- attention -------------------------------------------------------------------------------------


def test_attention_whose_batch_is_not_where_it_says():
    model = nn.MultiheadAttention(D, 2).double()
    x = randn(3, 5, D)
    with pytest.raises(ValueError, match="MultiheadAttention hides the batch axis"):
        record_gradients(model, lambda m, b: m(b, b, b)[0].sum((1, 2)), x, 3)
    with pytest.raises(ValueError, match="hides the batch axis"):
        record_gradients(model, lambda m, b: m(b, b, b)[0].sum(1), x[:, 0], 3)


# -- modules a user may write ----------------------------------------------------------------------


def test_bags_of_ids_with_offsets_are_refused():
    """One list of ids for the whole batch: no argument says which of them are whose until it is
    read.
    """
    model = nn.EmbeddingBag(6, 3).double()
    ids, offsets = torch.randint(0, 6, (9,)), torch.tensor([0, 2, 3, 7])
    with pytest.raises(ValueError, match="offsets count from the beginning of the batch"):
        record_gradients(model, loss_fn, (ids, offsets), N)


@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_of_all_modules_leave_each_example_its_gradient(is_before):
    """They see outputs before the tape does, so that no pass of several examples is proved."""

    def change(module, args, *output):
        if not isinstance(module, nn.Linear):
            return None
        return 0.5 * output[0].sin() if output else (args[0].exp(),)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    hooks = nn.modules.module
    add_hook = hooks.register_module_forward_pre_hook if is_before else None
    handle = (add_hook or hooks.register_module_forward_hook)(change)
    settings = {"expected_batch_size": 4, "steps": 1, "sampler": "fixed", "max_grad_norm": 0.1}
    try:
        x = torch.randn(6, 3)
        expected = []
        for row in x:
            model.zero_grad()
            loss_fn(model, (row[None],)).sum().backward()
            g = torch.cat([p.grad.flatten() for p in model.parameters()])
            expected.append(g * min(1.0, 0.1 / float(g.norm())))
        before = parameters_to_vector(model.parameters()).detach()
        with open_session(model, (x,), 0.0, lr=1.0, **settings) as session:
            batch = next(session.batches())
            session.step(batch, loss_fn)
    finally:
        handle.remove()
    change_of_weights = 4 * (before - parameters_to_vector(model.parameters()).detach())
    wanted = sum(expected[i] for i in batch.rows)
    torch.testing.assert_close(change_of_weights, wanted, atol=1e-6, rtol=0)


def test_under_autocast_inputs_are_narrower_than_the_parameters():
    model = nn.Sequential(
        nn.Linear(3, D), nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0, batch_first=True)
    )
    x = torch.randn(3, 5, 3)

    def cast(m, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return (m(*batch)[..., 0].float() - 2).square().sum(1)

    def plain(m, batch):
        return (m(*batch)[..., 0] - 2).square().sum(1)

    found, expected = (
        record_gradients(model, cast, (x,), 3),
        record_gradients(model, plain, (x,), 3),
    )
    for one, other in zip(found, expected, strict=True):
        for name, gradient in other.items():
            assert float((one[name] - gradient).norm()) <= 0.1 * float(gradient.norm()) + 0.05, name


# -- refusals --------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return F.dropout(x * self.gain, 0.5, self.training)


def test_randomness_that_no_module_declares_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), Noisy()).double()
    with pytest.raises(
        ValueError, match="Noisy hides the batch axis: it holds parameters and draws random numbers"
    ):
        record_gradients(model, loss_fn, (randn(N, 3),), N)
    batch = (randn(N, 3),)
    assert_equals_a_loop(model.eval(), batch)


class Read(nn.Module):
    """Uses its parameter in a way that cannot be followed, with another module behind."""

    def __init__(self, inner):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.randn(D)), inner

    def forward(self, x):
        return self.inner(x @ torch.diag(self.gain))


def test_dropout_inside_is_refused_by_name_and_without_effect_accepted():
    model = nn.Sequential(nn.Linear(3, D), Read(nn.Dropout(0.1))).double()
    batch = (randn(N, T, 3),)
    with pytest.raises(
        ValueError, match="Read hides the batch axis: it holds parameters and draws random numbers"
    ):
        record_gradients(model, loss_fn, batch, N)
    model[1].inner.p = 0.0  # what the message says
    assert_equals_a_loop(model, batch)


class Remembering(nn.Module):
    """Stores what it computes and counts its calls, as some attention modules do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(D, D))
        self.doubled = None
        self.calls = 0

    def forward(self, x):
        self.doubled = 2 * self.weight
        self.calls += 1
        return torch.einsum("ni,ij->nj", x, self.doubled).tanh()


def test_a_repeated_pass_leaves_no_trace_on_a_module():
    model = nn.Sequential(Remembering(), nn.Linear(D, 2, dtype=torch.float64))
    batch = (randn(N, D),)
    record_gradients(model, loss_fn, batch, N)
    inner = model[0]
    assert inner.calls == 1
    assert_close(inner.doubled, 2 * inner.weight)


class _Branching(nn.Module):
    """Reads a value of its input, which `vmap` cannot."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * self.weight
        if torch.is_grad_enabled() and float(torch.ones_like(y).sum()) > 1e9:
            y = -y
        return y


def test_a_log_line_about_a_module_that_cannot_be_vectorised_is_marked_private(caplog):
    assert_equals_a_loop(_Branching().double(), (randn(N, 3),))
    assert caplog.messages and all(
        message.startswith("PRIVATE, for your eyes only: module '") for message in caplog.messages
    )
