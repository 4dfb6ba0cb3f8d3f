"""What a tracked pass knows of tensors that are written into, read, copied and covered."""

import copy
import gc
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.nn.utils.rnn import pack_padded_sequence

from dpkfc.tracking import batch_rules as rule_table
from dpkfc.tracking import rule_application
from dpkfc.tracking.batch_rules import register_batch_rule
from dpkfc.tracking.modes import follow
from dpkfc.tracking.states import PARAMETRIC, BatchAxis, Total, Unknown, example_first
from dpkfc.tracking.tracker import Tracker

N, T, D = 3, 4, 2


def follow_rows(*shape):
    """A tracker, and random rows of examples that it knows."""
    tracker, x = Tracker(shape[0]), torch.rand(*shape)
    tracker.set_state(x, BatchAxis(0))
    return tracker, x


def lengths_of(x):
    """Return a private one for each row of an [N, T] tensor."""
    return (x[:, 0] < 9).long()


def test_a_write_into_a_part_makes_the_buffer_and_its_views_batched():
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        buffer = torch.zeros(N, T, D)
        before = buffer.transpose(0, 1)
        buffer[:, 1] = x
        after = buffer[:, 2:]
    assert tracker.state(buffer) == BatchAxis(0)
    assert tracker.state(before) == BatchAxis(1)
    assert tracker.state(after) == BatchAxis(0)


def _foreach(t, x):
    torch._foreach_mul_([t], [x])


def _write_column(t, x):
    t[:, 0] = x[:, 0]


def _write_flat(t, x):
    t.view(-1)[:] = x.reshape(-1)


def _write_at_columns(t, x):
    t[:, torch.tensor([0])] = x[:, :1]


def _write_at_places(t, x):
    t[torch.arange(N), 0] = x[:, 0]


# Each leaves something of the old rows of `t`, where there is room for it.
PARTIAL_WRITES = [
    lambda t, x: t.add_(x),
    lambda t, x: t.mul_(x),
    lambda t, x: t.masked_fill_(x > 0.5, 0.0),
    lambda t, x: t.lerp_(x, 0.5),
    lambda t, x: t.addcmul_(x, x),
    lambda t, x: t.scatter_(1, torch.zeros(N, 1, dtype=torch.long), x),
    lambda t, x: t.select(1, 0).copy_(x[:, 0]),
    lambda t, x: torch.add(t, x, out=t),
    _foreach,
    _write_column,
    _write_at_columns,
    _write_at_places,
]


def _follow_write(write, table):
    """Return the state of a public table behind a write of the examples into it."""
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        target = table.clone()
        write(target, x)
        result = target.mul(1.0)
    return tracker.state(result)


@pytest.mark.parametrize("write", PARTIAL_WRITES)
def test_examples_written_beside_the_rows_of_their_places_are_unknown(write):
    assert isinstance(_follow_write(write, torch.arange(N * D).view(N, D).float()), Unknown)


@pytest.mark.parametrize("write", [w for w in PARTIAL_WRITES if w is not _foreach])
def test_examples_written_into_equal_rows_are_batched(write):
    table = torch.tensor([[1.0, 2.0]]).repeat(N, 1)
    assert _follow_write(write, table) == BatchAxis(0)


@pytest.mark.parametrize("write", [lambda t, x: t.copy_(x), _write_flat])
def test_rows_of_places_that_are_written_over_are_gone(write):
    table = torch.zeros(N, D) if write is _write_flat else torch.arange(N * D).view(N, D).float()
    assert _follow_write(write, table) == BatchAxis(0)


def test_rows_into_which_others_are_written_are_unknown():
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        rows = x.mul(1.0)
        rows[:, 1:].copy_(x.flip(0)[:, 1:])
        result = rows.mul(1.0)
    assert isinstance(tracker.state(rows), Unknown)
    assert isinstance(tracker.state(result), Unknown)


