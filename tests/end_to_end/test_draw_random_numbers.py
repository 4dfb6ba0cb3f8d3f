"""Draw dropout, augmentations and batches from numbers that no seed makes known."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, default_collate

from dpkfc import rng_state
from dpkfc.gradients import find_layers
from tests.gradients.cases import sum_examples
from tests.integrations import opacus_cases
from tests.recording import Heard
from tests.sessions import assert_refused, cross_entropy, open_session, train
from tests.test_session import weights

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def seed_all(seed=42):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def net(p=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 3))


def jitter(batch):
    return batch[0] + torch.from_numpy(
        np.random.randn(*batch[0].shape)
    ).float() + random.random(), batch[1]


def sum_of(model, **settings):
    """Return the clipped sum over all rows, after all generators were seeded."""
    seed_all()
    found, _ = sum_examples(model, (X, Y), 1.0, cross_entropy, **settings)
    return torch.cat([x.flatten() for x in found.values()])


@pytest.mark.parametrize(("p", "augment"), [(0.5, None), (0.0, jitter)])
def test_a_seed_does_not_repeat_them(p, augment):
    once, twice, *repeated = (
        sum_of(net(p), augment=augment, repeatable=repeatable)
        for repeatable in (False, False, True, True)
    )
    assert not torch.allclose(once, twice) and torch.equal(*repeated)


@pytest.mark.parametrize("devices", [True, False])
def test_new_numbers_reach_every_generator_that_there_is(monkeypatch, devices):
    """Devices are seeded where there are any; where there are none that took longer than the rest
    of a small step.
    """
    everywhere = []
    monkeypatch.setattr(rng_state, "_devices", lambda: devices)
    monkeypatch.setattr(
        torch,
        "manual_seed",
        lambda seed: everywhere.append(seed) or torch.default_generator.manual_seed(seed),
    )
    found = []
    for _ in range(2):
        torch.default_generator.manual_seed(42), np.random.seed(42), random.seed(42)
        rng_state.renew()
        found.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert len(everywhere) == (2 if devices else 0)
    assert all(a != b for a, b in zip(*found, strict=True))


def test_the_generators_go_on_where_they_were():
    seed_all()
    expected = torch.rand(3), np.random.rand(3), random.random()
    sum_of(net(), augment=jitter)
    assert (
        torch.equal(torch.rand(3), expected[0])
        and (np.random.rand(3) == expected[1]).all()
        and random.random() == expected[2]
    )


@pytest.mark.parametrize("test_mode_seed", [None, 3])
def test_a_session_repeats_them_in_test_mode_alone(test_mode_seed):
    seen = Heard()

    def note_number(model, batch):
        seen.append(float(torch.rand(())))
        return cross_entropy(model, batch)

    for _ in range(2):
        model = net()
        seed_all()
        train(model, (X, Y), note_number, test_mode_seed=test_mode_seed, verify=False)
    half = len(seen) // 2
    assert (seen[:half] == seen[half:]) == (test_mode_seed is not None)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_in_the_shape_of_opacus(workers):
    found = []
    for _ in range(2):
        loader = DataLoader(
            TensorDataset(X, Y),
            batch_size=8,
            collate_fn=noisy,
            num_workers=workers,
            generator=torch.Generator().manual_seed(1),
        )
        *_, loader = opacus_cases.private(net(), data_loader=loader, test_mode_seed=None)
        seed_all()
        x, y = next(iter(loader))
        found.append((x - y.unsqueeze(1), torch.rand(())))
        del loader
    assert not torch.equal(found[0][0][:1], found[1][0][:1])
    assert found[0][1] != found[1][1]


def noisy(rows):
    """A collate function with random numbers of torch alone: what it hands out tells them."""
    y = torch.stack([row[1] for row in rows])
    return y.unsqueeze(1) + torch.rand(len(rows), 6), y


class Jittered(TensorDataset):
    """Draws from a generator of its own, whose numbers go to records in the order of reading."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.own = np.random.default_rng(0)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + self.own.random(), y


class JitteringCollate:
    def __init__(self):
        self.own = torch.Generator().manual_seed(0)

    def __call__(self, rows):
        x, y = default_collate(rows)
        return x + torch.rand(len(x), 1, generator=self.own), y


OWN = random.Random(0)


