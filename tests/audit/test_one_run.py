"""The audit in one run: its canaries are what they say, its score is the one of theory, honest runs
pass and broken ones fail.
"""

import functools
import math
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch
from torch import nn

import dpkfc.release_pipeline
from dpkfc.audit.appended_rows import AppendedRows
from dpkfc.audit.listener import Listener
from dpkfc.audit.one_run import audit_one_run, judge_canaries, plan_for_canaries
from dpkfc.audit.planted_loss import PlantedLoss
from dpkfc.audit.run_canaries import PlantedCanaries
from dpkfc.config import PrivacyConfig
from dpkfc.curvature import KFAC, NGD, AdaDPS, WhiteNoise
from dpkfc.data.sparse import SparseRows
from dpkfc.data.stored_rows import StoredRows
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.metric import Elementwise, Kronecker
from dpkfc.linalg.sides import Dense, Diagonal
from dpkfc.privacy.mechanism import Released
from dpkfc.session import Session
from dpkfc.step_record import Batch
from tests.audit.sizes import FULL, size
from tests.sessions import cross_entropy as loss

DELTA, EXAMPLES, CANARIES, STEPS, BATCH = 1e-5, 1000, 1000, size(100, 200), 200
PROBE = WhiteNoise((32,))
FEATURES = 32


def examples(count=EXAMPLES):
    generator = torch.Generator().manual_seed(0)
    x, teacher = (
        torch.randn(count, FEATURES, generator=generator),
        torch.randn(FEATURES, 4, generator=generator),
    )
    return x, (x @ teacher).argmax(1)


def network(width=64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 4),
    )


def settings(**options):
    given = {"expected_batch_size": BATCH, "steps": STEPS, "test_mode_seed": 3} | options
    return PrivacyConfig(**given)


def audit(plan, width=64, lr=0.3, **options):
    model = network(width)
    given = {"canaries": CANARIES, "seed": 1} | options
    return audit_one_run(
        plan, model, torch.optim.SGD(model.parameters(), lr=lr), examples(), loss, **given
    )


@pytest.fixture
def audited(monkeypatch):
    """Return the canaries and plans of all audits of a test, as they are when they are judged."""
    runs = []

    def judge(planted, plan, *others):
        runs.append((planted, plan))
        return judge_canaries(planted, plan, *others)

    monkeypatch.setattr(sys.modules[audit_one_run.__module__], "judge_canaries", judge)
    return runs


def measure_share(scores, shares, stddev):
    """Return how much a score grows with each time that its canary takes part, and the error."""
    deviations = np.asarray(shares, float) - np.mean(shares)
    squares = float((deviations**2).sum())
    return float((deviations * scores).sum()) / squares, stddev / math.sqrt(squares)


def is_heard(planted, plan):
    """Return whether canaries are as loud as theory says: C each time, up to 4.5 standard errors.

    This is asked of their scores over the run, and of their scores over pairs of steps.
    """
    pairs, shares = planted.pairs()
    stddev = plan.stddev * math.sqrt(2)
    run = planted.scores(), shares.sum(0), stddev * math.sqrt(len(pairs))
    found = [measure_share(*x) for x in ((pairs, shares, stddev), run)]
    return all(abs(share - plan.max_grad_norm) < 4.5 * error for share, error in found)


def record(evidence, row, result, **more):
    evidence("one-run", row, **result.describe() | more)


# -- runs that keep their promise, and runs that do not --------------------------------------------

# about ε = 4 in so many steps at this rate; the claim is what the accountant says
NOISE = size(1.4, 1.9)
METHODS = {
    "DP-SGD": {},
    "DP-KFC": {"preconditioner": KFAC(sides="both", probe=PROBE, every=7)},
    "DP-NGD": {
        "preconditioner": NGD(probe=PROBE, lambda_safe=1e-2, steps=STEPS, every=10),
        "readout": "natural",
    },
    "AdaDPS": {"preconditioner": AdaDPS(probe=PROBE, every=11)},
    "automatic clipping": {"clipping": "automatic"},
    "normalised clipping": {"clipping": "normalised"},
    "fixed batches": {"sampler": "fixed"},
}


