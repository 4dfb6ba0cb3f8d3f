"""Make a small mistake: the error names it and the fix."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.sessions import cross_entropy, open_session, train
from tests.test_session import N, data, net


def step(model, dataset, loss=cross_entropy):
    return train(model, dataset, loss, steps=1, size=N)


def test_numpy_arrays_are_named():
    x, y = data()
    for arrays in ((x.numpy(), y.numpy()), (x, y.numpy())):
        with pytest.raises(ValueError, match=r"tuple\(torch.as_tensor"):
            step(net(), arrays)
    examples = [a.numpy() for a in x]  # a list of arrays is a dataset of them

    def loss(model, batch):
        return model(batch).square().sum(1)

    assert step(net(), examples, loss).steps_done == 1


@pytest.mark.parametrize("kind", ["loader", "frame", "columns"])
def test_what_holds_data_but_no_records_is_named(kind):
    x, y = data()
    frame = type(
        "DataFrame",
        (),
        {"iloc": None, "__len__": lambda self: N, "__getitem__": lambda self, i: x[i]},
    )()
    wrong = {
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "frame": frame,
        "columns": {"x": x, "y": y},
    }
    named = {
        "loader": "pass loader.dataset",
        "frame": r"to_numpy\(\)",
        "columns": r"tuple\(columns.values\(\)\)",
    }
    with pytest.raises(ValueError, match=named[kind]):
        step(net(), wrong[kind])
    # a mapping of records is a dataset
    assert step(net(), dict(enumerate(zip(x, y, strict=True)))).steps_done == 1


def test_a_batch_of_indices_is_no_batch_of_data():
    with open_session(net(), data()) as session:
        batch = next(iter(session.batches()))
        with pytest.raises(TypeError, match=r"session.step\(batch, loss_fn\)"):
            x, y = batch
        assert session.step(batch, cross_entropy).step == 0


def test_the_users_own_index_error_is_left_alone():
    def index_wrongly(model, batch):
        return [cross_entropy(model, batch)][1]

    with pytest.raises(IndexError, match="list index out of range"):
        step(net(), data(), index_wrongly)


@pytest.mark.parametrize("kind", ["label", "id", "functional id", "column"])
def test_a_label_or_an_id_out_of_range_is_named(kind):
    x, y = data()
    table = nn.Embedding(5, 6, dtype=torch.float64)

    def loss(model, batch):
        ids = batch[1] + (0 if kind == "label" else 7)
        rows = F.embedding(ids, table.weight.detach()) if kind == "functional id" else batch[0]
        rows = model[0](ids) if kind == "id" else rows
        rows = batch[0][:, 99] if kind == "column" else rows
        return F.cross_entropy(
            model[1](rows), batch[1] + (7 if kind == "label" else 0), reduction="none"
        )

    model = nn.ModuleList([table.requires_grad_(kind == "id"), net()])
    message = r"line \d+ of test_make_small_mistakes\.py.*outside the range"
    with pytest.raises(ValueError, match=r"embedding '0' has 5 rows" if kind == "id" else message):
        step(model, (x, y), loss)


def test_a_lazy_layer_wants_one_forward_pass_first():
    x, y = data()
    model = nn.Sequential(
        nn.LazyLinear(8, dtype=torch.float64), nn.Linear(8, 3, dtype=torch.float64)
    )
    with pytest.raises(
        ValueError, match=r"'0.weight' has no shape yet.*run one forward pass first"
    ):
        step(model, (x, y))
    model(torch.zeros(2, x.shape[1], dtype=torch.float64))
    assert step(model, (x, y)).steps_done == 1


def test_a_batch_with_sparse_tensors_is_left_to_the_loss():
    x, y = data()

    def sparse(rows):
        return torch.stack([a for a, _ in rows]).to_sparse(), torch.stack([b for _, b in rows])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0].to_dense()), batch[1], reduction="none")

    session = train(net(), (x, y), loss, collate_fn=sparse)
    assert session.steps_done == 2
