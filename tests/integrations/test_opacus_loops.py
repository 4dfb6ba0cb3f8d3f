"""Loops and losses of scripts for Opacus: each release equals a loop over single examples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.integrations.opacus_cases import B, N, data, loader, private
from tests.models import mlp


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def classes(n=N):
    return torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(8))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Releases:
    """Holds every release against the clipped sum of its batches, example by example."""

    def __init__(self, model, optimizer, loss=classify):
        self.model, self.loss = model, loss
        self.seen, self.count = [], 0
        optimizer.attach_step_hook(self.check)

    def check(self, optimizer):
        own = copy.deepcopy(self.model)
        expected = 0.0
        for batch in self.seen:
            for i in range(len(batch[0])):
                loss = self.loss(own, [x[i : i + 1] for x in batch])
                row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, own.parameters())])
                expected += row * (1.0 / row.norm()).clamp(max=1)
        found = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        torch.testing.assert_close(found, expected / B + torch.zeros_like(found))
        self.seen = []
        self.count += 1


class Heads(nn.Module):
    """Two outputs, by name."""

    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"kind": self.kind(h), "size": self.size(h).squeeze(-1)}


class Recurrent(nn.Module):
    """Makes its first state of the size of the batch."""

    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        states, _ = self.cells(x, torch.zeros(1, x.size(0), 4, dtype=x.dtype))
        return self.out(states[:, -1])


def learn_heads(model, batch):
    found = model(batch[0])
    return F.cross_entropy(found["kind"], batch[1]) + 0.3 * F.smooth_l1_loss(
        found["size"], batch[0][:, 0]
    )


def compare_pairs(model, batch):
    distance = F.pairwise_distance(model(batch[0]), model(batch[1]))
    return (batch[2] * distance**2 + (1 - batch[2]) * (1 - distance).clamp(min=0) ** 2).mean()


def focus(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (0.25 * (1 - torch.exp(-losses)) ** 2 * losses).mean()


def imitate(model, batch):
    with torch.no_grad():
        targets = F.softmax(TEACHER(batch[0]) / 2, 1)
    found = model(batch[0])
    soft = F.kl_div(F.log_softmax(found / 2, 1), targets, reduction="batchmean")
    return 0.5 * F.cross_entropy(found, batch[1]) + 2 * soft


def align(model, batch):
    rows = model(batch[0]).log_softmax(2).transpose(0, 1)
    n = len(batch[0])
    return F.ctc_loss(rows, batch[1], torch.full((n,), 8), torch.full((n,), 3))


def pick(model, batch):
    return -F.log_softmax(model(batch[0]), 1)[torch.arange(len(batch[1])), batch[1]].mean()


TEACHER = mlp()
LOSSES = {
    "two heads": (Heads, lambda: data().tensors, learn_heads),
    "three passes": (
        mlp,
        lambda: randn(3, N, 6).unbind(),
        lambda model, batch: F.triplet_margin_loss(*map(model, batch)),
    ),
    "pairs": (mlp, lambda: (*randn(2, N, 6).unbind(), (classes() > 0).double()), compare_pairs),
    "focal": (mlp, lambda: data().tensors, focus),
    "a teacher": (mlp, lambda: data().tensors, imitate),
    "picked by a range": (mlp, lambda: data().tensors, pick),
    "CTC": (
        lambda: nn.Linear(6, 5),
        lambda: (randn(N, 8, 6), classes(3 * N).view(N, 3) + 1),
        align,
    ),
    "a first state": (Recurrent, lambda: (randn(N, 5, 6), classes()), classify),
    "max pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(8 * 9, 3)
        ),
        lambda: (randn(N, 1, 8, 8), classes()),
        classify,
    ),
}


@pytest.mark.parametrize("make, tensors, loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_of_a_script_gives_the_release_of_a_loop_over_examples(make, tensors, loss):
    torch.manual_seed(0)
    dataset = TensorDataset(*tensors())
    _, model, optimizer, batches = private(
        make().double(), data_loader=torch.utils.data.DataLoader(dataset, batch_size=B)
    )
    releases = Releases(model, optimizer, loss)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        releases.seen.append(batch)
        optimizer.step()
    assert releases.count == len(batches)


def test_a_loop_with_two_phases_trains_in_one_of_them():
    _, model, optimizer, batches = private()
    releases = Releases(model, optimizer)
    for _ in range(2):
        for phase, source in (("train", batches), ("val", loader(16))):
            model.train(phase == "train")
            for batch in source:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    loss = classify(model, batch)
                    if phase == "train":
                        releases.seen.append(batch)
                        loss.backward()
                        optimizer.step()
                loss.item()
    assert releases.count == 2 * len(batches)


def test_an_evaluation_between_loss_and_backward_changes_no_release():
    _, model, optimizer, batches = private()
    releases, held_out = Releases(model, optimizer), data(16).tensors
    for batch in batches:
        loss = classify(model, batch)
        model.eval()
        with torch.no_grad():
            classify(model, held_out)
        model.train()
        optimizer.zero_grad()
        loss.backward()
        releases.seen.append(batch)
        optimizer.step()
    assert releases.count == len(batches)


SCHEDULES = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "a warm start": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ConstantLR(o)],
        [3],
    ),
}


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_schedule_of_the_learning_rate_steps_as_without_privacy(make, before):
    model, plain = mlp(), torch.optim.SGD(mlp().parameters(), 0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = make(optimizer) if before else None
    _, model, optimizer, batches = private(model, optimizer=optimizer)
    schedule, expected = schedule or make(optimizer), make(plain)
    releases = Releases(model, optimizer)
    for batch in batches:
        optimizer.zero_grad()
        classify(model, batch).backward()
        releases.seen.append(batch)
        optimizer.step()
        schedule.step()
        plain.step()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["momentum"] == plain.param_groups[0]["momentum"]
    assert releases.count == len(batches)