@functools.cache
def claimed_by_poisson():
    """What the accountant says of the noise above; the same for every method, which is the point of
    them.
    """
    plan = settings().with_noise(NOISE, DELTA, EXAMPLES + CANARIES)
    claimed = plan.curve.epsilon(plan.steps)
    assert 3.5 < claimed < 4.5
    return claimed


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", size(["DP-SGD", "DP-KFC", "DP-NGD", "fixed batches"], list(METHODS))
)
def test_an_honest_run_stays_below_its_claim(method, audited, evidence):
    plan = settings(**METHODS[method]).with_noise(NOISE, DELTA, EXAMPLES)
    result = audit(
        plan, claimed_epsilon=None if method == "fixed batches" else claimed_by_poisson()
    )
    assert result.passed and 0 < result.epsilon_lower < result.claimed_epsilon
    # The canaries are heard in every coordinate system. `epsilon_lower` itself says little of that:
    # with fixed batches it is 0.4 on average, and 0.1 to 0.8 by the draws.
    assert is_heard(*audited[0])
    assert 0.5 < result.gaussian_lower / result.claimed_epsilon < 1.1
    assert result.noise > 0.95
    assert abs(result.included - CANARIES / 2) < 120
    assert result.finding().passed
    record(evidence, method, result)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not planted", "too quiet", "shuffled"])
def test_canaries_that_are_not_heard_are_noticed(fault, audited, monkeypatch):
    """With fixed batches, where the noise is largest."""
    if fault == "shuffled":
        observed = PlantedCanaries.pairs

        def shuffle(planted):
            heard, shares = observed(planted)
            return heard[:, np.random.default_rng(5).permutation(heard.shape[1])], shares

        monkeypatch.setattr(PlantedCanaries, "pairs", shuffle)
    else:
        left, planted_loss = {"not planted": 0.0, "too quiet": 4e-4}[fault], PlantedLoss.__call__

        def weaken(self, model, batch):
            is_canary = batch[-1] >= 0
            losses = planted_loss(self, model, batch)
            return torch.where(is_canary, left * losses, losses)

        monkeypatch.setattr(PlantedLoss, "__call__", weaken)
    audit(settings(sampler="fixed").with_noise(NOISE, DELTA, EXAMPLES), claimed_epsilon=9.0)
    assert not is_heard(*audited[0])


@pytest.mark.quick("*DP-SGD")
@pytest.mark.parametrize("method", ["DP-SGD", "DP-KFC"])
@pytest.mark.parametrize("kept", size([0.1, 0.8], [0.8, 0.1, 0.0]))
def test_a_run_with_too_little_noise_exceeds_its_claim(method, kept, monkeypatch, evidence):
    """The plan and the ledger speak of the whole noise; a fifth of it is missing, or more."""
    real = dpkfc.release_pipeline.release

    def weak(clipped, plan, *others):
        bare = {name: x / plan.expected_batch_size for name, x in clipped.tensors.items()}
        honest = real(clipped, plan, *others)
        return replace(
            honest,
            gradients={n: bare[n] + kept * (x - bare[n]) for n, x in honest.gradients.items()},
        )

    monkeypatch.setattr(dpkfc.release_pipeline, "release", weak)
    result = audit(
        settings(**METHODS[method]).with_noise(NOISE, DELTA, EXAMPLES), claimed_epsilon=3.0
    )
    assert not result.passed and (result.epsilon_lower > 3.0 or kept == 0.8)
    # The clipped gradients are heard too.
    assert kept - 0.1 < result.noise < kept + 0.1
    assert not result.finding().passed
    record(evidence, f"{method}, noise × {kept}", result)


# -- the training is the user's --------------------------------------------------------------------


def run(session, loss_fn):
    with session:
        for batch in session.batches():
            session.step(batch, loss_fn)


