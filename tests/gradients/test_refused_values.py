"""Records that cannot be read, or on which torch or user code raises, and losses that are constant:
they add nothing, and the run goes on. A message or an end of the run would tell of them.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.sessions import assert_refused, open_session

N, STEPS = 24, 3
Batch = tuple[Tensor, Tensor]


def data(value):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).double()
    if value:
        x[1::3, 2] = value
    return x, y


def net(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), *last).double()


def bce(model, batch):
    return F.binary_cross_entropy(model(batch[0]), batch[1], reduction="none")


def gaussian(model, batch):
    return -torch.distributions.Normal(model(batch[0]), 1.0).log_prob(batch[1])


def factorised(model, batch):
    out = model(batch[0])
    matrices = torch.diag_embed(torch.stack([out, 1 + out.square()], 1).exp())
    return torch.linalg.cholesky(matrices).sum((1, 2))


def constant_for_some(model, batch):
    losses = bce(model, batch)
    # No public row is as large.
    is_kept = batch[0][:, 2] < 50
    return losses * is_kept if is_kept.all() else torch.zeros_like(batch[1])


def take_ends(model, batch):
    ends = [int(x) for x in batch[0][:, 2]]
    return model(batch[0]) + torch.tensor([float(end) for end in ends], dtype=batch[0].dtype)


def take_powers(model, batch):
    powers = [math.exp(float(x)) for x in batch[0][:, 2]]
    return model(batch[0]) * torch.tensor(powers, dtype=batch[0].dtype)


LOSSES = [
    (bce, (nn.Sigmoid(),), math.nan),
    (bce, (nn.Sigmoid(),), -math.inf),
    (gaussian, (), math.nan),
    (gaussian, (), math.inf),
    (factorised, (), math.nan),
    (take_ends, (), math.nan),
    (take_ends, (), math.inf),
    (take_powers, (), 1e6),
    (constant_for_some, (nn.Sigmoid(),), 100.0),
]


@pytest.mark.parametrize(("loss_fn", "last", "value"), LOSSES)
def test_a_record_that_torch_refuses_adds_nothing(loss_fn, last, value):
    x, y = data(value)
    model, bound = net(*last), 0.1
    parameters = list(model.parameters())
    with open_session(model, (x, y), 0.0, lr=1.0, steps=STEPS, max_grad_norm=bound) as session:
        for batch in session.batches():
            expected = [torch.zeros_like(p) for p in parameters]
            kept = [i for i in batch.rows if abs(x[i, 2]) < 50]
            for i in kept:
                loss = loss_fn(model, (x[i : i + 1], y[i : i + 1])).sum()
                gradients = torch.autograd.grad(loss, parameters)
                norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
                for total, gradient in zip(expected, gradients, strict=True):
                    total += gradient * min(1.0, bound / norm) / 8
            before = [p.detach().clone() for p in parameters]
            record = session.step(batch, loss_fn)
            moved = [old - p.detach() for old, p in zip(before, parameters, strict=True)]
            assert_close(moved, expected, rtol=1e-6, atol=1e-12)
            if not math.isfinite(value):
                assert record.nonfinite_fraction == pytest.approx(1 - len(kept) / len(batch.rows))
        assert session.steps_done == STEPS


class OwnError(Exception):
    """What no library raises."""


def refuse_by_label(x):
    F.cross_entropy(torch.zeros(len(x), 2), 7 * (x[:, 2] > 50).long(), reduction="none")


def refuse_by_embedding(x):
    F.embedding(10 * (x[:, 2] > 50).long(), torch.zeros(3, 2))


def refuse_by_numpy(x):
    np.linalg.inv(np.diag((x[:, 2] < 50).double().numpy()))


def refuse_by_assert(x):
    assert bool((x[:, 2] < 50).all())


def make_check(error):
    def check(x):
        if bool((x[:, 2] > 50).any()):
            raise error

    return check


CHECKS = [refuse_by_label, refuse_by_embedding, refuse_by_numpy, refuse_by_assert]
CHECKS += map(
    make_check, [KeyError("a"), ValueError("SECRET"), StopIteration(), OwnError("SECRET")]
)


class Rows(torch.utils.data.Dataset[Batch]):
    def __init__(self, columns, check):
        self.columns, self.check = columns, check

    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = (column[i] for column in self.columns)
        self.check(x[None])
        return x, y


def run_with(place, check, columns, *, verify=True):
    """Return parameters and shares of failed records of a run in which one place makes a check."""
    model = net()

    def loss_fn(model, batch):
        if place == "loss":
            check(batch[0])
        return bce(model, (batch[0], batch[1]))

    def augment(batch):
        check(batch[0])
        return batch

    def collate(rows):
        x = torch.stack([x for x, _ in rows])
        check(x)
        return x, torch.stack([y for _, y in rows])

    if place == "model":
        model.register_forward_pre_hook(lambda _, args: check(args[0]))
    model.append(nn.Sigmoid())
    session = open_session(
        model,
        Rows(columns, check) if place == "dataset" else columns,
        0.0,
        lr=1.0,
        steps=STEPS,
        augment=augment if place == "augment" else None,
        collate_fn=collate if place == "collate" else None,
        verify=verify,
    )
    with session:
        shares = [session.step(b, loss_fn).nonfinite_fraction for b in session.batches()]
    return [p.detach().clone() for p in model.parameters()], shares


@pytest.mark.filterwarnings("ignore:public rows take their types")
@pytest.mark.parametrize(
    ("place", "check"),
    [
        *(("loss", check) for check in CHECKS),
        *((place, CHECKS[-1]) for place in ("model", "augment", "collate", "dataset")),
    ],
)
def test_a_record_on_which_user_code_raises_adds_what_a_nan_does(place, check, caplog):
    expected, shares = run_with("", check, data(math.nan))
    found, found_shares = run_with(place, check, data(100.0))
    assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert found_shares == shares and any(shares)
    assert "SECRET" not in caplog.text and "PRIVATE, for your eyes only" in caplog.text


@pytest.mark.parametrize(
    ("error", "verify"), [(KeyboardInterrupt(), True), (MemoryError(), True), (KeyError(), False)]
)
def test_an_error_that_comes_from_no_record_ends_the_run(error, verify):
    with pytest.raises((type(error), RuntimeError)):
        run_with("loss", make_check(error), data(100.0), verify=verify)


def test_a_record_that_makes_the_model_write_its_weights_ends_the_run():
    class Writes(nn.Linear):
        def forward(self, x):
            if bool((x[:, 2] > 50).any()):
                with torch.no_grad():
                    self.weight.mul_(2)
                raise OwnError
            return super().forward(x)

    model = nn.Sequential(Writes(4, 1), nn.Flatten(0), nn.Sigmoid()).double()
    assert_refused(open_session(model, data(100.0)), "writes to the parameter", bce)
