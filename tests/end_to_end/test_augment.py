"""Average the gradients of several views of an example before its clip."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.config import PrivacyConfig
from dpkfc.data.loading import layout
from dpkfc.gradients import one_pass
from dpkfc.gradients.augmentation import augment_batch
from dpkfc.gradients.clipped_sum import GradientMode
from dpkfc.gradients.evaluation_points import AT_MODEL_PARAMETERS, EvaluationPoint
from dpkfc.session import Session
from dpkfc.tracking.states import Unknown
from dpkfc.tracking.tracker import Tracker
from tests.gradients.cases import CASES, build, loss_fn, sum_examples
from tests.recording import Heard
from tests.test_session import N, data, net, plan, session, train, weights

K = 3


def noisy(batch):
    """Every row changed at random on its own."""
    x, y = batch
    if x.is_floating_point():
        return x + 0.3 * torch.randn_like(x), y
    return torch.where(torch.rand(x.shape) < 0.5, x, torch.randint_like(x, 5)), y


def numbered(batch):
    """View k of an example is the example times 1 + k/10: what it is does not depend on the cut
    into micro-batches.
    """
    x, y = batch
    factors = 1 + 0.1 * (torch.arange(len(x)) % K)
    return x * factors.to(x).view(-1, *[1] * (x.dim() - 1)), y


def gradients(model, losses):
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(parameters.items(), found, strict=True)
    }


def norm(grads):
    return float(torch.sqrt(sum(g.square().sum() for g in grads.values())))


@pytest.fixture
def views_by_place(monkeypatch):
    """Let an augmentation change a row by its place, so that the views of two runs can be
    compared.
    """
    monkeypatch.setattr(one_pass, "Tracker", partial(Tracker, trusts_public_rows=True))


@pytest.mark.usefixtures("views_by_place")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_mean_over_views_is_clipped_once(case):
    """For every kind of layer: the K gradients are averaged before the clip."""
    model, (x, y) = build(case, n=5)
    made = Heard()
    parts = layout(range(5), 7, views=K)
    assert [len(part.records) for part in parts] == [6, 6, 3]

    def augment(batch):
        changed = noisy(batch)
        made.append(changed)
        return changed

    means = []
    sum_examples(model, (x, y), 1e9, parts=parts, augment=augment)
    seen = [(part.records, made.pop(0)) for part in parts]
    for i in range(5):
        records, (views, labels) = next(found for found in seen if i in found[0])
        chosen = torch.from_numpy(records == i)
        assert int(chosen.sum()) == K
        means.append(gradients(model, loss_fn(model, (views[chosen], labels[chosen]))))
    c = float(np.median([norm(g) for g in means]))
    for _, (views, labels) in seen:
        made.append((views.clone(), labels.clone()))

    def replay(batch):
        """The same views again, each row computed from its own."""
        return batch[0] * 0 + (views := made.pop(0))[0], batch[1] * 0 + views[1]

    total, norms = sum_examples(model, (x, y), c, parts=parts, augment=replay)
    assert_close(
        norms.sort().values, torch.tensor(sorted(map(norm, means))).to(norms), rtol=1e-6, atol=1e-9
    )
    for name, found in total.items():
        expected = sum(g[name] * min(1.0, c / norm(g)) for g in means)
        assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("views_by_place")
@pytest.mark.parametrize("bound", [K, 7, "auto"])
def test_micro_batches_count_views_and_change_nothing(bound):
    made = Heard()

    def count_and_number(batch):
        made.append(len(batch[0]))
        return numbered(batch)

    found = []
    for most in (None, bound):
        model = net()
        with session(
            plan(1.0, augmentations=K, max_physical_batch_size=most),
            model,
            augment=count_and_number,
            verify=False,
        ) as s:
            train(s)
        sizes = [made.pop(0) for _ in range(len(made))]
        found.append(weights(model))
    assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    assert all(size % K == 0 for size in sizes)
    assert bound == "auto" or max(sizes) == bound // K * K


@pytest.mark.usefixtures("views_by_place")
@pytest.mark.parametrize("bound", [None, 6])
def test_a_patient_with_several_records_and_views_has_one_clip(bound):
    counts, (x, y) = (3, 1, 2), data()
    owners = np.repeat(np.arange(3), counts)
    settings = {
        "unit": "patient",
        "max_records_per_unit": 2 if bound else 3,
        "augmentations": K,
    }
    p = PrivacyConfig(
        expected_batch_size=3,
        steps=1,
        test_mode_seed=2,
        max_grad_norm=0.2,
        max_physical_batch_size=bound,
        **settings,
    ).with_noise(0.0, 1e-3, 3)
    mine, theirs = net(), net()
    optimizer = torch.optim.SGD(mine.parameters(), 1.0)
    with Session(
        p, mine, optimizer, (x[:6], y[:6]), units=owners, augment=numbered, verify=False
    ) as s:
        batch = next(s.batches())
        s.step(batch, loss_fn)
    total = {name: torch.zeros_like(q) for name, q in theirs.named_parameters()}
    for row in batch.records:
        own = torch.from_numpy(row[row >= 0]).repeat_interleave(K)
        grads = gradients(theirs, loss_fn(theirs, numbered((x[own], y[own]))))
        total = {n: t + grads[n] * min(1.0, 0.2 / norm(grads)) for n, t in total.items()}
    for name, q in mine.named_parameters():
        assert_close(
            q, dict(theirs.named_parameters())[name] - total[name] / 3, rtol=1e-9, atol=1e-11
        )


OWN = np.random.default_rng(0)


class Remembers:
    """An augment that keeps something of the batches it has seen."""

    def __init__(self, how):
        self.how, self.held = how, None

    def __call__(self, batch):
        x = batch[0]
        if self.how == "swallows":
            x = x.nan_to_num()
        mean = x.mean(0)
        before = mean if self.held is None else self.held
        if self.how == "first":
            self.held = before
        elif self.how == "running":
            self.held = 0.9 * before + 0.1 * mean
        else:
            self.held = mean
        return batch[0] - before, batch[1]


@pytest.mark.parametrize("how", ["first", "running", "swallows"])
@pytest.mark.parametrize("noise", [False, True])
def test_an_augment_that_remembers_other_batches_is_refused(how, noise):
    memory = Remembers(how)

    def augment(batch):
        return memory(noisy(batch) if noise else batch)

    with session(plan(1.0, augmentations=2), net(), augment=augment) as s:
        with pytest.raises(ValueError, match=r"augment (remembers earlier batches|mixes the rows)"):
            train(s)
        assert s.ledger.count == 0


def test_an_augment_that_leaves_torch_is_called_for_one_example_at_a_time():
    """What it does to a batch cannot be followed; of a batch of one, no other example is in
    reach.
    """
    sizes = Heard()

    def swap(batch):
        sizes.append(len(batch[0]))
        return torch.from_numpy(OWN.permuted(batch[0].numpy(), axis=1)), batch[1]

    ids = torch.randint(0, 50, (N, 8))
    model = nn.Sequential(nn.Embedding(50, 3), nn.Flatten(), nn.Linear(24, 3)).double()
    with session(plan(1.0), model, dataset=(ids, data()[1]), augment=swap) as s:
        batches = s.batches()
        s.step(next(batches), loss_fn)
        sizes.clear()
        s.step(batch := next(batches), loss_fn)
        assert s.unproved_operation == "Tensor.numpy"
    assert sizes == [1] * len(batch.indices)


@pytest.mark.parametrize("verify", [True, False])
def test_another_number_of_rows_is_refused(verify):
    def double(batch):
        return torch.cat([batch[0], batch[0]]), torch.cat([batch[1], batch[1]])

    with session(plan(1.0), net(), augment=double, verify=verify) as s:
        with pytest.raises(ValueError, match=r"augment made \d+ rows of \d+.*augmentations=K"):
            train(s)
        assert s.ledger.count == 0
    assert augment_batch(None, net(), "anything", 3) == "anything"


@pytest.mark.parametrize("operation", [None, Unknown("test", "as if nothing were proved")])
def test_dropout_draws_for_every_view_and_both_points_see_the_same(operation):
    """Two points of a filter: views and dropout masks of the second are those of the first.

    The random numbers are new in every run: in rows this wide no two masks leave out all numbers,
    which would make them equal.
    """
    seen = Heard()

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 3)).double()
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    x, y = torch.randn(4, 40, dtype=torch.float64), torch.randint(0, 3, (4,))
    sum_examples(
        model,
        (x, y),
        1.0,
        parts=layout(range(4), views=K),
        mode=GradientMode(unproved_operation=operation),
        points=[AT_MODEL_PARAMETERS, EvaluationPoint(weight=0.5)],
        augment=noisy,
    )
    first, second = seen[::2], seen[1::2]
    assert len(first) == (1 if operation is None else 4 * K)
    assert all(map(torch.equal, first, second))
    assert len({tuple(row.tolist()) for row in torch.cat(first)}) == 4 * K
