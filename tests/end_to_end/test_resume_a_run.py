"""Resume a run from its checkpoint: weights go on where they were, bit for bit in test mode.

`tests/audit/test_crash.py` kills runs at any moment.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from dpkfc.checkpoint import CheckpointError
from dpkfc.config import PrivacyConfig
from dpkfc.curvature import NGD, AdaDPS, PublicData
from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass, WeightEMA
from dpkfc.privacy.ledger import verify
from dpkfc.session import Session
from tests.test_session import N, data, kfac, loss_fn, net, plan, session, train, weights

# -- bit for bit in test mode ----------------------------------------------------------------------


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)


def adamw(model):
    first, *rest = model.parameters()
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.03}, {"params": rest}], 0.01, betas=(0.8, 0.95), amsgrad=True
    )


def tensor_rate(model):
    return torch.optim.Adam(model.parameters(), torch.tensor(0.01), foreach=False)


def plain(model):
    return torch.optim.SGD(model.parameters(), 0.05)


def milestones(optimizer):
    # its state has integers for keys
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 5], gamma=0.5)


def cosine(optimizer):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [3])


class Run:
    """Everything of a run that a script would build, in one place."""

    def __init__(self, folder, optimizer, schedule, **settings):
        inner = net()
        self.model = nn.Sequential(inner[0], inner[1], nn.Dropout(0.3), inner[2])
        self.optimizer = optimizer(self.model)
        self.schedule = None if schedule is None else schedule(self.optimizer)
        p = plan(1.0, **settings)
        self.session = Session(
            p, self.model, self.optimizer, data(), ledger_path=folder / "ledger.jsonl"
        )

    def train(self, steps):
        with self.session as s:
            for done, batch in enumerate(s.batches(), 1):
                s.step(batch, loss_fn)
                if self.schedule is not None:
                    self.schedule.step()
                if done == steps:
                    break

    def save(self, folder):
        self.session.save(
            folder,
            extra={"schedule": None if self.schedule is None else self.schedule.state_dict()},
        )

    def restore(self, folder):
        extra = self.session.restore(folder)
        if self.schedule is not None:
            self.schedule.load_state_dict(extra["schedule"])


ROWS = PublicData(
    torch.randn(30, 6, generator=torch.Generator().manual_seed(3)),
    torch.arange(30) % 3,
    provenance="other rows",
)
PRECONDITIONERS = {
    "averaged factors": kfac(decay=0.7),
    "factors that have not moved": kfac(decay=0.7, drift=0.45),
    "the last factors alone": kfac(drift=0.45, decay=0.0),
    "later probes of three examples": kfac(decay=0.7, later_probe_size=3),
    "factors of two probes": kfac(output_probe=ROWS, labels="given"),
    "NGD": NGD(probe=ROWS, lambda_safe=0.05, lambda_base=1e-3, steps=6, every=2),
    "AdaDPS": AdaDPS(probe=ROWS, batch_size=10, every=2),
}
FILTERS = {
    "DP-KFC, DiSK and AdamBC": (
        plain,
        {
            "postprocess": (DiSK(0.5), AdamBC(floor=1e-4)),
            "preconditioner": kfac(),
            "readout": "natural",
        },
    ),
    "DiSK and AdamW": (
        adamw,
        {"postprocess": DiSK(0.3, mode="storm", init="bias_corrected")},
    ),
    "low-pass, inverse": (
        adamw,
        {"postprocess": LowPass(), "preconditioner": kfac(), "readout": "inverse"},
    ),
    "EMA and SOFIM": (
        plain,
        {"postprocess": (EMA(0.5), SOFIM(direction="momentum", bias_correction=True, warmup=2))},
    ),
    "low-pass, DiSK and an average": (
        plain,
        {
            "postprocess": (LowPass((0.5,), (1.0, -0.5)), DiSK(0.5)),
            "weight_average": WeightEMA(0.9),
        },
    ),
}
CASES = [
    *[
        pytest.param(
            plain,
            None,
            {"preconditioner": x, "readout": "natural" if name == "NGD" else "whitened"},
            id=name,
        )
        for name, x in PRECONDITIONERS.items()
    ],
    *[
        pytest.param(optimizer, None, settings, id=name)
        for name, (optimizer, settings) in FILTERS.items()
    ],
    pytest.param(sgd, milestones, {}, id="sgd, milestones"),
    pytest.param(adamw, cosine, {"sampler": "fixed"}, id="adamw in groups, cosine, fixed size"),
    pytest.param(
        tensor_rate,
        None,
        {"sampler": "shuffle", "uncertified": True},
        id="a rate that is a tensor, shuffled",
    ),
    pytest.param(sgd, None, {"preconditioner": kfac(every=4)}, id="kfac between two refreshes"),
    pytest.param(
        adamw, cosine, {"preconditioner": kfac(every=4)}, id="kfac, adamw in groups, cosine"
    ),
    pytest.param(
        sgd,
        None,
        {"max_physical_batch_size": "auto"},
        id="micro-batches as they fit",
    ),
]


# Each kind of state once.
@pytest.mark.quick(
    *(
        "3-averaged factors",
        "3-factors that have not moved",
        "3-NGD",
        "3-AdaDPS",
        "3-sgd, milestones",
    ),
    *("3-DP-KFC, DiSK and AdamBC", "3-low-pass*", "3-EMA and SOFIM", "3-adamw*", "3-a rate*"),
    *("3-kfac between two refreshes", "3-micro-batches as they fit"),
)
@pytest.mark.parametrize(("optimizer", "schedule", "settings"), CASES)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_is_the_run(tmp_path, optimizer, schedule, settings, stop):
    whole = tmp_path / "whole"
    whole.mkdir()
    torch.manual_seed(7)
    reference = Run(whole, optimizer, schedule, **settings)
    torch.manual_seed(7)
    reference.train(6)
    torch.manual_seed(7)
    first = Run(tmp_path, optimizer, schedule, **settings)
    torch.manual_seed(7)
    first.train(stop)
    first.save(tmp_path / "checkpoint")
    torch.manual_seed(99)  # another process, another state of everything
    second = Run(tmp_path, optimizer, schedule, **settings)
    second.restore(tmp_path / "checkpoint")
    second.train(6)
    assert second.session.steps_done == 6
    assert torch.equal(weights(reference.model), weights(second.model))
    assert not torch.equal(weights(first.model), weights(second.model))
    if "weight_average" in settings:
        with reference.session.averaged_weights(), second.session.averaged_weights():
            assert torch.equal(weights(reference.model), weights(second.model))
    if schedule is not None:
        assert reference.schedule.get_last_lr() == second.schedule.get_last_lr()
    if "preconditioner" in settings:
        assert second.session.preconditioner.digest == reference.session.preconditioner.digest


def test_a_checkpoint_without_test_mode_holds_no_generator(tmp_path):
    for seed, expected in ((5, True), (None, False)):
        folder = tmp_path / str(seed)
        with session(plan(1.0, test_mode_seed=seed), net()) as s:
            train(s, 2)
            s.save(folder)
        meta = json.loads((folder / "manifest.json").read_text())["meta"]
        assert ("torch_rng" in meta) == expected
        assert meta["caveats"] == list(s.plan.caveats)
        assert bool(meta["caveats"]) == expected


def test_a_drawn_batch_survives_a_restore(tmp_path):
    """Otherwise a batch could be drawn again until its content pleases."""
    p = PrivacyConfig(expected_batch_size=8, steps=4).with_noise(1.0, 1e-3, N)
    with session(p, net(), ledger_path=tmp_path / "l.jsonl") as s:
        s.save(tmp_path / "first")
        drawn = next(s.batches())
        s.restore(tmp_path / "first")
        again = next(s.batches())
        assert again is drawn
        s.step(again, loss_fn)
        s.save(tmp_path / "second")
        drawn = next(s.batches())
        before = weights(s.model)
        with pytest.raises(RuntimeError, match="drawn for step 1 and not passed to session.step"):
            s.restore(tmp_path / "first")
        assert torch.equal(weights(s.model), before)
        s.restore(tmp_path / "second")
        s.step(drawn, loss_fn)
        # nothing is owed: an earlier state may be taken up, and its releases stay charged
        s.restore(tmp_path / "first")
        assert s.steps_done == 2
        train(s)
    assert len(verify(tmp_path / "l.jsonl").releases) == 4


class Labelled(nn.Linear):
    """A layer whose extra state is no tensor."""

    labels: object = ()

    def get_extra_state(self):
        return {"labels": self.labels}

    def set_extra_state(self, state):
        self.labels = state["labels"]


def test_extra_state_that_is_no_tensor_comes_back(tmp_path):
    def start_session(labels):
        model = nn.Sequential(Labelled(6, 3))
        model[0].labels = labels
        plan = PrivacyConfig(expected_batch_size=8, steps=2).with_noise(1.0, 1e-3, N)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return Session(
            plan, model.double(), optimizer, data(), ledger_path=tmp_path / "ledger.jsonl"
        )

    with start_session(["cat", "dog"]) as first:
        first.step(next(first.batches()), loss_fn)
        first.save(tmp_path / "checkpoint")
        first.model[0].labels = {object()}
        with pytest.raises(
            CheckpointError,
            match=r"plain\.0\._extra_state\.labels is a set, which no checkpoint can hold",
        ):
            first.save(tmp_path / "checkpoint")
    with start_session(None) as second:
        second.restore(tmp_path / "checkpoint")
        assert second.model[0].labels == ["cat", "dog"]
        assert torch.equal(second.model[0].weight, first.model[0].weight)


def test_bfloat16_weights_and_buffers_are_resumed(tmp_path):
    def build():
        model = net().to(torch.bfloat16)
        model.register_buffer("kept", torch.tensor(3.0))
        return session(
            plan(1.0), model, dataset=data(dtype=torch.bfloat16), ledger_path=tmp_path / "l.jsonl"
        ), model

    s, model = build()
    with s:
        train(s, 2)
        model.kept.fill_(4.0)
        s.save(tmp_path / "c")
    s, resumed = build()
    with s:
        assert s.restore(tmp_path / "c") is None
        assert torch.equal(weights(model), weights(resumed)) and float(resumed.kept) == 4.0
        assert s.steps_done == 2