@pytest.mark.parametrize("share", [lambda t: t.data, torch.Tensor.detach])
def test_others_written_into_memory_that_rows_share_are_a_failure(share):
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        share(x.mul(1.0)).copy_(x.flip(0))
    assert tracker.failure is not None


def test_unfilled_memory_takes_the_examples_part_by_part():
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        buffer = torch.empty(N, D)
        buffer[:, 0] = x[:, 0]
        buffer[:, 1] = x[:, 1]
    assert tracker.state(buffer) == BatchAxis(0)
    assert torch.equal(buffer, x)


def test_outputs_given_in_a_list_depend_on_the_examples():
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        parts = [torch.empty(N, 1), torch.empty(N, 1)]
        torch.split_with_sizes_copy(x, [1, 1], 1, out=parts)
        mean = parts[0].mean(0)
    assert isinstance(tracker.state(parts[1]), Unknown)
    assert isinstance(tracker.state(mean), Unknown)


def test_a_view_of_a_view_sees_a_later_write_into_the_base():
    tracker, x = follow_rows(N, T, D)
    with follow(tracker):
        buffer = torch.zeros(N, T, D)
        nested = buffer[:, 0][:, 1:]
        buffer.copy_(x)
    assert tracker.state(nested) == BatchAxis(0)


def test_a_write_along_another_axis_makes_every_view_unknown():
    tracker, x = follow_rows(N, N)
    with follow(tracker):
        buffer = torch.zeros(N, N)
        view = buffer[:, 1:]
        buffer.copy_(x)
        buffer.add_(x.t())
    assert isinstance(tracker.state(buffer), Unknown)
    assert isinstance(tracker.state(view), Unknown)


def test_a_view_whose_base_mixes_examples_is_unknown_beside_other_examples():
    """The view has one column for all rows of `y`, and it holds every example."""
    tracker, x, y = Tracker(N), torch.rand(N, N), torch.rand(N, N)
    tracker.set_state(x, BatchAxis(0))
    tracker.set_state(y, BatchAxis(1))
    with follow(tracker):
        buffer = torch.zeros(N, N)
        buffer.copy_(x)
        view = buffer[:, :1]
        buffer.add_(x.t())
        z = y + view
    assert isinstance(tracker.state(z), Unknown)


@pytest.mark.parametrize(("start", "state"), [(N, BatchAxis(0, pre=2)), (1, None)])
def test_a_write_beside_the_places_of_the_examples_is_unknown(start, state):
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        buffer = torch.zeros(2 * N, D)
        buffer[start : start + N] = x
    if state is None:
        assert isinstance(tracker.state(buffer), Unknown)
    else:
        assert tracker.state(buffer) == state


def test_a_parameter_without_values_depends_on_no_example():
    tracker = Tracker(N)
    with follow(tracker):
        weight = torch.nn.parameter.UninitializedParameter()
        assert weight.requires_grad
    assert tracker.state(weight) is None


def _copy(buffer, x):
    buffer.copy_(x)


def _copy_into_view(buffer, x):
    buffer[:, 1:].copy_(x[:, 1:])


def _copy_into_detached(buffer, x):
    buffer.detach().copy_(x)


def _copy_into_data(buffer, x):
    buffer.data.copy_(x)


def _store_as_data(buffer, x):
    buffer.data = x


def _average_by_batch_norm(buffer, x):
    F.batch_norm(x, buffer[0], buffer[1].abs() + 1, training=True)


@pytest.mark.parametrize(
    "write",
    [
        _copy,
        _copy_into_view,
        _copy_into_detached,
        _copy_into_data,
        _store_as_data,
        _average_by_batch_norm,
    ],
)
def test_a_write_into_a_tensor_that_outlives_the_pass_is_a_failure(write):
    x, buffer = torch.rand(N, T), torch.zeros(N, T)
    tracker = Tracker(N, persistent=[buffer])
    tracker.set_state(x, BatchAxis(0))
    with follow(tracker):
        write(buffer, x)
    assert tracker.failure is not None


