"""What a session keeps apart or refuses: private statistics in metrics, autocast, hooks."""

import pytest
import torch
from torch import nn

from dpkfc.gradients.optimizer_step import check_optimizer
from tests.mutation_cases import WIDTH, Handed, data, flat, kfac, net, plan, session
from tests.sessions import cross_entropy as loss_fn

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
        x, y = data()
        with session(p, model, Handed(model, lr=0.0), dataset=(factor * x + shift, y)) as s:
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
def test_autocast_around_a_step_changes_nothing_of_norms_metric_and_release(settings):
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