def test_the_plan_is_made_for_examples_and_canaries(monkeypatch):
    given = settings(steps=20).with_noise(2.0, DELTA, 400)
    whole = plan_for_canaries(given, 400, 100)
    assert (whole.dataset_size, whole.noise_multiplier, whole.steps) == (500, 2.0, 20)
    assert plan_for_canaries(whole, 400, 100) is whole
    with pytest.raises(ValueError, match="for 400 examples"):
        plan_for_canaries(given, 300, 10)
    asked = []
    monkeypatch.setattr(
        PrivacyConfig, "calibrate", lambda self, *target: asked.append(target) or whole
    )
    assert plan_for_canaries(replace(given, target_epsilon=3.0), 400, 100) is whole
    assert asked == [(3.0, DELTA, 500)]


def test_coins_come_from_the_operating_system_unless_seeded(monkeypatch):
    """The coins themselves are compared: 200 of them are equal by chance in one of 2^200 runs,
    their number in one of 18.
    """
    seen = []

    class Noted(PlantedCanaries):
        def __init__(self, *args, **options):
            seen.extend(x.copy() for x in args if isinstance(x, np.ndarray) and x.dtype == bool)
            super().__init__(*args, **options)

    monkeypatch.setattr(sys.modules[audit_one_run.__module__], "PlantedCanaries", Noted)
    plan = settings(steps=2).with_noise(1.0, DELTA, EXAMPLES)
    included = [
        audit(plan, canaries=200, seed=None, claimed_epsilon=1.0).included for _ in range(2)
    ]
    assert [len(coins) for coins in seen] == [200, 200] and [
        int(coins.sum()) for coins in seen
    ] == included
    assert not np.array_equal(*seen)
    first, second = (audit(plan, canaries=200, claimed_epsilon=1.0) for _ in range(2))
    assert np.array_equal(*seen[2:])
    assert (first.included, first.guesses, first.correct) == (
        second.included,
        second.guesses,
        second.correct,
    )


# -- what is planted, and how it is scored ---------------------------------------------------------