def test_running_statistics_of_an_instance_norm_are_a_failure():
    mean, variance = torch.zeros(T), torch.ones(T)
    x, tracker = torch.rand(N, T, 5), Tracker(N, persistent=[mean, variance])
    tracker.set_state(x, BatchAxis(0))
    with follow(tracker):
        y = F.instance_norm(x, mean, variance)
    assert tracker.state(y) == BatchAxis(0)
    assert tracker.failure is not None


@pytest.mark.parametrize("share", [torch.Tensor.detach, lambda x: x.data])
def test_a_write_into_shared_memory_is_a_failure(share):
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        buffer = torch.zeros(N, T)
        shared = share(buffer)
        buffer.copy_(x)
    assert shared is not None
    assert tracker.failure is not None


def test_a_write_in_inference_mode_is_a_failure():
    tracker, x = follow_rows(N, T)
    with follow(tracker), torch.inference_mode():
        torch.zeros(N, T)[:, 1:].copy_(x[:, 1:])
    assert tracker.failure is not None


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0, 0].item(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: float(x.sum()),
        lambda x: x.sum().tolist(),
        lambda x: x.mean().numpy(),
        lambda x: setattr(torch.zeros(()), "data", x.sum()),
        lambda x: torch.equal(x, x + 1),
        lambda x: copy.deepcopy(x),
        lambda x: str(x),
        lambda x: f"{x}",
        lambda x: x.apply_(lambda value: value),
        lambda x: torch.zeros(N, T).map_(x, lambda _, value: value),
        lambda x: x.untyped_storage(),
        lambda x: x.nonzero().shape,
        lambda x: x[x > 0.5].shape,
        lambda x: torch.masked_select(x, x > 0.5).shape,
        lambda x: (x * 9).long().unique().shape,
        lambda x: (x > 0.5).to_sparse().indices().shape,
        lambda x: pack_padded_sequence(x, 1 + (x[:, 0] * T).long(), True, False).data.shape,
        lambda x: torch._ctc_loss(x[None], lengths_of(x)[:, None], lengths_of(x), lengths_of(x)),
        lambda x: x.grad_fn,
        lambda x: torch.arange(9)[[[(x[0, 0] * 9).long()]]],
        lambda x: torch.arange(9).__setitem__([[(x[0, 0] * 9).long()]], 1),
        lambda x: x.new((x[0, 0], x[1, 0])),
    ],
)
def test_values_that_leave_torch_are_a_failure(read):
    """What `F.ctc_loss` does not return has a shape that follows the lengths."""
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        read(x)
    assert tracker.failure is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.linalg.cholesky(-x[:, :, None] * x[:, None]),
        lambda x: torch.multinomial(-x, 1),
        lambda x: torch.bernoulli(x + 2),
        lambda x: torch.bernoulli(x.sum() + 2),
        lambda x: Normal(x, -1 - x, validate_args=True),
        lambda x: F.binary_cross_entropy(x + 2, torch.zeros(N, T)),
        lambda x: F.one_hot((x + 7).long(), 5),
        lambda x: F.embedding((x + 7).long(), torch.zeros(5, 2)),
        lambda x: torch.zeros(5)[(x + 7).long()],
        lambda x: torch.vmap(lambda row: torch.linalg.cholesky(-torch.diag(row)))(x),
    ],
)
def test_values_that_an_operation_refuses_are_a_failure(call):
    """The program may catch the error and go on in another way, for all examples."""
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            call(x)
    assert tracker.failure is not None


