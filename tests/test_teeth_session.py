"""What a session must refuse or keep apart: private statistics in metrics and buffers, mixing,
autocast, unfreezing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpkfc.gradients.optimizer_step import check_optimizer
from tests.mutation_cases import (
    WIDTH,
    Handed,
    N,
    data,
    flat,
    kfac,
    loss_fn,
    net,
    plan,
    session,
    weights,
)
from tests.recording import Heard

# -- the metric at every refresh -------------------------------------------------------------------


@pytest.mark.quick("probe", "raw")
@pytest.mark.parametrize("scale", ["balanced", "probe", "raw", "trace"])
def test_no_refresh_sees_private_data(scale):
    """Weights that never move (lr = 0): on any private data the metric of every refresh is the
    same, bit for bit.
    """
    histories = []
    for shift, factor in ((0.0, 1.0), (3.0, 50.0)):
        model, found = net(), []
        p = plan(preconditioner=kfac(scale=scale), max_physical_batch_size=3)
        with session(p, model, Handed(model, lr=0.0), dataset=data(shift, factor)) as s:
            for batch in s.batches():
                s.step(batch, loss_fn)
                found.append((s.preconditioner.step, s.preconditioner.digest))
        histories.append(found)
    assert histories[0] == histories[1]
    assert sorted({step for step, _ in histories[0]}) == [0, 2, 4]
    assert len({digest for _, digest in histories[0]}) == 3  # another probe each time


def test_a_refresh_depends_on_released_weights_and_not_on_the_ones_to_come():
    """The metric of step k is the same whether the private data change before or after the release
    of step k - 1.
    """
    digests = []
    for changed_from in (6, 3):
        model, found = net(), {}
        x, y = data()
        with session(plan(preconditioner=kfac()), model, dataset=(x, y)) as s:
            for step, batch in enumerate(s.batches()):
                if step == changed_from:
                    x.mul_(30).add_(2)
                s.step(batch, loss_fn)
                found[s.preconditioner.step] = s.preconditioner.digest
        digests.append(found)
    assert digests[0][0] == digests[1][0] and digests[0][2] == digests[1][2]
    assert digests[0][4] != digests[1][4]  # by then the released weights differ


# -- verification ----------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Subtracts the mean over the batch, which one example alone cannot show to be wrong."""

    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


def mixing_loss(model, batch):
    losses = loss_fn(model, batch)
    return losses * losses.detach().mean()


class Read(torch.utils.data.Dataset):
    """Private rows that say which of them were read."""

    def __init__(self):
        self.x, self.y = data()
        self.rows = []

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.rows.append(int(i))
        return self.x[i], self.y[i]


class GroupsOfFour(nn.Module):
    """Mixes examples two apart: a pair cannot show it."""

    def forward(self, x):
        return x + 0.1 * x.roll(2, 0) if len(x) > 2 else x


MIXERS = {
    "loss": (net, mixing_loss),
    "module": (lambda: net(Mixer()), loss_fn),
    "fours": (lambda: net(GroupsOfFour()), loss_fn),
}


@pytest.mark.parametrize("where", MIXERS)
def test_mixing_is_refused_before_a_private_batch_is_read(where):
    """A few records in places that depend on no batch tell types and shapes; no other is read."""
    make, losses = MIXERS[where]
    model, rows = make(), Read()
    with session(plan(), model, dataset=rows) as s:
        before, batch = weights(model), next(s.batches())
        rows.rows.clear()
        with pytest.raises(ValueError, match="mixes examples|depends on the batch"):
            s.step(batch, losses)
        assert set(rows.rows) <= set(np.linspace(0, N - 1, 16).astype(int))
        assert s.ledger.count == 0
        assert torch.equal(weights(model), before)


def test_a_loss_that_begins_to_mix_later_gives_every_example_its_own_gradient():
    """A margin loss is zero on easy examples, and zeros agree with anything; the operations of
    every pass are followed.
    """

    def margin(model, batch):
        return F.relu(mixing_loss(model, batch)) if switch[0] else loss_fn(model, batch) * 0

    handed = []
    for bound in (None, 1):
        switch, model = [0.0], net()
        optimizer = Handed(model)
        with session(plan(max_physical_batch_size=bound), model, optimizer) as s:
            for batch in s.batches():
                s.step(batch, margin)
                switch[0] = 1.0
        handed.append(flat(g for step in optimizer.handed for g in step.values()))
    assert torch.allclose(*handed, rtol=1e-12)


def test_verification_happens_in_every_session_even_one_that_continues(tmp_path):
    """A checkpoint does not carry "verified" along: the loss of the next run may be another one."""
    p = plan()
    model = net()
    with session(p, model, ledger_path=tmp_path / "ledger.jsonl") as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
            break
        s.save(tmp_path / "checkpoint")
    model = net()
    with session(p, model, ledger_path=tmp_path / "ledger.jsonl") as s:
        s.restore(tmp_path / "checkpoint")
        with pytest.raises(ValueError, match="mixes examples"):
            s.step(next(s.batches()), mixing_loss)
        assert s.ledger.count == 1


# -- buffers and parameters written by a forward pass ----------------------------------------------


class Writer(nn.Module):
    """Keeps a statistic of what passes through it, from its n-th call in training mode on."""

    def __init__(self, write, after=0, persistent=True):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3), persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.write, self.after, self.calls = write, after, Heard()

    def forward(self, x):
        self.calls.extend([1] if self.training and x.shape[0] > 0 else [])
        if self.training and len(self.calls) > self.after:
            self.write(self, x.detach())
        return x


def in_place(m, x):
    m.seen += x.mean(0)


def through_data(m, x):
    m.seen.data += x.mean(0)


def replaced(m, x):
    m.seen = x.mean(0)


