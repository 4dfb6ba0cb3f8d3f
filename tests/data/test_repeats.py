"""A record that stands in a data set several times is several for the sum: it is refused where one
example is protected.
"""

import datasets
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from dpkfc.config import PrivacyConfig
from dpkfc.data.duplicates import check_held_out, check_once
from dpkfc.integrations._opacus_loader import check_loader
from dpkfc.session import Session

RECORDS = TensorDataset(torch.randn(10, 3), torch.zeros(10, dtype=torch.long))
OTHERS = TensorDataset(torch.randn(10, 3), torch.zeros(10, dtype=torch.long))
ROWS = [(torch.randn(3), i % 2) for i in range(10)]


class Wrapped(Dataset):
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)

    def __getitem__(self, i):
        return self.held[i]


class Chosen(Wrapped):
    def __init__(self, dataset, indices):
        super().__init__(indices)
        self.dataset, self.indices = dataset, indices


COLUMNS = {"x": [[float(i)] for i in range(6)], "y": [i % 2 for i in range(6)]}
TABLE, OTHER_TABLE = (datasets.Dataset.from_dict(COLUMNS) for _ in range(2))
REPEATED = {
    "an index twice": Subset(RECORDS, [1, 2, 2]),
    "twice in one inside": Subset(Subset(RECORDS, [3, 4, 3]), [0, 2]),
    "the same one twice": ConcatDataset([RECORDS, OTHERS, RECORDS]),
    "parts that overlap": ConcatDataset([Subset(RECORDS, range(6)), Subset(RECORDS, range(4, 10))]),
    "a part of both": Subset(ConcatDataset([RECORDS, Subset(RECORDS, [5])]), [10, 4, 5]),
    "a list times three": ROWS * 3,
    "a view inside a wrapper": Wrapped(Subset(RECORDS, [1, 1])),
    "a wrapper of one's own": Chosen(ROWS, [0, 1, 0, -10]),
    "a selection": TABLE.select([0, 3, 3]),
    "tables put together": datasets.concatenate_datasets([TABLE, OTHER_TABLE, TABLE]),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeats_are_refused(name):
    dataset = REPEATED[name]
    with pytest.raises(ValueError, match="^some records occur more than once in the dataset"):
        check_once(dataset)
    with pytest.raises(ValueError, match="more than once"):
        check_loader(DataLoader(dataset, batch_size=2))


@pytest.mark.parametrize(
    "dataset",
    [
        RECORDS,
        [1, 1, 1],
        Subset(RECORDS, [2, 0, -1]),
        ConcatDataset([RECORDS, OTHERS]),
        ConcatDataset(random_split(RECORDS, [5, 5])),
        Subset(ConcatDataset([RECORDS, Subset(RECORDS, [5])]), [10, 4]),
        ROWS,
        Wrapped(Subset(RECORDS, [3, 1])),
        Chosen(ROWS, [0, 9, -9]),
        TABLE.select([3, 0, 5]),
        datasets.concatenate_datasets([TABLE.select(range(3)), TABLE.select(range(3, 6))]),
        datasets.concatenate_datasets(
            [TABLE.add_column("z", [*range(6)]), OTHER_TABLE.add_column("z", [*range(6)])]
        ).shuffle(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_records_that_stand_there_once_are_taken(dataset):
    check_once(dataset)


def test_a_plan_that_protects_the_original_record_takes_repeats():
    model, repeated = torch.nn.Linear(3, 2), Subset(RECORDS, [*range(10), 7, 7])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"expected_batch_size": 4, "steps": 2}
    with pytest.raises(ValueError, match="more than once"):
        Session(PrivacyConfig(**settings).with_noise(1.0, 1e-3, 12), model, optimizer, repeated)
    plan = PrivacyConfig(**settings, unit="record", max_records_per_unit=3).with_noise(
        1.0, 1e-3, 10
    )
    Session(plan, model, optimizer, repeated, units=repeated.indices).close()


@pytest.mark.parametrize(
    ("held_out", "private"),
    [
        (RECORDS, RECORDS),
        (ROWS[2:4], ROWS),
        (Subset(RECORDS, [7]), Subset(RECORDS, range(5, 10))),
        ([OTHERS[1], *ROWS[:1]], ROWS),
        (TABLE.select(range(3, 6)), TABLE.select([5, 0])),
    ],
)
def test_what_is_evaluated_on_holds_no_private_record(held_out, private):
    with pytest.raises(ValueError, match="^the test set holds records of the train_dataset"):
        check_held_out(held_out, private, "the test set")


@pytest.mark.parametrize(
    ("held_out", "private"),
    [
        (OTHERS, RECORDS),
        random_split(RECORDS, [5, 5]),
        (TABLE.select([0, 2]), TABLE.select([1, 3, 4, 5])),
        (TABLE.select([0, 2]), OTHER_TABLE),
        (iter(ROWS), RECORDS),
        ([object(), None], [object(), None]),
        # Equal records are not read: whether a run begins would tell who is in the data.
        (TensorDataset(RECORDS.tensors[0][:6].clone(), RECORDS.tensors[1][:6].clone()), RECORDS),
        ([{"x": TABLE[i]["x"], "y": TABLE[i]["y"]} for i in (4, 5)], TABLE),
    ],
    ids=range(8),
)
def test_other_records_are_taken(held_out, private):
    check_held_out(held_out, private, "the test set")