def test_values_that_an_operation_refuses_may_be_public():
    tracker = Tracker(N)
    with follow(tracker), pytest.raises(RuntimeError):
        torch.bernoulli(torch.zeros(N, T) + 2)
    assert tracker.failure is None


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.shape[0],
        lambda x: len(x),
        lambda x: x.detach(),
        lambda x: x[:, torch.tensor([True, False, True, False])],
        lambda x: F.one_hot((x * 4).long(), 5),
        lambda x: F.ctc_loss(x[None], lengths_of(x)[:, None], lengths_of(x), lengths_of(x)),
        lambda x: Normal(x, 1 + x, validate_args=True).log_prob(x),
        lambda x: x[torch.arange(N), [0, 1, 2]],
        lambda x: torch.zeros(N, T).nonzero().shape,
        lambda x: x.new(),
    ],
)
def test_shapes_and_public_values_may_be_read(read):
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        read(x)
    assert tracker.failure is None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([x[0, 0], x[1, 0]]),
        lambda x: torch.as_tensor([[x[0, 0]], [x[1, 0]]]),
        lambda x: torch.Tensor([x[0, 0], 1.0]),
        lambda x: torch.FloatTensor([x[0, 0]]),
        lambda x: x.new_tensor([x[0, 0], 1.0]),
        lambda x: torch.tensor([x.sum()]),
        lambda x: torch.Tensor([x.sum()]),
    ],
)
def test_tensors_made_of_single_values_are_unknown(make):
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        made = make(x)
    assert isinstance(tracker.state(made), Unknown)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: x * torch.rand(N, 1, generator=g),
        lambda x, g: x * torch.zeros(N, 1).bernoulli_(0.5, generator=g),
        lambda x, g: torch.bernoulli(x, generator=g),
        lambda x, g: torch.normal(x, 1.0, generator=g),
        lambda x, g: x.clone().uniform_(generator=g),
    ],
)
def test_numbers_of_a_generator_of_the_program_belong_to_places(draw):
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        known = draw(x, torch.Generator().manual_seed(0))
        unknown = draw(x, None)
    assert isinstance(tracker.state(known), Unknown)
    assert tracker.state(unknown) == BatchAxis(0)


def test_tensors_made_of_public_values_are_public():
    tracker, x = Tracker(N), torch.rand(N, T)
    tracker.declare_batch(x)
    with follow(tracker):
        made = torch.tensor([1.0, 2.0])
    assert tracker.state(made) is None


def test_tensors_made_of_values_of_an_opaque_batch_are_unknown():
    tracker = Tracker(N)
    tracker.declare_batch({"x": torch.rand(N, T), "names": ["a", "b", "c"], "nothing": None})
    with follow(tracker):
        made = torch.tensor([1.0, 2.0])
    assert isinstance(tracker.state(made), Unknown)


def test_a_batch_tensor_without_the_examples_in_front_is_unknown():
    tracker, x, y = Tracker(N), torch.rand(N, T), torch.rand(N + 1)
    tracker.declare_batch([x, y])
    assert tracker.state(x) == BatchAxis(0)
    assert isinstance(tracker.state(y), Unknown)


def test_what_a_covered_layer_computes_inside_is_unknown_outside():
    tracker, x, weight = Tracker(N), torch.rand(N, T), torch.rand(D, T, requires_grad=True)
    tracker.set_state(x, BatchAxis(0))
    tracker.declare_parameters([weight])
    with follow(tracker):
        tracker.cover([weight])
        inside = weight * 2
        hidden = F.linear(x, inside)
        y = hidden.relu()
        tracker.uncover([weight], [y])
        assert tracker.state(y) == BatchAxis(0)
        assert isinstance(tracker.state(hidden), Unknown)
        assert tracker.state(inside) is PARAMETRIC
        assert isinstance(tracker.state(y * weight.sum()), Unknown)


def test_a_parameter_outside_its_layer_makes_the_result_unknown():
    tracker, x, weight = Tracker(N), torch.rand(N, T), torch.rand(T, requires_grad=True)
    tracker.set_state(x, BatchAxis(0))
    tracker.declare_parameters([weight])
    with follow(tracker):
        y = x * weight
        z = weight * 2
    assert isinstance(tracker.state(y), Unknown)
    assert tracker.state(z) is PARAMETRIC