class OfTheModule(TensorDataset):
    """Draws from a generator that is a global variable of the program."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + OWN.random(), y


class Counting:
    """Gives each batch the number of those before it."""

    count = 0

    def __call__(self, rows):
        x, y = default_collate(rows)
        self.count += 1
        return x + self.count, y


def collate_from(own):
    def collate(rows):
        x, y = default_collate(rows)
        return x + float(own.random()), y

    return collate


def hold(dataset, **attributes):
    vars(dataset).update(attributes)
    return dataset


SAMPLER = RandomSampler(range(4), generator=torch.Generator())
OF_ITS_OWN = {
    "attribute": (Jittered(X, Y), default_collate),
    "subset": (Subset(Jittered(X, Y), range(40)), default_collate),
    "nested": (hold(TensorDataset(X, Y), transforms=[{"one": SAMPLER}]), default_collate),
    "global": (OfTheModule(X, Y), default_collate),
    "object": (TensorDataset(X, Y), JitteringCollate()),
    "closure": (TensorDataset(X, Y), collate_from(np.random.default_rng(0))),
    "tensors": ((X, Y), JitteringCollate()),
}
MESSAGE = "the dataset or collate_fn has a random generator of its own, or remembers earlier"


@pytest.mark.parametrize(("dataset", "collate"), OF_ITS_OWN.values(), ids=OF_ITS_OWN)
def test_a_random_generator_of_their_own_is_refused(dataset, collate):
    assert_refused(open_session(net(), dataset, collate_fn=collate), MESSAGE)


def test_a_collate_function_that_remembers_batches_is_refused_on_public_rows():
    session = open_session(net(), TensorDataset(X, Y), collate_fn=Counting())
    assert_refused(session, MESSAGE)


def test_the_global_generators_may_be_held():
    held = [np.random.mtrand._rand, random.random, torch.default_generator, np.random, random]
    assert train(net(), hold(TensorDataset(X, Y), own=held)).steps_done == 2


def test_a_generator_that_only_the_constructor_uses_may_be_held():
    class Made(TensorDataset):
        def __init__(self):
            self.own = np.random.default_rng(0)
            super().__init__(X + self.own.random(), Y)

        def __getitem__(self, i):
            return super().__getitem__(i)

    assert train(net(), Made()).steps_done == 2


@pytest.mark.parametrize("name", ["attribute", "object", "global"])
def test_an_opacus_script_over_such_records_is_refused_before_a_release(name):
    dataset, collate = OF_ITS_OWN[name]
    engine, model, _, loader = opacus_cases.private(
        net(), data_loader=DataLoader(dataset, batch_size=8, collate_fn=collate)
    )
    with pytest.raises(ValueError, match=MESSAGE):
        for x, _ in loader:
            model(x)
    assert not engine.ledger.count


@pytest.mark.parametrize("least", [-9.0, 0.0, 9.0])
def test_a_running_mean_is_refused_whatever_the_records_are(least):
    class Centred(TensorDataset):
        mean = 0.0

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return self.centre(x), y

        def centre(self, x):
            if x[0] > least:
                self.mean = 0.9 * self.mean + 0.1 * float(x.mean())
            return x - self.mean

    assert_refused(open_session(net(), Centred(X, Y)), MESSAGE)


def test_reads_that_are_counted_and_a_file_that_is_opened_late_are_no_memory():
    class Late(TensorDataset):
        reads, file, flip, cache = 0, None, False, None

        def __getitem__(self, i):
            self.reads += 1
            if self.cache is None:
                self.cache = {}
            if i not in self.cache:
                self.cache[i] = super().__getitem__(i)
            return self.cache[i]

    dataset = Late(X, Y)
    dataset[0]
    assert train(net(), dataset).steps_done == 2


def test_an_optimizer_with_a_closure_is_refused_before_anything_is_charged():
    model = net()

    class Sharp(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step()

    for kind in (torch.optim.LBFGS, Sharp):
        with pytest.raises(ValueError, match=f"{kind.__name__} steps with a closure"):
            open_session(model, (X, Y), optimizer=kind(model.parameters()))
    with pytest.raises(ValueError, match="SparseAdam cannot make a step .*dense gradients"):
        open_session(model, (X, Y), optimizer=torch.optim.SparseAdam(list(model.parameters())))


def test_a_filter_of_order_two_behind_variances_that_come_and_go():
    """The metric has one number for all coordinates in some steps, and one for each in others."""
    from dpkfc.curvature.base import Preconditioner, PreconditionerState
    from dpkfc.linalg.metric import Eigenbasis
    from dpkfc.postprocess import LowPass

    class OnAndOff(Preconditioner):
        def describe(self):
            return {"name": "on and off", "curvature_source": "none"}

        def is_due(self, step):
            return True

        def build(self, model, capture, step, rules=None):
            metric = {"0": Eigenbasis(1 + torch.rand(16, 7))} if step % 2 else {}
            return PreconditionerState(metric=metric, step=step)

    model = net(0.0)
    settings = {"readout": "natural", "postprocess": (LowPass(),), "preconditioner": OnAndOff()}
    session = train(model, (X, Y), lr=0.01, steps=5, **settings)
    assert session.steps_done == 5 and torch.isfinite(weights(model)).all()


@pytest.mark.parametrize("test_mode_seed", [None, 3])
def test_a_state_that_is_saved_after_a_step_tells_no_mask(test_mode_seed):
    """The Trainer puts the states of the generators into its checkpoints, and an earlier output
    follows from a later state.
    """
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    _, model, optimizer, loader = opacus_cases.private(
        net(), data_loader=loader, test_mode_seed=test_mode_seed
    )
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    drawn = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), drawn) == (test_mode_seed is not None)


def test_what_a_refresh_takes_up_goes_to_another_device_too():
    from dpkfc import KFAC, FeatureNoise
    from dpkfc.gradients.layer_contributions import capture

    model = net(0.0)
    layers = find_layers(model)
    built = KFAC(probe=FeatureNoise(6), probe_size=16, decay=0.5).build(
        model, lambda m, loss: capture(m, layers, loss), 0
    )
    moved = built.to("meta")
    for state, device in ((built, "cpu"), (moved, "meta")):
        sums = [side for of in state.running for layer in of.values() for side in layer.values()]
        tensors = [x for side in sums for x in vars(side).values() if isinstance(x, torch.Tensor)]
        assert tensors and all(x.device.type == device for x in tensors)
