"""A record that stands in a data set several times is several for the sum: it is refused where one example is protected."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from dpkfc.config import PrivacyConfig
from dpkfc.data.repeats import check_once
from dpkfc.integrations._poisson_loader import check_loader
from dpkfc.session import Session

RECORDS = TensorDataset(torch.randn(10, 3), torch.zeros(10, dtype=torch.long))
OTHERS = TensorDataset(torch.randn(10, 3), torch.zeros(10, dtype=torch.long))
REPEATED = {
    "an index twice": (Subset(RECORDS, [1, 2, 2]), 1),
    "counted from the end": (Subset(RECORDS, [9, -1]), 1),
    "twice in one inside": (Subset(Subset(RECORDS, [3, 4, 3]), [0, 2]), 1),
    "the same one twice": (ConcatDataset([RECORDS, OTHERS, RECORDS]), 10),
    "parts that overlap": (ConcatDataset([Subset(RECORDS, range(6)), Subset(RECORDS, range(4, 10))]), 2),
    "a part of both": (Subset(ConcatDataset([RECORDS, Subset(RECORDS, [5])]), [10, 4, 5]), 1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeats_are_refused(name: str) -> None:
    dataset, repeated = REPEATED[name]
    with pytest.raises(ValueError, match=f"^{repeated} records stand in the dataset more than once"):
        check_once(dataset)
    with pytest.raises(ValueError, match="more than once"):
        check_loader(DataLoader(dataset, batch_size=2))


@pytest.mark.parametrize(
    "dataset",
    [
        RECORDS,
        [1, 1, 1],
        Subset(RECORDS, [2, 0, -1]),
        Subset(RECORDS, torch.arange(3)),
        *random_split(RECORDS, [5, 5]),
        ConcatDataset([RECORDS, OTHERS]),
        ConcatDataset(random_split(RECORDS, [5, 5])),
        Subset(ConcatDataset([RECORDS, Subset(RECORDS, [5])]), [10, 4]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_records_that_stand_there_once_are_taken(dataset) -> None:
    check_once(dataset)


def test_a_plan_that_protects_the_original_record_takes_repeats() -> None:
    model, repeated = torch.nn.Linear(3, 2), Subset(RECORDS, [*range(10), 7, 7])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"expected_batch_size": 4, "steps": 2}
    with pytest.raises(ValueError, match="more than once"):
        Session(PrivacyConfig(**settings).with_noise(1.0, 1e-3, 12), model, optimizer, repeated)
    plan = PrivacyConfig(**settings, unit="record", max_records_per_unit=3).with_noise(1.0, 1e-3, 10)
    Session(plan, model, optimizer, repeated, units=repeated.indices).close()