def test_a_paused_tracker_follows_nothing():
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        tracker.pause()
        y = x * 2
        tracker.resume()
    assert tracker.state(y) is None
    assert tracker.state(x) == BatchAxis(0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: torch.rand(N, 1, generator=g),
        lambda x, g: torch.bernoulli(x, generator=g),
        lambda x, g: torch.empty_like(x).uniform_(generator=g),
        lambda x, g: x.clone().normal_(generator=g),
    ],
)
def test_numbers_of_another_generator_belong_to_no_example(draw):
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        y = x * draw(x, torch.Generator())
    assert isinstance(tracker.state(y), Unknown)


def _load(x):
    content = io.BytesIO()
    torch.save(x, content)
    content.seek(0)
    return torch.load(content, weights_only=True)


@pytest.mark.parametrize(
    ("make", "is_followed"),
    [
        (nn.Parameter, True),
        (lambda x: nn.Parameter(x, requires_grad=False), True),
        (lambda x: nn.ParameterList([x])[0], True),
        (lambda x: torch.Tensor._make_subclass(torch.Tensor, x), True),
        (lambda x: x.as_subclass(torch.Tensor), True),
        (lambda x: x.data, True),
        (torch.from_dlpack, True),
        (lambda x: torch.from_dlpack(x[1:]), False),
        (lambda x: nn.Parameter(x.t()).data.t(), True),
        (lambda x: torch.from_numpy(x.numpy()), False),
        (lambda x: torch.from_numpy(x.numpy()[1:]), False),
        (lambda x: torch.frombuffer(memoryview(x.numpy()[1:]), dtype=x.dtype), False),
        (lambda x: x.new_empty(0).set_(x.untyped_storage(), 1, (N - 1, T), (T, 1)), False),
        (_load, False),
    ],
)
def test_a_tensor_that_no_operation_made_has_the_state_of_its_memory(make, is_followed):
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        rows = x * 2
        alias, alias_of_mean = make(rows), make(rows.mean(0, keepdim=True).expand(N, T) + 0)
        del rows
        both = alias * 2, alias_of_mean * 2
    states = [tracker.state(y) for y in (alias, both[0])]
    if is_followed:
        assert states == [BatchAxis(0)] * 2
    else:
        assert all(isinstance(state, Unknown) for state in states)
    assert all(isinstance(tracker.state(y), Unknown) for y in (alias_of_mean, both[1]))


def test_memory_that_examples_have_left_is_public():
    tracker, x = follow_rows(N, T)
    public = torch.from_numpy(np.ones(T, dtype=np.float32))
    with follow(tracker):
        kept = nn.Parameter((x * 2).mean(0))
        address = kept.data_ptr()
        assert address in tracker._memories
        del kept
        z = x * public
    assert address not in tracker._memories
    assert tracker.state(z) == BatchAxis(0) and tracker.state(public) is None


def test_tensors_that_wrap_others_are_followed():
    tracker, x = follow_rows(N, T)
    with follow(tracker):
        y = torch.func.vmap(torch.func.grad(lambda row: row.detach().data.sin() @ row))(x)
    torch.testing.assert_close(y, x.sin())


def test_memory_of_an_earlier_batch_is_unknown_in_the_next():
    tracker, x = follow_rows(N, T)
    tracker.declare_earlier_batches()
    with follow(tracker):
        left = nn.Parameter(x.mean(0))
        rows = nn.Parameter(x * 2)
    after = Tracker(N)
    after.declare_earlier_batches()
    for y in (left, rows):
        assert isinstance(after.state(y), Unknown)
    later = Tracker(N)
    later.declare_earlier_batches()
    assert isinstance(later.state(left), Unknown)


