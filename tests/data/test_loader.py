"""Micro-batches hold the examples of a step, each once, in order, whatever the bound and the
workers.
"""

import contextlib
import copy
from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpkfc.data.loading import MicroBatches, split

X, Y = torch.arange(60.0).view(20, 3), torch.arange(20)


class Squares(Dataset):
    """Map-style: (i², i)."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(float(index**2)), index


@contextlib.contextmanager
def cut_batches(source, bound=None, **options):
    """Yield a function that loads the micro-batches of at most `bound` examples."""
    batches = MicroBatches(source, **options)
    yield lambda indices: batches.load(split(indices, bound))
    batches.close()


def double(examples):
    return 2 * torch.stack([x for x, _ in examples])


@given(st.lists(st.integers(0, 99), max_size=50), st.none() | st.integers(1, 60))
def test_parts_are_bounded_nearly_equal_and_lose_nothing(indices, bound):
    parts = split(indices, bound)
    assert [i for part in parts for i in part.tolist()] == indices
    if not indices:
        assert parts == []
        return
    sizes = [part.size for part in parts]
    assert max(sizes) <= (bound or len(indices))
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-len(indices) // (bound or len(indices)))


@pytest.mark.parametrize("source", [(X, Y), [X, Y], TensorDataset(X, Y)])
def test_tensors_are_indexed_at_once(source):
    with cut_batches(source, 3) as micro:
        batches = list(micro(np.array([4, 9, 1, 19])))
    assert [len(b) for b in batches] == [2, 2]
    assert torch.equal(torch.cat([x for x, _ in batches]), X[[4, 9, 1, 19]])
    assert torch.equal(torch.cat([y for _, y in batches]), torch.tensor([4, 9, 1, 19]))
    # As public rows are, and as torch's own loader gives them.
    assert all(isinstance(b, list) for b in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_map_style_dataset_with_and_without_workers(workers):
    assert len(MicroBatches(Squares())) == 20
    with cut_batches(Squares(), 4, num_workers=workers) as micro:
        for indices in ([3, 5, 7, 11, 13], [], [2]):
            batches = list(micro(indices))
            assert [i for _, y in batches for i in y.tolist()] == indices
            assert [v for x, _ in batches for v in x.tolist()] == [float(i**2) for i in indices]
        left = micro([1, 2, 3, 4, 5, 6, 7, 8, 9])
        next(left)
        assert [y.tolist() for _, y in micro([10, 11])] == [[10, 11]]
    assert [y.tolist() for _, y in micro([6])] == [[6]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "source", [Squares(), (torch.arange(20.0) ** 2, Y)], ids=["map-style", "tensors"]
)
def test_the_callers_own_collate(source, workers):
    with cut_batches(source, 2, collate_fn=double, num_workers=workers) as micro:
        assert [x.tolist() for x in micro([1, 2, 3])] == [[2.0, 8.0], [18.0]]


@pytest.mark.parametrize("source", [(X, Y), Squares()])
def test_an_empty_batch_has_no_micro_batches(source):
    with cut_batches(source, 4) as micro:
        assert list(micro(np.array([], dtype=np.int64))) == []


def test_one_part_without_a_bound():
    with cut_batches((X, Y)) as micro:
        assert len(list(micro(range(20)))) == 1


class SizedStream(IterableDataset):
    def __len__(self):
        return 20

    def __iter__(self):
        return iter(range(20))


def test_bad_input():
    with pytest.raises(ValueError, match="max_physical_batch_size must be >= 1, got 0"):
        split([1], 0)
    with pytest.raises(ValueError, match="num_workers must be >= 0, got -1"):
        MicroBatches((X, Y), num_workers=-1)
    with pytest.raises(ValueError, match=r"must have one length, got \[19, 20\]"):
        MicroBatches((X, Y[:19]))
    with pytest.raises(ValueError, match=r"tensors of a list are columns .* \[3, 4, 5\]; records"):
        MicroBatches([torch.zeros(3 + i % 4) for i in range(20)])
    with pytest.raises(ValueError, match=r"of a tuple are columns .* got \[0\]"):
        MicroBatches(tuple(X[:, 0]))
    with pytest.raises(ValueError, match="a list of 3 tensors with 3 rows may hold columns or rec"):
        MicroBatches(list(torch.eye(3)))
    with pytest.raises(ValueError, match="generator has no length or no indices; .* map-style"):
        MicroBatches(i for i in range(3))
    with pytest.raises(ValueError, match="SizedStream has no length or no indices; .* map-style"):
        MicroBatches(SizedStream())
    with pytest.raises(IndexError, match="index 20 is outside the dataset of 20 examples"):
        MicroBatches((X, Y)).load(split([0, 20], None))
    with pytest.raises(IndexError, match="index -1 is outside"):
        MicroBatches((X, Y)).load(split([-1], None))
    with pytest.raises(ValueError, match=r"must be a vector, got an array of shape \(1, 2\)"):
        split([[1, 2]], None)


class Encoding(UserDict):
    """As a tokenizer's BatchEncoding: a mapping that is no dict, and that torch does not look
    into.
    """


def encode(rows):
    return Encoding(
        ids=torch.stack([x for x, _ in rows]),
        more=(Encoding(labels=torch.tensor([y for _, y in rows])), "text"),
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_mappings_of_another_kind_become_dicts(workers):
    rows = [(torch.full((2,), i), i) for i in range(4)]
    with cut_batches(rows, 2, collate_fn=encode, num_workers=workers) as batches:
        for batch in [*batches([0, 1, 2, 3]), MicroBatches(rows, encode).batch(np.arange(2))]:
            assert (
                isinstance(batch, dict)
                and isinstance(batch["more"][0], dict)
                and batch["more"][1] == "text"
            )
            assert [x.shape[0] for x in tree_leaves(batch)[:2]] == [2, 2]
            assert (
                batch.ids is batch["ids"]
                and batch.more[0].labels.shape == (2,)
                and {**batch}.keys() == {"ids", "more"}
            )
            assert torch.equal(copy.deepcopy(batch).to("cpu").ids, batch.ids)
            with pytest.raises(AttributeError, match="a dict without 'mask'; it has ids, more"):
                _ = batch.mask


def test_batches_that_torch_knows_stay_as_they_are():
    def collate_ordered(rows):
        return OrderedDict(x=torch.tensor(rows))

    assert type(MicroBatches([1.0, 2.0], collate_ordered).batch(np.arange(2))) is OrderedDict


BUFFER = np.zeros((32, 3), np.float32)
TENSOR = torch.zeros(32, 3)


def fill_view(examples):
    for row, (x, _) in zip(TENSOR, examples, strict=False):
        row.copy_(x)
    return TENSOR[: len(examples)], [TENSOR[0].narrow(0, 1, 2)]


def fill_array(examples):
    for row, (x, _) in zip(BUFFER, examples, strict=False):
        row[:] = x
    return torch.from_numpy(BUFFER[: len(examples)]), [torch.from_numpy(BUFFER)[0, 1:]]


@pytest.mark.parametrize("collate", [fill_view, fill_array])
def test_a_later_batch_leaves_an_earlier_one_as_it_was(collate):
    """A collate function may write all its batches into one buffer."""
    with cut_batches(TensorDataset(X, Y), 3, collate_fn=collate) as load:
        batches = list(load(np.arange(20)))
    assert torch.equal(torch.cat([x for x, _ in batches]), X)
    assert [part.tolist() for _, (part,) in batches] == [x[0, 1:].tolist() for x, _ in batches]
