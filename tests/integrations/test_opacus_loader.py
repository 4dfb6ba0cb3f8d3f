"""The private loader and the memory manager: what is drawn, in what structure, and that cutting it
changes nothing.
"""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.integrations.opacus_cases import (
    B,
    N,
    clipped_sum,
    cnn,
    cut,
    data,
    make_scaled,
    mlp,
    private,
    train,
)
from tests.mutation_cases import kfac, weights

Pair = namedtuple("Pair", "x y")


class Rows(Dataset):
    """A dataset whose examples have some structure."""

    def __init__(self, wrap):
        self.wrap, self.data = wrap, data()

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.wrap(*self.data[i], i)


@pytest.mark.parametrize(
    "wrap, x_of",
    [
        (lambda x, y, i: (x, y), lambda b: b[0]),
        (lambda x, y, i: Pair(x, y), lambda b: b.x),
        (
            lambda x, y, i: {"x": x, "meta": {"name": f"row {i}", "weight": 1.0}, "y": [y, x]},
            lambda b: b["x"],
        ),
        (lambda x, y, i: x, lambda b: b),
    ],
)
def test_an_empty_batch_has_the_structure_of_any_other(wrap, x_of):
    _, model, optimizer, batches = private(
        data_loader=DataLoader(Rows(wrap), batch_size=1), verify=False
    )
    empty = full = None
    for batch in batches:
        empty, full = (batch, full) if len(x_of(batch)) == 0 else (empty, batch)
        if len(x_of(batch)):
            model(x_of(batch)).mean().backward()
        optimizer.step()
    assert type(empty) is type(full)
    assert x_of(empty).shape == (0, 6)
    if isinstance(full, dict):
        assert list(empty) == list(full)
        assert empty["meta"]["name"] == []
        assert empty["meta"]["weight"].shape == (0,)
        assert [x.shape[1:] for x in empty["y"]] == [x.shape[1:] for x in full["y"]]


def test_rows_of_tensors_come_as_the_loader_of_torch_stacks_them():
    class Own(TensorDataset):
        """Read row by row, as any class but torch's own."""

    x = torch.randn(N, 6)
    images = torch.randn(N, 2, 3).mT
    found = []
    for kind in (TensorDataset, Own):
        dataset = kind(x, torch.arange(N), torch.arange(N).bool(), images)
        loader = DataLoader(dataset, batch_size=1)
        _, model, optimizer, batches = private(mlp().float(), data_loader=loader)
        found.append([])
        for batch in batches:
            found[-1].append(batch)
            if len(batch[0]):
                model(batch[0]).mean().backward()
            optimizer.step()
    sizes = {len(batch[0]) for batch in found[0]}
    assert 0 in sizes and max(sizes) > 1
    for one, other in zip(*found, strict=True):
        assert type(one) is type(other) is list
        assert [y.dtype for y in one] == [y.dtype for y in other]
        assert [y.is_contiguous() for y in one] == [y.is_contiguous() for y in other]
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("container", [list, tuple])
def test_tensors_of_a_list_are_records_as_for_a_loader_of_torch(container):
    records = container(data().tensors[0])
    _, model, optimizer, batches = private(data_loader=DataLoader(records, batch_size=1))
    sizes = set()
    for x in batches:
        assert x.shape[1:] == (6,)
        sizes.add(len(x))
        if len(x):
            model(x).square().mean().backward()
        optimizer.step()
    assert {0, 1, 2} <= sizes


class Augmented(Dataset):
    """A dataset that draws from the global generator, as augmentation does."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.rand(6), i % 3


@pytest.mark.parametrize("test_mode_seed", [None, 0], ids=["secure", "test mode"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_snapshot_repeats_augmentation_in_test_mode_alone(workers, test_mode_seed):
    """Two passes begin with the memory of one loader: the generator of its workers, and the global
    one.
    """
    source = DataLoader(Augmented(), batch_size=B, num_workers=workers, generator=torch.Generator())
    _, model, _, batches = private(data_loader=source, test_mode_seed=test_mode_seed, verify=False)
    model.eval()
    states = torch.get_rng_state(), batches.generator.get_state()
    seen = []
    for _ in range(2):
        torch.set_rng_state(states[0])
        batches.generator.set_state(states[1])
        seen.append(torch.cat([x for x, _ in batches]).flatten())
    first, second = seen
    assert torch.equal(first[:6], second[:6]) == (test_mode_seed is not None)
    if test_mode_seed is None:
        assert torch.isin(first, second).sum() < 10  # float32 numbers meet by chance


# -- the memory manager ----------------------------------------------------------------------------


@pytest.mark.quick("scaled-*", "cnn-shape1-1")
@pytest.mark.parametrize("bound", [1, 3, 100])
@pytest.mark.parametrize("build, shape", [(mlp, (6,)), (cnn, (1, 8, 8)), (make_scaled, (6,))])
def test_physical_batches_give_what_one_big_batch_gives(build, shape, bound):
    results = []
    settings = {"preconditioner": kfac(every=1)} if build is mlp else {}
    settings |= {"data_loader": DataLoader(data(shape=shape), batch_size=B)}
    for is_cut in (False, True):
        engine, model, optimizer, batches = private(build(), noise_multiplier=0.5, **settings)
        if is_cut:
            with cut(batches, optimizer, bound) as physical:
                sizes = []
                for x, y in physical:
                    sizes.append(len(x))
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                assert max(sizes) <= bound
                assert bound == 100 or len(sizes) > N // B
        else:
            train(model, optimizer, batches)
        assert engine.ledger.count == N // B
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_a_step_inside_a_logical_batch_changes_nothing():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    engine, model, optimizer, batches = private(model, optimizer=optimizer, noise_multiplier=1.0)
    before = weights(model)
    with cut(batches, optimizer, 1) as physical:
        for x, y in physical:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if engine.ledger.count:
                break
            assert torch.equal(weights(model), before)
            assert not optimizer.state
            assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("way", ["break", "exception", "error in the step", "new loop inside"])
def test_an_unfinished_logical_batch_never_leaks(way):
    """Invariant 8: the release after an interruption is that of its own batch."""
    engine, model, optimizer, batches = private(max_grad_norm=1e-3)

    def interrupt():
        with cut(batches, optimizer, 1) as physical:
            for i, (x, y) in enumerate(physical):
                F.cross_entropy(model(x * 100), y).backward()
                if way == "error in the step" and i == 1:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if i == 1:
                    if way == "exception":
                        raise ZeroDivisionError
                    if way == "new loop inside":
                        next(iter(physical))
                    return

    if way in ("exception", "error in the step"):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            interrupt()
    else:
        interrupt()
    assert engine.ledger.count == 0
    before = weights(model)
    x, y = next(iter(batches))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    expected = 0.1 * clipped_sum(mlp(), (x, y), 1e-3) / B
    torch.testing.assert_close(before - weights(model), expected, rtol=1e-6, atol=1e-12)


def test_a_batch_left_behind_by_the_manager_cannot_be_stepped_outside():
    engine, model, optimizer, batches = private()
    with cut(batches, optimizer, 100) as physical:
        x, y = next(iter(physical))
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="without a new batch"):
        optimizer.step()
    assert engine.ledger.count == 0