def test_a_freed_tensor_leaves_no_state_behind():
    tracker = Tracker(N)
    tracker.set_state(torch.rand(N), BatchAxis(0))
    with follow(tracker):
        torch.zeros(N).detach()
    assert not tracker._states
    assert not tracker._references
    assert not tracker._aliases
    assert not tracker._memories


SOURCE = """
def _ignore_causal_mask_sdpa(read, x):
    return read(x)
"""


@pytest.mark.parametrize(
    "is_own", [True, False], ids=["a user's function reads", "the listed function reads"]
)
def test_a_read_is_harmless_only_inside_the_listed_function(is_own):
    """Nothing that a listed function calls of a user's may read values of the examples."""
    space = {"__name__": "transformers.masking_utils"}
    exec(
        SOURCE.replace("return read(x)", "return read(x)" if is_own else "return bool(x.any())"),
        space,
    )
    tracker, x = follow_rows(N, D)
    with follow(tracker):
        space["_ignore_causal_mask_sdpa"](lambda y: bool(y.any()), x)
    assert (tracker.failure is not None) == is_own


@pytest.mark.parametrize(
    ("in_place", "plain"),
    [
        (lambda t: t.mul_(2), lambda t: t * 2),
        (lambda t: t.div_(4), lambda t: t / 4),
        (lambda t: t.neg_(), lambda t: -t),
    ],
)
def test_a_total_in_place_is_that_of_the_plain_operation(in_place, plain):
    tracker, x = follow_rows(N)
    with follow(tracker):
        first = in_place(x.sum())
        second = plain(x.sum())
    assert isinstance(tracker.state(first), Total)
    assert tracker.state(first) == tracker.state(second)


def test_a_rule_of_the_user_decides_and_must_name_every_output(monkeypatch):
    with torch.library._scoped_library("dpkfc_test", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: (x / 2, x / 2), "CompositeExplicitAutograd")
        copied = dict(rule_table.RULES)
        for module in (rule_table, rule_application):
            monkeypatch.setattr(module, "RULES", copied)
        rules = {
            "none": None,
            "full": lambda operation: [operation.axis(operation.args[0])] * 2,
            "short": lambda operation: [operation.axis(operation.args[0])],
            "broken": lambda operation: operation.args[7],
        }
        states = {}
        for name, rule in rules.items():
            if rule is not None:
                register_batch_rule("dpkfc_test::halves", rule)
            tracker, x = follow_rows(N, D)
            with follow(tracker):
                states[name] = list(map(tracker.state, torch.ops.dpkfc_test.halves(x)))
    assert states["full"] == [BatchAxis(0)] * 2
    for name in ("none", "short", "broken"):
        assert all(isinstance(state, Unknown) for state in states[name])


def test_examples_come_first_whatever_their_number_is():
    """The padding check compares the output of one example with that of two, by one axis."""
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(example_first(x, BatchAxis(1), 2), x.T)


@pytest.mark.parametrize(("pre", "post"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_dimensions_around_the_examples_appear_where_they_are_longer_than_one(pre, post):
    x = torch.arange(pre * N * post * 5.0).view(pre * N * post, 5)
    rows = example_first(x, BatchAxis(0, pre, post), N)
    around = [size for size in (pre, post) if size > 1]
    assert torch.equal(rows, x.view(pre, N, post, 5).transpose(0, 1).reshape(N, *around, 5))


class CollectedMeanwhile(dict[int, Any]):
    """A dictionary while whose items are read garbage is collected."""

    def items(self):
        for place, pair in enumerate(super().items()):
            if place == 1:
                gc.collect()
            yield pair


def test_a_collection_meanwhile_does_not_disturb_the_next_batch():
    first = Tracker(2)
    first.declare_earlier_batches()
    for _ in range(5):
        x = torch.zeros(2)
        cycle = [x]  # only a collection frees it
        cycle.append(cycle)
        first.set_state(x, BatchAxis(0))
    del x, cycle
    first._references = CollectedMeanwhile(first._references)
    Tracker(2).declare_earlier_batches()
