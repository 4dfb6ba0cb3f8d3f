"""A batch that the private loader has handed out to be trained on cannot be left out, whatever the
loop does.
"""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.opacus_cases import B, N, backward, cut, data, loader, private, train
from tests.mutation_cases import weights

MARK = 50.0


def mark_example():
    """A loader over data of which example 0 can be recognised."""
    x, y = data().tensors
    x = x.clone()
    x[0, 0] = MARK
    return DataLoader(TensorDataset(x, y), batch_size=B)


def bad(x):
    return bool(len(x)) and float(x.max()) >= MARK


def skip_in_evaluation_mode(model, optimizer, batches, seen):
    for x, y in batches:
        model.eval()
        if bad(x):
            continue
        model.train()
        backward(model, (x, y))
        optimizer.step()
        seen.append(bad(x))


def skip_as_a_new_pass(model, optimizer, batches, seen):
    for x, y in batches:
        if bad(x):
            return
        backward(model, (x, y))
        optimizer.step()
        seen.append(bad(x))


def skip_by_an_error_in_the_step(model, optimizer, batches, seen):
    for x, y in batches:
        out = model(x)
        if bad(x):
            torch.nn.functional.cross_entropy(model(x), y).backward()  # makes the step fail
        torch.nn.functional.cross_entropy(out, y).backward()
        try:
            optimizer.step()
            seen.append(bad(x))
        except RuntimeError:
            optimizer.zero_grad()


def skip_a_part(model, optimizer, batches, seen):
    with cut(batches, optimizer, 2) as physical:
        for x, y in physical:
            if bad(x):
                return
            backward(model, (x, y))
            optimizer.step()
            seen.append(bad(x))


WAYS = [
    skip_in_evaluation_mode,
    skip_as_a_new_pass,
    skip_by_an_error_in_the_step,
    skip_a_part,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_no_batch_is_chosen_by_its_content(way):
    """Nothing is released any more once a batch with the marked example was drawn and left out."""
    engine, model, optimizer, batches = private(
        data_loader=mark_example(), noise_multiplier=0.5, max_grad_norm=1.0
    )
    seen = []
    counts = []
    for _ in range(12):
        try:
            way(model, optimizer, batches, seen)
        except RuntimeError:
            model.train()
        counts.append(engine.ledger.count)
    assert not any(seen)
    # each pass begins with the batch that is missing: no other takes its place
    assert counts[-1] == counts[-4]
    assert counts[-1] < 12 * (N // B) // 2
    model.train()
    x, y = next(iter(batches))
    # The script has seen this batch, and may train on no other in its place.
    assert bad(x)
    assert train(model, optimizer, [(x, y)]) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_begins_with_the_batch_that_the_last_one_left(workers):
    clean, mine = (
        private(data_loader=loader(num_workers=workers), noise_multiplier=0.5) for _ in range(2)
    )
    train(*clean[1:])
    _, model, optimizer, batches = mine
    stream = iter(batches)
    backward(model, next(stream))
    optimizer.step()
    left = next(stream)
    again = next(iter(batches))
    assert torch.equal(left[0], again[0]) and torch.equal(left[1], again[1])
    train(model, optimizer, batches, N // B - 1)
    assert mine[0].ledger.count == N // B
    if not workers:  # which draw ahead what a broken loop never hands out
        assert torch.equal(weights(model), weights(clean[1]))


def test_a_look_at_the_data_costs_no_batch_of_the_plan():
    """One batch taken out to look at its shape is the first of the training; evaluation owes
    nothing.
    """
    engine, model, optimizer, batches = private()
    first = next(iter(batches))
    model.eval()
    assert sum(len(x) for x, _ in batches) > 0
    model.train()
    found = []
    for x, y in batches:
        found.append(x)
        backward(model, (x, y))
        optimizer.step()
    assert torch.equal(found[0], first[0]) and len(found) == N // B == engine.ledger.count
    model.eval()
    assert not any(torch.equal(x, first[0]) for x, _ in batches)


def test_a_step_beside_the_missing_batch_is_refused():
    engine, model, optimizer, batches = private()
    next(iter(batches))
    model.eval()
    stream = iter(batches)
    next(stream)
    other = next(stream)
    model.train()
    backward(model, other)
    with pytest.raises(
        RuntimeError, match="an earlier batch of the private loader was never stepped"
    ):
        optimizer.step()
    assert train(model, optimizer, batches) == N // B == engine.ledger.count