def counted(m, x):
    m.count += x.shape[0]


def resized(m, x):
    m.seen = torch.cat([m.seen, x.mean(0)])


@pytest.mark.quick("True-0-*", "False-3-in_place", "False-3-counted")
@pytest.mark.parametrize("write", [in_place, through_data, replaced, counted, resized])
@pytest.mark.parametrize(("verify", "after"), [(True, 0), (False, 0), (False, 3), (True, 12)])
def test_a_forward_pass_leaves_no_private_statistic_in_a_buffer(write, verify, after):
    """Whether it begins at once, behind the back of verification, or in the middle of a run.

    The check on public rows refuses it. Later a private value may have caused it, so that the run
    goes on.
    """
    model = net(Writer(write, after, persistent=write is not in_place))
    initial = {name: b.clone() for name, b in model.named_buffers()}
    with session(plan(max_physical_batch_size=3, steps=8), model, verify=verify) as s:
        done, before = 0, weights(model)
        for batch in s.batches():
            try:
                s.step(batch, loss_fn)
                done, before = done + 1, weights(model)
            except ValueError as error:
                assert verify and "changes the buffer '3." in str(error)
                break
            finally:
                found = dict(model.named_buffers())
                assert set(found) == set(initial)
                assert all(torch.equal(found[name], b) for name, b in initial.items())
        assert s.ledger.count == done == (0 if verify else 8)
        assert torch.equal(weights(model), before)


def test_a_parameter_that_the_forward_pass_writes_is_refused_before_anything_is_charged():
    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.centre += x.detach().mean(0)
            return x

    model = net(Drifting())
    before = flat(model[:3].parameters()).clone()
    with session(plan(), model, verify=False) as s:
        with pytest.raises(ValueError, match="writes to the parameter '3.centre'"):
            s.step(next(s.batches()), loss_fn)
        assert s.ledger.count == 0
    assert torch.equal(flat(model[:3].parameters()), before)


# -- autocast around a step ------------------------------------------------------------------------


class Exact(nn.Module):
    """A model whose own passes no ambient autocast reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3))
        self.table = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            # several positions: the Gram and the materialised norm
            rows = x.view(len(x), 1, WIDTH).expand(-1, 5, -1)
            ids = torch.arange(5).expand(len(x), 5) % 4
            return self.norm(self.body(rows) + self.table(ids)).sum(1)


def exact_loss(model, batch):
    with torch.autocast("cpu", enabled=False):
        return loss_fn(model, batch)


@pytest.mark.quick("identity")
@pytest.mark.parametrize("settings", [None, kfac()], ids=["identity", "kfac"])
def test_autocast_around_a_step_changes_nothing_of_norms_metric_and_release(
    settings,
):
    """With a forward pass of its own precision, a run under autocast is the run without, bit for
    bit.
    """
    runs = []
    x, y = data()
    for active in (False, True):
        model = Exact()
        optimizer, records = Handed(model), []
        p = plan(max_grad_norm=0.5, preconditioner=settings, max_physical_batch_size=3)
        with session(p, model, optimizer, dataset=(x.float(), y), verify=False) as s:
            for batch in s.batches():
                with torch.autocast("cpu", torch.bfloat16, enabled=active):
                    record = s.step(batch, exact_loss)
                records.append((record.median_norm, record.clipped_fraction))
        assert all(g.dtype == torch.float32 for handed in optimizer.handed for g in handed.values())
        runs.append((flat(g for handed in optimizer.handed for g in handed.values()), records))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def autocast_inside(model, batch):
    """Mixed precision as torch teaches it: the forward pass alone runs under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return nn.functional.cross_entropy(logits.float(), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("model", "losses", "around"),
    [
        (lambda: net(dtype=torch.float32), loss_fn, True),
        (lambda: net(dtype=torch.float32), autocast_inside, False),
        (Exact, autocast_inside, False),
        (Exact, exact_loss, True),
    ],
    ids=["around", "inside", "inside, exact model", "around, exact model"],
)
def test_verification_under_autocast_does_not_refuse_an_ordinary_model(model, losses, around):
    x, y = data()
    with (
        session(plan(), model(), dataset=(x.float(), y)) as s,
        torch.autocast("cpu", torch.bfloat16, enabled=around),
    ):
        s.step(next(s.batches()), losses)
        assert s.ledger.count == 1


# -- hooks and parameters that no session can take -------------------------------------------------


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_backward_hooks_of_modules_are_refused(kind, everywhere):
    model, heard = net(), []

    def hear(*_):
        heard.append(1)

    with session(plan(), model) as s:
        place = nn.modules.module if everywhere else model[2]
        handle = getattr(
            place, kind.replace("register_", "register_module_") if everywhere else kind
        )(hear)
        try:
            with pytest.raises(ValueError, match="module '.*' .* has a backward hook"):
                s.step(next(s.batches()), loss_fn)
        finally:
            handle.remove()
        assert not heard and s.ledger.count == 0
        s.step(next(s.batches()), loss_fn)


def test_a_complex_parameter_is_refused_by_name():
    model = nn.Sequential(
        nn.Linear(3, 2), nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.cfloat))})
    )
    with pytest.raises(ValueError, match=r"parameter '1\.w' is complex.*view_as_complex"):
        check_optimizer(torch.optim.SGD(model.parameters(), 0.1), dict(model.named_parameters()))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused_before_it_sees_one(kind):
    """`wandb.watch` and optimizers that step during the backward pass leave such hooks."""
    seen = []
    model = net()
    with session(plan(), model) as s:
        getattr(model[0].weight, kind)(seen.append)
        with pytest.raises(ValueError, match="'0.weight' has a hook on its gradient"):
            s.step(next(s.batches()), loss_fn)
        assert not seen and s.ledger.count == 0
