"""Pad records: a longer one in the batch may change nothing of a shorter one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests import sessions
from tests.gradients.test_public_comparisons import Texts
from tests.integrations import opacus_cases
from tests.models import Words
from tests.sessions import cross_entropy

COUNT = 24


class Rows:
    """Records of other lengths, made by a function of their length and a generator."""

    def __init__(self, make, first=5):
        generator = torch.Generator().manual_seed(0)
        lengths = [first, *(2 + i % 7 for i in range(COUNT - 1))]
        self.rows = [make(length, generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def ids_of(length, generator):
    return torch.randint(1, 9, (length,), generator=generator)


def draw_text(length, generator):
    return ids_of(length, generator), 1


def draw_text_with_labels(length, generator):
    return ids_of(length, generator), torch.randint(2, (6,), generator=generator).float()


def words(length, generator):
    return " ".join(["word"] * length), 1


def padded(rows, multiple=1):
    ids = pad_sequence([row[0] for row in rows], batch_first=True)
    ids = F.pad(ids, (0, -ids.shape[1] % multiple))
    return ids, torch.stack([torch.as_tensor(row[1]) for row in rows])


def padded_to_64(rows):
    return padded(rows, 64)


def tokenise(rows):
    texts = [[1 + len(word) for word in text.split()] for text, _ in rows]
    return padded([(torch.tensor(ids), label) for ids, (_, label) in zip(texts, rows, strict=True)])


def last_axis_padded(rows):
    longest = max(x.shape[1] for x, _ in rows)
    wide = [F.pad(x, (0, longest - x.shape[1])) for x, _ in rows]
    return torch.stack(wide), torch.tensor([label for _, label in rows])


def tag(model, batch):
    losses = F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")
    return losses.mean(1)


class MeanOverTime(nn.Module):
    """Averages `[n, 4, t]` over time, padding included."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x.sin().mean(2))


def spectrum(length, generator):
    return torch.randn(4, length, generator=generator), 1


def train(data, model, collate, loss_fn=cross_entropy):
    sessions.train(model, data, loss_fn, collate_fn=collate)


@pytest.mark.parametrize(
    ("make", "model", "collate", "loss_fn"),
    [
        (draw_text_with_labels, Words(6), padded, tag),
        (draw_text, Words(), padded_to_64, cross_entropy),
        (words, Words(), tokenise, cross_entropy),
        (spectrum, MeanOverTime(), last_axis_padded, cross_entropy),
    ],
    ids=["two lengths in a record", "multiples of 64", "texts of words", "the last axis"],
)
def test_padding_that_reaches_other_examples_is_refused(make, model, collate, loss_fn):
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        train(Rows(make), model, collate, loss_fn)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_the_length_of_the_first_record_decides_nothing(first):
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        train(Rows(draw_text, first), Words(), padded)
    train(Rows(draw_text, first), Words(masked=True), padded)


def sorted_by_length(records):
    return padded(sorted(records, key=lambda record: len(record[0]), reverse=True))


def test_a_collate_function_that_sorts_is_refused_as_one():
    with pytest.raises(ValueError, match="sorts the records of a batch by their lengths"):
        train(Rows(draw_text), Words(masked=True), sorted_by_length)


class TooShort(Words):
    """Has five positions, fewer than any longer public record."""

    def forward(self, ids):
        assert ids.shape[1] <= 5
        return super().forward(ids)


def test_padding_that_no_public_record_shows_gets_a_warning():
    data = Rows(lambda length, generator: draw_text(min(length, 5), generator))
    with pytest.warns(UserWarning, match="whether padding mixes examples is not checked"):
        train(data, TooShort(masked=True), padded)


def cast(ids):
    return ids.int()


SCRIPTS = [
    (Words, Tensor.t, 0),
    (Words, cast, 1),
    (Words, Tensor.clone, 1),
]


def run_script(model, change, collate):
    _, model, optimizer, loader = opacus_cases.private(
        model, data_loader=DataLoader(Texts(), batch_size=12, collate_fn=collate)
    )
    for ids, label in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(change(ids)), label).backward()
        optimizer.step()


@pytest.mark.quick("*0")
@pytest.mark.parametrize(("kind", "change", "dim"), SCRIPTS, ids=["transposed", "cast", "copied"])
def test_a_script_that_changes_its_batch_first_is_compared(kind, change, dim):
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        run_script(kind(dim=dim), change, padded)
    run_script(kind(dim=dim, masked=True), change, padded)


def test_a_script_may_sort_its_records_by_length():
    def collate(rows):
        return padded(sorted(rows, key=lambda row: -len(row[0])))

    run_script(Words(masked=True), Tensor.clone, collate)


def test_a_script_whose_padding_cannot_be_compared_is_told():
    with pytest.warns(UserWarning, match="whether padding mixes examples is not checked"):
        run_script(Words(masked=True), lambda ids: ids.repeat_interleave(2, 1), padded)


class Attends(nn.Module):
    """Attends over the padding with weights so small that no loss shows it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 4)
        self.value = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        nn.init.normal_(self.value.weight, std=1e-4)
        nn.init.normal_(self.head.weight, std=1e-2)

    def forward(self, ids):
        x = self.table(ids)
        x = self.norm(x + self.value(x).mean(1, keepdim=True))
        return self.head(x[:, 0])


def test_gradients_show_padding_that_losses_hide():
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        train(Rows(draw_text), Attends(), padded)
    with pytest.raises(ValueError, match="padded to the length of a longer one"):
        run_script(Attends(), Tensor.clone, padded)