class Sequences(nn.Module):
    """A linear layer over positions."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(5, 12, bias=False), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)).mean(1))


def pictures():
    return nn.Sequential(
        nn.Conv2d(2, 7, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 16, 3)
    )


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,), "0"),
    "linear over positions, no bias": (Sequences, (4, 5), "inner"),
    "convolution": (pictures, (2, 8, 8), "0"),
    "behind a convolution": (pictures, (2, 8, 8), "3"),
}


def planted_in(case, coins, config=None):
    build, shape, layer = CASES[case]
    torch.manual_seed(1)
    model = build().double()
    data = (torch.randn(30, *shape).double(), torch.randint(0, 3, (30,)))
    config = config or settings(steps=4, expected_batch_size=20)
    plan = config.with_noise(0.5, DELTA, 30 + len(coins))
    return (
        model,
        PlantedCanaries(plan, model, data, loss, coins, np.random.default_rng(2), layer),
        plan,
    )


def gradient(model, planted, row):
    """Of one row of the dataset, by plain autograd."""
    batch = tuple(x[row : row + 1] for x in planted.dataset)
    names, parameters = zip(*model.named_parameters(), strict=True)
    value = planted.loss(model, batch).sum()
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for n, p, g in zip(names, parameters, found, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_a_planted_gradient_is_the_matrix_that_was_chosen(case):
    coins = np.array([True] * 5 + [False])
    model, planted, _ = planted_in(case, coins)
    listener = planted.listener
    signs = []
    for step in (0, 1):
        planted.start_step(Batch(step, np.arange(36)))
        signs.append(planted._signs)
        for i in range(6):
            found = gradient(model, planted, 30 + i)
            chosen = torch.outer(listener._u[i], listener._a[i]).double() * signs[-1][i] * coins[i]
            if "bias" in listener.layer.parameters:
                assert torch.allclose(found.pop(listener.layer.parameters["bias"]), chosen[:, -1])
                chosen = chosen[:, :-1]
            weight = found.pop(listener.layer.parameters["weight"])
            assert torch.allclose(weight.flatten(1), chosen)
            assert all(g.abs().max() == 0 for g in found.values())
            assert coins[i] == (weight.norm() > 100 * 1.0)
    assert set(signs[0]) == {-1, 1} and np.array_equal(signs[1], -signs[0])


def test_canaries_of_a_linear_layer_do_not_overlap():
    coins = np.ones(30, bool)
    _, planted, _ = planted_in("linear", coins)
    listener = planted.listener
    flat = torch.einsum("mo,mi->moi", listener._u, listener._a).flatten(1).double()
    unit = flat / flat.norm(dim=1, keepdim=True)
    assert torch.allclose(unit @ unit.T, torch.eye(30).double(), atol=2e-4)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_rows_of_canaries_lie_behind_rows_that_stay_where_they_are(is_sparse):
    dense, y = torch.eye(6)[:5] * 3, torch.arange(5)
    x = SparseRows(scipy.sparse.csr_array(dense.numpy())) if is_sparse else dense
    further = torch.full((2, 6), 7.0)
    rows = AppendedRows(x, further)
    whole = torch.cat([dense, further])
    assert isinstance(rows, StoredRows) and rows.shape == whole.shape and rows.dtype == x.dtype
    for index in (6, 0, [6, 2, 5, 6], torch.tensor([4, 5]), slice(3, 6), slice(None), []):
        assert torch.equal(rows[index], whole[index]), index
        assert torch.equal(rows.take(index), whole[index])
    rows[:].zero_()
    assert torch.equal(torch.stack(list(rows)), whole)
    assert torch.equal(torch.cat(list(rows.split(3))), whole)
    model = nn.Sequential(nn.Linear(6, 3))
    plan = settings(steps=2, expected_batch_size=4).with_noise(1.0, DELTA, 5 + 20)
    coins = np.ones(20, bool)
    planted = PlantedCanaries(plan, model, (x, y), loss, coins, np.random.default_rng(0))
    with Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), planted.dataset) as done:
        for batch in done.batches():
            planted.start_step(batch)
            done.step(batch, planted.loss)
    assert done.steps_done == 2 and torch.equal(dense, torch.eye(6)[:5] * 3)


@pytest.mark.parametrize("is_augmented", [False, True])
def test_no_example_decides_what_a_canary_contributes(is_augmented):
    model, (x, y) = network().double(), examples(30)
    plan = settings(steps=4, expected_batch_size=20).with_noise(0.5, DELTA, 60)
    planted = PlantedCanaries(
        plan,
        model,
        (torch.full_like(x.double(), torch.nan), y),
        loss,
        np.ones(30, bool),
        np.random.default_rng(2),
        "2",
        is_augmented=is_augmented,
    )
    assert all(g.isfinite().all() for g in gradient(model, planted, 30).values())


def test_no_example_decides_where_canaries_go_or_what_an_error_says():
    def picky(model, batch):
        if bool(batch[0].isnan().any()):
            raise RuntimeError("a private value")
        return loss(model, batch)

    model, (x, y) = network().double(), examples(30)
    rest = settings(steps=4, expected_batch_size=20).with_noise(0.5, DELTA, 60), model
    data = (torch.full_like(x.double(), torch.nan), y)
    coins, rng = np.ones(30, bool), np.random.default_rng(2)
    assert PlantedCanaries(*rest, data, picky, coins, rng).layer == "2"
    with pytest.raises(ValueError, match=r"accepts no rows .*nothing fits.*leave"):
        PlantedCanaries(*rest, data, lambda *_: {}["nothing fits"], coins, rng)


@pytest.mark.parametrize("more", [1, 2])
def test_canaries_in_too_many_batches_are_noticed(more):
    """Releases are made of planted gradients and noise; rates are the plan's, or twice that."""
    rng, coins = np.random.default_rng(3), np.arange(40) % 2 == 0
    model, planted, plan = planted_in("linear", coins, settings(steps=80, expected_batch_size=20))
    listener = planted.listener
    norms = listener._u.norm(dim=1) * listener._a.norm(dim=1)
    for step in range(80):
        rows = np.flatnonzero(rng.random(70) < more * 20 / 70)
        planted.start_step(Batch(step, rows))
        shares = torch.from_numpy(planted._is_taken * planted._signs).float() / norms
        matrix = torch.einsum("m,mo,mi->oi", shares, listener._u, listener._a).double()
        matrix = (matrix + plan.stddev * torch.from_numpy(rng.normal(size=matrix.shape))) / 20
        noisy = {"0.weight": matrix[:, :-1], "0.bias": matrix[:, -1]}
        planted.observe(
            Released(gradients=noisy, noise_variance=1.0, step=step, release=step + 1), {}
        )
    result = judge_canaries(planted, plan, claimed=1e3, seconds=0.0)
    assert abs(result.took_part - more * 20 / 70 * 80 * 20) < 80 and 0.9 < result.noise < 1.1
    assert result.passed == (more == 1)


