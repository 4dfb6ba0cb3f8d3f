"""The release pipeline: what is charged where, and what an optimizer is handed."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkfc import KFAC, Session
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.config import PrivacyConfig
from dpkfc.curvature.token_noise import TokenNoise
from dpkfc.gradients.optimizer_step import check_optimizer
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import ClippedSum, Released
from dpkfc.release_pipeline import ReleasePipeline, set_gradients
from tests.models import randn

STEPS = 5


class Identity:
    """Stands for a preconditioner and for the post-processing; changes nothing."""

    metric: Any = {}

    def apply(self, released, metric, layers, *, in_place):
        return released


def make_plan():
    return PrivacyConfig(expected_batch_size=2, steps=STEPS, test_mode_seed=1).with_noise(
        1.0, 1e-3, 20
    )


def new_ledger(plan):
    return Ledger.open(None, plan.hash, max_releases=plan.steps)


def make_pipeline(plan, ledger, **options):
    steps = Identity()
    return ReleasePipeline(
        plan,
        plan.noise_stream(),
        ledger,
        layers=(),
        preconditioning=steps,
        postprocess=steps,
        **options,
    )


def make_sum():
    return ClippedSum({"weight": torch.zeros(3)}, 1.0)


class Words(nn.Module):
    """Mean of the vectors of words; the first row is padding."""

    def __init__(self, *, tied):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 32, padding_idx=0), nn.Linear(32, 7, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(self.table(ids).mean(1))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize("readout", ["whitened", "natural"])
def test_noise_does_not_move_the_row_of_padding(optimizer, readout):
    for tied in (False, True):
        torch.manual_seed(0)
        model = Words(tied=tied)
        before = model.table.weight.detach().clone()
        kfac = (
            KFAC(probe=TokenNoise(7, 5, min_length=5, bare=True), probe_size=16)
            if readout == "natural"
            else None
        )
        config = PrivacyConfig(
            expected_batch_size=4, steps=2, preconditioner=kfac, readout=readout, test_mode_seed=1
        )
        data = torch.randint(0, 7, (20, 5)), torch.randint(0, 7, (20,))
        steps = optimizer(model.parameters(), lr=0.1)
        with Session(config.with_noise(1.0, 1e-3, 20), model, steps, data) as session:
            for batch in session.batches():
                session.step(batch, cross_entropy)
        moved = (model.table.weight != before).any(1)
        assert moved.sum() == (7 if tied else 6) and bool(moved[0]) == tied


def test_a_charge_made_before_is_charged_there_alone():
    plan = make_plan()
    own, ticket = new_ledger(plan), new_ledger(plan)
    pipeline = make_pipeline(plan, own)
    assert pipeline.release(make_sum(), 0, ledger=ticket).release == 1
    assert (own.count, ticket.count) == (0, 1)
    assert pipeline.release(make_sum(), 1).release == 1
    assert (own.count, ticket.count) == (1, 1)


@pytest.mark.parametrize("releases", range(STEPS + 1))
def test_a_ledger_is_charged_until_it_holds_as_many_releases_as_the_first(releases):
    plan = make_plan()
    ledger = new_ledger(plan)
    pipeline = make_pipeline(plan, ledger)
    pipeline.release(make_sum(), 0)
    pipeline.match_release_count(3, releases)
    assert ledger.count == max(1, releases)
    assert [line["step"] for line in ledger.releases] == [0] + [3] * (releases - 1)
    if releases > 1:
        facts = [
            {name: line[name] for name in ("stddev", "sensitivity")} for line in ledger.releases
        ]
        assert facts[1] == facts[0] == {"stddev": plan.stddev, "sensitivity": plan.sensitivity}


class Ranks:
    """The second of two processes, as `DistributedContext` shows itself there."""

    world_size, is_rank0 = 2, False

    def __init__(self, first, broadcast):
        self._first, self._broadcast = first, broadcast

    def broadcast_release(self, make, device):
        return self._broadcast()

    def broadcast_from_rank0(self, make):
        return self._first.count


@pytest.mark.parametrize("fails", [False, True])
def test_another_process_charges_what_the_first_has_charged_also_where_it_failed(fails):
    plan = make_plan()
    first, own = new_ledger(plan), new_ledger(plan)
    there = make_pipeline(plan, first)

    def broadcast():
        released = there.release(make_sum(), 0)
        if fails:
            raise ValueError("the first process failed after its charge")
        return released

    pipeline = make_pipeline(plan, own, ranks=Ranks(first, broadcast))
    if fails:
        with pytest.raises(ValueError, match="after its charge"):
            pipeline.release(make_sum(), 0)
    else:
        pipeline.release(make_sum(), 0)
    assert own.count == first.count == 1


@pytest.mark.parametrize("scale", [None, 0.5])
def test_every_gradient_is_replaced_by_the_update(scale):
    model = nn.Linear(3, 2)
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.grad = torch.full_like(p, 7.0)  # of an earlier step, or of the caller
    old = {name: p.grad for name, p in parameters.items()}
    gradients = {name: randn(p.shape) for name, p in parameters.items()}
    update = Released(gradients=gradients, noise_variance=None, step=0, release=1)
    set_gradients(torch.optim.SGD(model.parameters()), parameters, update, scale=scale)
    for name, p in parameters.items():
        expected = (gradients[name] * (1.0 if scale is None else scale)).float()
        assert p.grad is not old[name] and p.grad.dtype == p.dtype and torch.equal(p.grad, expected)


LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels last in 3 dimensions": lambda x: x.unflatten(0, (2, 4)).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "transposed": lambda x: x.flatten(1).t(),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "every second row": lambda x: x.flatten(1)[::2],
    "every second column": lambda x: x.flatten(1)[:, ::2],
    "every second entry": lambda x: x.flatten()[1::2],
    "a part of a vector": lambda x: x.flatten()[3:20],
    "a part of a channels-last tensor": lambda x: x.contiguous(memory_format=torch.channels_last)[
        :, 1:
    ],
    "one entry": lambda x: x[0, 0, 0, 0],
}
# Muon takes matrices alone; LBFGS and SparseAdam are refused.
OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop,
    torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor,
]  # fmt: skip


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_updates_the_right_entries_in_every_memory_order(kind, flags):
    settings = dict(flags, lr=0.1)
    if "momentum" in inspect.signature(kind).parameters:
        settings["momentum"] = 0.9
    plain_settings = {name: x for name, x in settings.items() if name not in flags}
    if "fused" in flags and "fused" not in inspect.signature(kind).parameters:
        pytest.skip("has no fused form")
    for layout in LAYOUTS.values():
        torch.manual_seed(0)
        values = torch.randn(8, 3, 4, 2)
        laid_out, plain = nn.Parameter(layout(values)), nn.Parameter(layout(values).clone())
        plain.data = plain.data.contiguous()
        pairs = [
            (p, kind([p], **own)) for p, own in ((laid_out, settings), (plain, plain_settings))
        ]
        for i in range(3):
            gradient = randn(plain.shape)
            update = Released(gradients={"p": gradient}, noise_variance=None, step=i, release=i + 1)
            for p, optimizer in pairs:
                set_gradients(optimizer, {"p": p}, update)
                optimizer.step()
            if i == 1:
                # A checkpoint in safetensors keeps values and not their order.
                for state in pairs[0][1].state.values():
                    for key, x in state.items():
                        state[key] = x.contiguous() if isinstance(x, Tensor) else x
        torch.testing.assert_close(laid_out.detach(), plain.detach(), rtol=1e-4, atol=1e-6)


def test_an_expanded_parameter_is_refused():
    p = nn.Parameter(torch.randn(1, 5).expand(4, 5))
    with pytest.raises(ValueError, match="'p' lie in one place of memory"):
        check_optimizer(torch.optim.SGD([p]), {"p": p})


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(kind, name) for kind in OPTIMIZERS for name in ("capturable", "differentiable")],
)
def test_a_setting_with_which_torch_makes_no_step_is_refused(kind, setting):
    p = nn.Parameter(torch.randn(3, 2))
    if setting not in inspect.signature(kind).parameters:
        pytest.skip(f"has no {setting}")
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot make a step .*change its set"):
        check_optimizer(kind([p], **{setting: True}), {"p": p})


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_tried_without_a_trace(kind, flags):
    if not set(flags) <= set(inspect.signature(kind).parameters):
        pytest.skip("has no such form")
    parameters = {
        "matrix": nn.Parameter(torch.randn(3, 2)),
        "number": nn.Parameter(torch.randn(())),
        "empty": nn.Parameter(torch.randn(0, 2)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
    }
    before = copy.deepcopy(parameters)
    optimizer = kind(parameters.values(), lr=0.1, **flags)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which replaces its step
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    settings = str(optimizer.state_dict())
    check_optimizer(optimizer, {name: p for name, p in parameters.items() if p.requires_grad})
    assert str(optimizer.state_dict()) == settings and not steps
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in parameters.items())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lr": float("nan")}, "lr"),
        ({"lr": torch.tensor(float("nan"))}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"lr": 0.0}, ""),
    ],
)
def test_a_setting_of_an_optimizer_that_is_not_finite_is_refused(settings, name):
    p = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([p], **{"lr": 0.1, **settings})
    if not name:
        return check_optimizer(optimizer, {"p": p})
    with pytest.raises(ValueError, match=f"{name} of the optimizer is .*; give a finite number"):
        check_optimizer(optimizer, {"p": p})
