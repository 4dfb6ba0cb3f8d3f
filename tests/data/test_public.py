"""Rows that a public and a private dataset share are found where a user asks, and only there."""

import warnings

import numpy as np
import pytest
import torch

from dpkfc import PrivacyConfig
from dpkfc.curvature import (
    KFAC,
    Preconditioner,
    PublicData,
)
from dpkfc.data.duplicates import check_disjoint, shared_rows
from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.session import Session
from tests.sessions import cross_entropy as loss_fn

X = torch.randn(20, 2, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def test_equal_rows_are_found_in_every_form():
    public = torch.cat([torch.randn(3, 2, 3), X[[4, 9]]])
    expected = [(3, 4), (4, 9)]
    forms = [
        X,
        X.double(),
        (X, Y),
        {"x": X},
        torch.utils.data.TensorDataset(X, Y),
        [(X[i], int(Y[i])) for i in range(20)],
        [(X[i].numpy(), 0) for i in range(20)],
    ]
    for private in forms:
        own = {"x": public} if isinstance(private, dict) else public
        assert shared_rows(own, private) == expected
    assert shared_rows(X[:4], X[4:]) == []


def test_tokens_are_compared_without_their_labels():
    ids, mask = torch.randint(0, 50, (6, 4)), torch.ones(6, 4, dtype=torch.long)
    public = {"input_ids": ids[2:3], "attention_mask": mask[2:3], "labels": torch.tensor([9])}
    rows = [
        {"input_ids": ids[i].tolist(), "attention_mask": mask[i].tolist(), "label": i}
        for i in range(6)
    ]
    assert shared_rows(public, rows) == [(0, 2)]
    assert shared_rows(public, {"input_ids": ids, "attention_mask": mask}) == [(0, 2)]
    assert shared_rows([{"text": "a b"}], [{"text": "a"}, {"text": "a b"}]) == [(0, 1)]


def test_a_column_of_lists_is_compared_whole():
    """Rows of an object array are inputs, and no pairs of an input and a label."""
    rows = np.empty(2, dtype=object)
    rows[:] = [[101, 5, 6], [101, 7]]
    assert shared_rows(rows, [([101, 5, 6], 0), ([101, 8], 1)]) == [(0, 0)]


def test_shared_rows_are_refused_by_name():
    check_disjoint(X[:5], (X[5:], Y[5:]))
    with pytest.raises(ValueError, match=r"share 8 rows \(public rows 0, 1, 2, 3, 4, …\)"):
        check_disjoint(X[:8], (X, Y))
    with pytest.raises(ValueError, match="the probe of NGD and the private dataset share 1 rows"):
        check_disjoint(X[:1], (X, Y), "the probe of NGD")


class Derived(Preconditioner):
    """A preconditioner of a user, with its probe in a property or wherever."""

    def __init__(self, probe):
        self._inner = probe

    @property
    def probe(self):
        return self._inner

    def is_due(self, step):
        return step == 0

    def describe(self):
        return {"name": "derived"}

    def build(self, *args, **more):
        raise NotImplementedError


def test_what_is_no_probe_is_refused_in_a_preconditioner_of_ones_own():
    class Duck:
        inputs = torch.randn(20, 3)

    with pytest.raises(
        ValueError, match=r"probe of Derived must derive from dpkfc\.curvature\.Probe, got Duck"
    ):
        PrivacyConfig(expected_batch_size=4, steps=1, preconditioner=Derived(Duck()))


def test_no_training_tells_whether_a_public_row_is_private():
    assert train_beside_public_rows(shared=False) == train_beside_public_rows(shared=True)


def train_beside_public_rows(*, shared):
    """Train with a session and an engine; return their warnings."""
    rows = X.flatten(1)
    public = rows[:2].clone() if shared else torch.randn(2, 6)
    kfac = KFAC(probe=PublicData(public, provenance="rows"), probe_size=2)
    dataset = torch.utils.data.TensorDataset(rows, Y)
    config = PrivacyConfig(expected_batch_size=5, steps=1, preconditioner=kfac)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Session(config.with_noise(1.0, 1e-3, 20), model, optimizer, dataset) as session:
            for batch in session.batches():
                session.step(batch, loss_fn)
        model = torch.nn.Linear(6, 3)
        engine = PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=torch.utils.data.DataLoader(dataset, batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            preconditioner=kfac,
        )
        engine.close()
    return [str(warning.message) for warning in caught]


def test_minus_zero_and_shape():
    assert shared_rows(torch.tensor([[-0.0, 1.0]]), torch.tensor([[0.0, 1.0]])) == [(0, 0)]
    assert shared_rows(torch.zeros(1, 2, 3), torch.zeros(1, 3, 2)) == []