# -- what is refused -------------------------------------------------------------------------------


def test_what_cannot_be_audited_is_refused_by_name():
    plan = settings(steps=2).with_noise(1.0, DELTA, EXAMPLES)
    for options, message in (
        ({"canaries": 3}, "at least 20 canaries"),
        ({"plan": settings(steps=1).with_noise(1.0, DELTA, EXAMPLES)}, "in pairs of steps"),
        ({"layer": "1"}, "no gradient can be planted in layer '1': choose one of 0, 2, 4"),
    ):
        with pytest.raises(ValueError, match=message):
            audit(**{"plan": plan} | options)
    patients = settings(steps=2, unit="patient", max_records_per_unit=2).with_noise(
        1.0, DELTA, EXAMPLES
    )
    with pytest.raises(ValueError, match="protects one patient"):
        audit(patients)


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.skipif(not FULL, reason="times are measured by `make assurance` alone")
@pytest.mark.parametrize("method", ["DP-SGD", "DP-KFC"])
def test_what_an_audit_costs_beside_a_training(method, evidence):
    config = settings(**METHODS[method] | {"steps": 60})
    plan = config.with_noise(NOISE, DELTA, EXAMPLES + CANARIES)
    plain, audited = [], []
    for _ in range(3):
        model, (x, y) = network(256), examples(EXAMPLES + CANARIES)
        started = time.perf_counter()
        run(Session(plan, model, torch.optim.SGD(model.parameters(), lr=0.3), (x, y)), loss)
        plain.append(time.perf_counter() - started)
        audited.append(audit(plan, width=256, claimed_epsilon=4.0).seconds)
    ratio = min(audited) / min(plain)
    evidence(
        "one-run", f"time, {method}", training_seconds=min(plain), seconds=min(audited), ratio=ratio
    )


@pytest.mark.parametrize("kind", ["kronecker", "elementwise"])
def test_the_score_is_the_inner_product_with_the_whitened_gradient(kind):
    """Each canary's gradient is whitened and normed on its own, for each release on its own."""
    torch.manual_seed(4)
    square = torch.randn(8, 8).double()
    square = square @ square.T + torch.eye(8)
    weight, bias = torch.rand(8, 6).double() + 0.1, torch.rand(8).double() + 0.1
    entry = {
        "kronecker": Kronecker(
            Diagonal(torch.rand(7).double() + 0.2),
            Dense(square, float(torch.linalg.norm(square, 2))),
        ),
        "elementwise": Elementwise({"weight": weight, "bias": bias}),
    }[kind]
    layer = find_layers(nn.Sequential(nn.Linear(6, 8)).double())[0]
    u = torch.randn(9, 8).double()
    a = torch.cat([torch.randn(9, 6).double(), torch.ones(9, 1).double()], 1)
    scale = torch.cat([weight, bias[:, None]], 1)
    gradients = [torch.outer(u[i], a[i]) for i in range(9)]
    whitened = [entry.apply(g) if kind == "kronecker" else g * scale for g in gradients]
    listener = Listener(layer, u, a)
    for step in range(2):
        # Another metric at the second step.
        metric = entry if step else None
        z = torch.randn(8, 7).double()
        noisy = {layer.parameters["weight"]: z[:, :-1], layer.parameters["bias"]: z[:, -1]}
        released = Released(gradients=noisy, noise_variance=1.0, step=step, release=step + 1)
        heard = listener.listen(released, {} if metric is None else {layer.name: metric})
        seen = gradients if metric is None else whitened
        expected = torch.stack([(w * z).sum() / w.norm() for w in seen])
        assert np.allclose(heard, expected.numpy())
