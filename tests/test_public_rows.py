"""Public rows are like most records or like public facts, so that no single record decides what is
checked, refused or printed.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Array2D, ClassLabel, Dataset, Features, Image, Sequence, Value
from PIL import Image as Pictures
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset, TensorDataset

from dpkfc.config import PrivacyConfig
from dpkfc.public_rows.record_drawing import axes_of, kind_of
from dpkfc.public_rows.rows import draw_public_rows
from dpkfc.public_rows.template import find_template
from dpkfc.session import Session
from tests.sessions import cross_entropy

N = 24


def usual(i):
    """A record with every kind of value."""
    length = 2 + i % 5
    return {
        "ids": list(range(length)),
        "nested": [[1, 2], [3] * length],
        "vector": torch.ones(length),
        "sparse": torch.eye(3)[i % 3],
        "array": np.ones((2, 3), dtype=np.float32),
        "picture": Pictures.new("RGB", (6, 4)),
        "text": " ".join(["word"] * length),
        "label": i % 3,
        "none": None,
    }


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, first, make=usual):
        self.first, self.make = first, make

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i:
            return self.make(i)
        if isinstance(self.first, Exception):
            raise self.first
        return self.first


OTHERS = {
    "longer": usual(0) | {"ids": list(range(500)), "text": "word " * 99, "vector": torch.ones(99)},
    "empty": usual(0) | {"ids": [], "text": "", "vector": torch.ones(0), "nested": []},
    "another key": usual(0) | {"note": "x"},
    "a key less": {"ids": [1]},
    "floats": usual(0) | {"ids": [1.0, 2.0], "label": 1.0},
    "text for a number": usual(0) | {"label": "two"},
    "no value": usual(0) | {"label": None, "text": None},
    "a value": usual(0) | {"none": 3},
    "large": usual(0) | {"ids": [10**9], "label": 10**9},
    "not a number": usual(0) | {"vector": torch.full((3,), torch.nan)},
    "sparse": usual(0) | {"sparse": torch.eye(3)[0].to_sparse()},
    "deeper": usual(0) | {"nested": [[[1]]]},
    "another picture": usual(0) | {"picture": Pictures.new("L", (900, 2))},
    "another shape": usual(0) | {"array": np.ones((7, 9, 1), dtype=np.float64)},
    "unknown": usual(0) | {"label": object()},
    "a tuple": (1, 2),
    "unreadable": ValueError("cannot read scan-17.png"),
}


def description(template):
    kinds = [(kind_of(x), [*axes_of(x)]) for x in template.prototypes]
    return kinds, template.is_public, template.problem


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_record_leaves_no_trace(name):
    expected = description(find_template(Rows(usual(0))))
    assert description(find_template(Rows(OTHERS[name]))) == expected
    assert expected[0] and not expected[1]


def test_lengths_that_all_records_share_are_kept_and_others_are_varied():
    for i, prototype in enumerate(find_template(Rows(usual(0))).prototypes):
        lengths = dict(axes_of(prototype))
        length = (7, 3, 64, 256)[i]
        assert lengths["ids", 0] == lengths["vector", 0] == lengths["text", 0] == length
        assert prototype["array"].shape == (2, 3) and prototype["picture"].size == (6, 4)


def test_no_value_of_a_record_is_taken():
    rows = Rows(None, lambda i: {"x": torch.full((4,), 5.5), "n": 77, "text": "SECRET"})
    prototype = find_template(rows).prototypes[0]
    assert 5.5 not in prototype["x"] and prototype["n"] != 77 and prototype["text"] != "SECRET"


def test_public_shapes_are_taken_without_a_record():
    x, y = torch.full((N, 3, 4), 9.0), torch.ones(N, dtype=torch.long)
    for dataset in ((x, y), TensorDataset(x, y), Subset(TensorDataset(x, y), range(4))):
        template = find_template(dataset)
        assert template.is_public
        assert [v.shape for v in template.prototypes[0]] == [(3, 4), ()]
        assert not template.prototypes[0][0].any()


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_features_of_a_hugging_face_data_set_are_public(form):
    features = Features(
        {
            "ids": Sequence(Value("int64")),
            "three": Sequence(Value("float32"), length=3),
            "grid": Array2D((2, 2), "float32"),
            "text": Value("string"),
            "label": ClassLabel(names=["a", "b"]),
            "flag": Value("bool"),
            "picture": Image(),
        }
    )

    def row(length):
        return {
            "ids": [1] * length,
            "three": [1.0] * 3,
            "grid": np.ones((2, 2)).tolist(),
            "text": "word " * length,
            "label": 1,
            "flag": True,
            "picture": Pictures.new("RGB", (length, length)),
        }

    made = [Dataset.from_list([row(n), row(2)], features=features) for n in (1, 40)]
    one, other = (find_template(x.with_format(form)) for x in made)
    assert description(one) == description(other) and one.is_public
    lengths = dict(axes_of(one.prototypes[0]))
    assert lengths["ids", 0] == 7 and lengths["three", 0] == 3


def test_a_transform_of_a_hugging_face_data_set_is_followed():
    dataset = Dataset.from_dict({"x": [1.0, 2.0]})
    dataset.set_transform(lambda batch: {"z": [torch.ones(5) * v for v in batch["x"]]})
    template = find_template(dataset)
    assert template.is_public and dict(axes_of(template.prototypes[0])) == {("z", 0): 5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, ids):
        return self.out(self.table(ids).sum(1))


def collate(rows):
    ids = pad_sequence([torch.as_tensor(x) for x, _ in rows], batch_first=True)
    return ids, torch.tensor([y for _, y in rows])


def outcome(first):
    rows = Rows(first, lambda i: (torch.ones(2 + i % 4, dtype=torch.long), i % 3))
    model = Net()
    plan = PrivacyConfig(expected_batch_size=6, steps=1, test_mode_seed=1).with_noise(1.0, 1e-3, N)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with Session(
            plan, model, torch.optim.SGD(model.parameters(), 0.1), rows, collate_fn=collate
        ) as session:
            session._loss_check.check(
                cross_entropy,
                rows,
                session._loader.collate,
                bound=None,
                lazy=session._lazy,
            )
            text = session.gradients
    return text, [str(w.message) for w in shown]


def test_a_run_says_the_same_whatever_the_first_record_is():
    text, shown = outcome((torch.ones(3, dtype=torch.long), 1))
    assert any("private records share" in x for x in shown)
    for first in ((torch.ones(99), 1), (torch.ones(3, 3), 1), ([], None), ValueError("SECRET")):
        assert outcome(first) == (text, shown)


def test_axes_that_are_of_one_length_by_chance_are_padded_apart():
    def pad(records):
        return [pad_sequence(list(x), batch_first=True) for x in zip(*records, strict=True)]

    def agree(batch, alone):
        if batch[1].shape[1] != 3:
            raise ValueError("a label has three entries")
        return batch[0].shape[1] == alone[0].shape[1]

    rows = draw_public_rows((torch.ones(3), torch.ones(3)), 2, pad, "bits")
    assert rows.depends_on_padding(agree) is True


@pytest.mark.parametrize("integers", ["tokens", "bits", "ones"])
def test_no_drawn_record_has_a_mask_that_hides_all_of_it(integers):
    for mask in ([0], [0] * 5, torch.zeros(5, dtype=torch.long), np.zeros((2, 3), dtype=np.int32)):
        drawn = draw_public_rows({"mask": mask}, 50, list, integers).records
        assert all(np.asarray(x["mask"])[..., 0].all() for x in drawn)
        assert {type(x["mask"]) for x in drawn} == {type(mask)}


def test_masks_by_name_are_of_zeros_and_ones():
    """Else no record would be shorter than another where a collate function cuts to the masks."""
    ids = torch.zeros(6, dtype=torch.long)
    drawn = draw_public_rows({"ids": ids, "attention_mask": ids}, 50, list, "tokens").records
    assert {int(x) for record in drawn for x in record["attention_mask"]} == {0, 1}
    assert {int(x) for record in drawn for x in record["ids"]} == {0, 1, 2, 3}


def test_numbers_of_a_list_are_drawn_as_those_of_a_tensor():
    drawn = draw_public_rows(
        {"ids": [0] * 50, "scores": [0.0] * 50, "flags": [True]}, 4, list, "tokens"
    )
    for record in drawn.records:
        assert set(record["ids"]) == {0, 1, 2, 3} and {type(i) for i in record["ids"]} == {int}
        assert min(record["scores"]) < 0 and type(record["flags"][0]) is bool


def test_a_record_without_a_public_value_is_named_when_rows_are_asked_for():
    template = find_template(Rows(usual(0), lambda _: object()))
    with pytest.raises(TypeError, match="a record holds a object"):
        template.attempts(list, torch.device("cpu"))[0](3)


@pytest.mark.parametrize(("alike", "prototypes"), [(12, 1), (11, 4)])
def test_a_length_is_one_where_three_in_four_records_have_it(alike, prototypes):
    records = [(torch.ones(3 if i < alike else 4 + i), i % 3) for i in range(16)]
    assert len(find_template(records).prototypes) == prototypes


def test_given_records_are_used_themselves():
    template = find_template(Rows(ValueError()), [(torch.ones(2), 1)])
    rows = template.attempts(list, torch.device("cpu"))[0](3)
    assert template.is_public and len(rows) == 3 and torch.equal(rows.records[2][0], torch.ones(2))
