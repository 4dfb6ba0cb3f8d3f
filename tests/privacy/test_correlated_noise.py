"""Correlated noise: C w is independent noise, a record's rows never overlap, and the event says so.

Each bug that is planted here must be noticed by the check beside it.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpkfc import KFAC, PrivacyConfig, Session, resume_checks
from dpkfc.config import Plan
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.data.sampling import CyclicPoisson, Poisson
from dpkfc.postprocess import EMA, AdamBC, DiSK
from dpkfc.privacy import rng
from dpkfc.privacy.budget import Budget
from dpkfc.privacy.correlated_noise import BandedNoise, Recursion, choose_bands
from dpkfc.privacy.quick_epsilon import quick_epsilon
from dpkfc.privacy.rng import NoiseStream
from dpkfc.report.total import total_of_ledgers
from dpkfc.report.verify import verify_ledger
from dpkfc_verify.run import verify_run
from tests.sessions import cross_entropy
from tests.verifier.folders import chain, edit_card, head_of, read_lines

N, B, BANDS, STEPS = 60, 6, 4, 11


class Recorded(Session):
    """A session that keeps every clipped sum, its release, its batch and the ledger's place."""

    def _release(self, clipped):
        place = self.ledger.steps
        sums = {name: x.clone() for name, x in clipped.tensors.items()}
        released = super()._release(clipped)
        self.seen.append((place, self._pending.indices, sums, released))
        return released


def make_plan(bands=BANDS, seed=5, sigma=1.0, **settings):
    values = {"expected_batch_size": B, "steps": STEPS, "noise": "correlated", "bands": bands}
    config = PrivacyConfig(**values | {"test_mode_seed": seed} | settings)
    return config.with_noise(sigma, 1e-3, N)


def open_session(plan, width=3, ledger=None, **settings):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, width, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (N,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(width, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Recorded(plan, model, optimizer, (x, y), ledger_path=ledger, **settings)
    session.seen = []
    return session


def train(session, steps=STEPS):
    for batch in itertools.islice(session.batches(), steps):
        session.step(batch, cross_entropy)
    return session


def noise_of(session):
    """Return w of every release `[releases, numbers]`."""
    rows = []
    for _, _, sums, released in session.seen:
        divisor = session.plan.expected_batch_size
        parts = [divisor * released.gradients[name] - x for name, x in sums.items()]
        rows.append(torch.cat([part.flatten() for part in parts]).numpy() / session.plan.stddev)
    return np.array(rows)


def solve(z, coefficients):
    """Return C⁻¹ z row by row, by forward substitution in a plain loop."""
    rows = []
    for t in range(len(z)):
        row = z[t].copy()
        for k in range(1, min(t + 1, len(coefficients))):
            row -= coefficients[k] * rows[t - k]
        rows.append(row / coefficients[0])
    return np.array(rows)


def coefficients_of_root(bands):
    """Return the first coefficients of 1/√(1 − x), scaled to norm 1."""
    column = np.array([math.comb(2 * k, k) / 4**k for k in range(bands)])
    return column / math.sqrt(sum(column**2))


def draws_of_seed(session):
    stream = NoiseStream.repeatable(5)
    size = sum(x.numel() for x in session.seen[0][2].values())
    steps = [released.step for *_, released in session.seen]
    return np.array([stream.normal(size, step, "float64") for step in steps])


# -- the noise of a run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bands": 2},
        {"bands": STEPS - 1},
        {"postprocess": (DiSK(),)},
        {"preconditioner": KFAC(probe=FeatureNoise(3), probe_size=32, every=3)},
        {
            "preconditioner": KFAC(probe=FeatureNoise(3), probe_size=32, every=3),
            "readout": "natural",
        },
        {"max_physical_batch_size": 2},
        {"expected_batch_size": 1},
    ],
    ids=["plain", "two", "most", "DiSK", "metric", "natural", "micro", "empty"],
)
def test_the_noise_of_a_run_is_the_inverse_times_independent_draws(settings):
    session = train(open_session(make_plan(**settings)))
    expected = solve(draws_of_seed(session), coefficients_of_root(session.plan.bands))
    assert np.allclose(noise_of(session), expected, atol=1e-9)
    sizes = [len(indices) for _, indices, *_ in session.seen]
    assert (min(sizes) == 0) == (session.plan.expected_batch_size == 1)
    # The stated variance is the variance of such a row.
    rows = np.linalg.inv(_matrix(session.plan.bands, STEPS))
    scale = (session.plan.stddev / session.plan.expected_batch_size) ** 2
    for row, (*_, released) in zip(rows, session.seen, strict=True):
        assert released.noise_variance == pytest.approx(scale * (row**2).sum())


def _matrix(bands, steps):
    column = coefficients_of_root(bands)
    return sum(column[k] * np.eye(steps, k=-k) for k in range(min(bands, steps)))


def draw_numbers(stream, release, size, dtype, threads=1):
    out = np.empty(size, dtype)

    def use(begin, z):
        out[begin : begin + len(z)] = z

    draw = stream.correlated_draw(size, release, dtype, release + 1, BandedNoise(3))
    draw.hand_out(use, threads)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_without_its_cache_is_the_same_to_the_bit(dtype, monkeypatch):
    """What is kept is dropped, lost midway, too large for the memory, or made by threads."""
    monkeypatch.setattr(rng, "CHUNK", 16)
    size, releases = 9 * 16 + 7, 7

    def run(prepare, **settings):
        stream = NoiseStream.repeatable(5)
        rows = []
        for release in range(releases):
            prepare(stream, release)
            rows.append(draw_numbers(stream, release, size, dtype, **settings))
        return np.array(rows)

    def drop(stream, release):
        if release in {3, 4}:
            stream._recursions.clear()

    def bound(stream, release):
        stream.most_kept_bytes = 3 * 2 * 16 * np.dtype(dtype).itemsize
        assert len(stream._recursions) == (3 if release else 0)

    def go_back(stream, release):
        if release == 2:
            stream.kept = copy.deepcopy(stream._recursions)
        if release in {4, 6}:
            stream._recursions = stream.kept

    plain = NoiseStream.repeatable(5)
    z = np.array([plain.normal(size, step, dtype) for step in range(releases)])
    w = run(lambda stream, release: None)
    assert w.dtype == np.dtype(dtype)
    assert np.allclose(w, solve(z.astype(float), coefficients_of_root(3)), atol=1e-6)
    for prepare in (drop, bound, go_back):
        assert np.array_equal(run(prepare), w)
    assert np.array_equal(run(lambda stream, release: None, threads=2), w)


def test_a_release_that_fails_midway_leaves_the_next_one_right(monkeypatch):
    monkeypatch.setattr(rng, "CHUNK", 16)
    stream, plain = NoiseStream.repeatable(5), NoiseStream.repeatable(5)
    z = np.array([plain.normal(40, step, "float64") for step in range(6)])
    w = solve(z, coefficients_of_root(3))
    advance = Recursion.advance

    def fail(recursion, numbers):
        advance(recursion, numbers)
        raise MemoryError

    for release in range(6):
        if release == 1:
            draw = stream.correlated_draw(40, release, "float64", release + 1, BandedNoise(3))
            next(iter(draw))
        elif release == 3:
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(Recursion, "advance", fail)
                draw_numbers(stream, release, 40, "float64")
        else:
            found = draw_numbers(stream, release, 40, "float64")
            assert np.allclose(found, w[release], atol=1e-12)


@pytest.mark.parametrize("change", ["a fork", "a gap", "size", "dtype", "bands"])
def test_the_correlation_begins_anew(change: str, monkeypatch) -> None:
    stream = NoiseStream.repeatable(5)
    settings = {"size": 40, "dtype": "float64", "release": 1, "correlation": BandedNoise(3)}
    for release in (1, 2):
        list(stream.correlated_draw(**settings | {"release": release}, step=release))
    assert stream.correlated_draws == 2
    settings["release"] = 3
    other = {"a gap": ("release", 4), "size": ("size", 39), "dtype": ("dtype", "float32")}
    name, value = other.get(change, ("correlation", BandedNoise(2)))
    if change == "a fork":
        monkeypatch.setattr(rng._Process, "forks", rng.count_forks() + 1)
    else:
        settings[name] = value
    (piece,) = stream.correlated_draw(**settings, step=3)
    z = NoiseStream.repeatable(5).normal(settings["size"], 3, settings["dtype"])
    c_0 = coefficients_of_root(settings["correlation"].bands)[0]
    assert np.allclose(piece, z / c_0, atol=1e-6)
    assert stream.correlated_draws == 1


@pytest.mark.quick("2-*", "24-*")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 6e-7), ("float64", 3e-14)])
@pytest.mark.parametrize("bands", [2, 24, 150])
def test_the_recursion_stays_at_the_dense_solution(dtype, most, bands):
    """Over 2,000 steps, in float64; what is released is w, so C w is compared with z too."""
    steps = 2000
    z = np.random.default_rng(0).standard_normal((steps, 8)).astype(dtype)
    recursion = Recursion(BandedNoise(bands), 8, dtype)
    w = z.copy()
    for row in w:
        recursion.advance(row)
    matrix = _matrix(bands, steps)
    expected = np.linalg.solve(matrix, z.astype(float))
    assert abs(w - expected).max() < most
    assert abs(matrix @ w - z).max() < most


def test_secret_noise_has_the_covariance_of_the_inverse():
    session = train(open_session(make_plan(seed=None), width=4000), 6)
    w = noise_of(session)
    inverse = np.linalg.inv(_matrix(BANDS, 6))
    found, expected = w @ w.T / w.shape[1], inverse @ inverse.T
    # Six standard deviations of a mean product.
    spread = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / w.shape[1])
    assert (abs(found - expected) < 6 * spread).all()
    # Independent noise and bands in another order would be noticed.
    other = np.linalg.inv(_matrix(BANDS, 6).T)
    for wrong in (np.diag(np.diag(expected)), np.eye(6), other @ other.T):
        assert (abs(found - wrong) > 6 * spread).any()


def test_one_band_is_independent_noise_to_the_bit():
    one, plain = make_plan(1), make_plan(None, noise="gaussian")
    assert one.hash == plain.hash
    assert one == plain
    weights = [train(open_session(plan)).model.state_dict() for plan in (one, plain)]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


# -- a record's rows never overlap -----------------------------------------------------------------


def check_sensitivity(plan):
    """Check by all patterns of participation that k times cost k columns of norm 1."""
    recursion = Recursion(BandedNoise(plan.bands), STEPS, "float64")
    inverse = np.eye(STEPS)
    for row in inverse:
        recursion.advance(row)
    matrix = np.linalg.inv(inverse)
    separation = plan.sampler.separation
    for k in (1, 2, 3):
        for steps in itertools.combinations(range(STEPS), k):
            if min(np.diff(steps), default=separation) >= separation:
                moved = matrix[:, steps].sum(1)
                assert moved @ moved <= k * (1 + 1e-9)
    assert plan.count_events(STEPS) >= math.ceil(STEPS / separation)


def check_turns(session):
    """Check that a record takes part once in `bands` releases, and as often as is accounted."""
    bands = session.plan.bands
    places = {}
    for place, indices, *_ in session.seen:
        for record in indices.tolist():
            places.setdefault(record, []).append(place)
    assert all(min(np.diff(p), default=bands) >= bands for p in places.values())
    assert max(map(len, places.values())) <= session.plan.count_events(session.plan.steps)


def test_k_participations_cost_k_columns():
    check_sensitivity(make_plan())
    check_turns(train(open_session(make_plan(expected_batch_size=15))))


def test_a_wrong_sensitivity_is_noticed(monkeypatch):
    right = BandedNoise.coefficients.func

    def patch(change):
        monkeypatch.setattr(BandedNoise, "coefficients", property(change))

    patch(lambda noise: right(noise) / right(noise)[0])  # not normed
    with pytest.raises(AssertionError):
        check_sensitivity(make_plan())
    patch(lambda noise: right(BandedNoise(noise.bands + 1)))  # one band too many
    with pytest.raises(AssertionError):
        check_sensitivity(make_plan())


def test_a_sampler_without_turns_is_noticed_and_refused(monkeypatch):
    plan = make_plan(expected_batch_size=15)
    with pytest.raises(ValueError, match=r"'poisson' may draw an example twice in 4 steps"):
        Plan(**vars_of(plan) | {"sampler": Poisson(0.1, N)})
    with pytest.raises(ValueError, match="too often for 4 bands"):
        Plan(**vars_of(plan) | {"sampler": CyclicPoisson(0.3, N, 3)})
    turns = CyclicPoisson.indices
    monkeypatch.setattr(
        CyclicPoisson, "indices", lambda s, step, generator: turns(s, step // 2, generator)
    )
    with pytest.raises(AssertionError):
        check_turns(train(open_session(plan)))


def vars_of(plan):
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_batches_have_the_rate_of_the_event():
    plan = make_plan()
    rate = plan.event.sampling_probability
    assert rate == pytest.approx(BANDS * B / N)
    stream = plan.sampling_stream()
    drawn = np.zeros(N)
    rounds = 2000
    for step in range(BANDS * rounds):
        drawn[plan.draw(step, stream)] += 1
    deviations = (drawn - rounds * rate) / math.sqrt(rounds * rate * (1 - rate))
    assert abs(deviations).max() < 5
    uneven = CyclicPoisson(1.0, 10, 3)
    groups = [uneven.indices(step, stream.generator(step)) for step in range(3)]
    assert sorted(np.concatenate(groups)) == list(range(10))
    assert sorted(map(len, groups)) == [3, 3, 4]


# -- crashes and resumptions -----------------------------------------------------------------------


def crash_and_resume(folder, seed=None, **settings):
    """Make 7 releases, and go on from a checkpoint after 5 of them."""
    plan = make_plan(seed=seed, expected_batch_size=15, **settings)
    ledger = folder / "ledger.jsonl"
    with open_session(plan, 300, ledger) as first:
        train(first, 5)
        first.save(folder / "checkpoint")
        train(first, 2)
    with open_session(plan, 300, ledger) as second:
        second.restore(folder / "checkpoint")
        train(second)
    second.first, second.seen = len(first.seen), first.seen + second.seen
    return second


def check_fresh(session):
    """Check that the noise of a resumed run has nothing in common with the noise before."""
    w = noise_of(session)
    before, after = w[: session.first], w[session.first :]
    assert abs(before @ after.T / w.shape[1]).max() < 6 * 2 / math.sqrt(w.shape[1])
    check_white(after)


def test_a_resumed_run_takes_further_turns_with_fresh_noise(tmp_path):
    session = crash_and_resume(tmp_path)
    assert [place for place, *_ in session.seen] == list(range(STEPS))
    check_turns(session)
    check_fresh(session)
    tensors, meta = resume_checks.read_session(tmp_path / "checkpoint")
    assert set(tensors) == {"model"}
    assert "noise" not in json.dumps(meta, default=str)


def go_back(folder):
    """Make 7 releases, and load an older checkpoint in the same process."""
    session = open_session(make_plan(seed=None, expected_batch_size=15), 1000)
    train(session, 5)
    session.save(folder / "checkpoint")
    train(session, 2)
    session.restore(folder / "checkpoint")
    return train(session)


def check_white(w):
    """Check that C times the noise of releases is white: each has one draw of its own."""
    z = _matrix(BANDS, len(w)) @ w
    assert np.allclose(z @ z.T / w.shape[1], np.eye(len(z)), atol=6 * 1.5 / math.sqrt(w.shape[1]))


def test_a_restored_session_takes_further_turns_too(tmp_path):
    session = go_back(tmp_path)
    check_white(noise_of(session))
    assert [place for place, *_ in session.seen] == list(range(STEPS))
    assert [released.step for *_, released in session.seen] == [*range(7), *range(5, 9)]
    check_turns(session)


def test_turns_by_steps_are_noticed_after_a_crash(tmp_path, monkeypatch):
    turns = CyclicPoisson.indices

    def draw(session):
        generator = session.plan.generator(session._step, session._sampling)
        return turns(session._sampler, session._step, generator), None

    monkeypatch.setattr(Session, "_draw", draw)
    with pytest.raises(AssertionError):
        check_turns(crash_and_resume(tmp_path))


def test_noise_that_is_used_again_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(rng, "draw_key", lambda: bytes(32))
    with pytest.raises(AssertionError):
        check_fresh(crash_and_resume(tmp_path))


def test_a_stale_cache_is_noticed(tmp_path, monkeypatch):
    """Kept noise goes back with the weights, as if it were the noise of the last releases."""
    kept = {}
    save, restore = Session.save, Session.restore

    def keep(session, *args, **options):
        save(session, *args, **options)
        kept.update(copy.deepcopy(session._pipeline.noise._recursions))

    def restore_draws(session, *args, **options):
        restore(session, *args, **options)
        noise = session._pipeline.noise
        for chunk, old in kept.items():
            old.draws = noise._recursions[chunk].draws
        noise._recursions = kept

    monkeypatch.setattr(Session, "save", keep)
    monkeypatch.setattr(Session, "restore", restore_draws)
    with pytest.raises(AssertionError):
        check_white(noise_of(go_back(tmp_path)))


def test_noise_beyond_the_free_memory_is_drawn_again(monkeypatch, caplog):
    plan = make_plan()
    expected = noise_of(train(open_session(plan)))
    assert not caplog.records
    monkeypatch.setattr("dpkfc.session.available_bytes", lambda: 100)
    session = open_session(plan)
    assert "noise of 4 bands takes 0 MiB, more than a quarter of the free memory" in caplog.text
    assert np.array_equal(noise_of(train(session)), expected)
    assert not session._pipeline.noise._recursions


def test_a_charge_without_a_release_uses_the_turn_up(monkeypatch):
    session = open_session(make_plan(expected_batch_size=15))
    train(session, 3)

    def fail(*args):
        raise MemoryError("no noise")

    with monkeypatch.context() as patched:
        patched.setattr(NoiseStream, "correlated_draw", fail)
        with pytest.raises(MemoryError):
            train(session, 1)
    assert session.ledger.steps == 4
    train(session)
    assert [place for place, *_ in session.seen] == [0, 1, 2, *range(4, STEPS)]
    check_turns(session)
    z = draws_of_seed(session)
    parts = [solve(part, coefficients_of_root(BANDS)) for part in (z[:3], z[3:])]
    assert np.allclose(noise_of(session), np.concatenate(parts), atol=1e-9)


# -- accounting, ledger and card -------------------------------------------------------------------


def test_epsilon_is_that_of_jax_privacy():
    stated = json.loads(Path(__file__).with_name("bandmf.json").read_text("utf-8"))
    assert len(stated["rows"]) == 50
    for number, (n, batch, steps, bands, sigma, delta, epsilon) in enumerate(stated["rows"]):
        plan = PrivacyConfig(
            expected_batch_size=batch, steps=steps, noise="correlated", bands=bands
        ).with_noise(sigma, delta, n)
        own = quick_epsilon([(plan.event, plan.count_events(steps))], delta)
        assert own.value == pytest.approx(epsilon, abs=1e-3 * max(1, epsilon))
        if number % 10 == 0:
            assert plan.epsilon() == pytest.approx(epsilon, abs=1e-3 * max(1, epsilon))


def test_ledger_and_card_count_what_the_plan_counts(tmp_path):
    with open_session(make_plan(seed=None, sigma=2.0), ledger=tmp_path / "ledger.jsonl") as session:
        train(session)
        card = session.write_card(tmp_path, title="x", chosen_by="x", not_private={})
        spent = session.epsilon
    assert card["guarantee"]["epsilon"] == spent == session.plan.epsilon()
    assert card["mechanism"]["bands"] == BANDS
    assert "over 4 consecutive steps" in (tmp_path / "privacy_card.md").read_text("utf-8")
    facts = verify_ledger(tmp_path / "ledger.jsonl")
    assert facts["ε by PLD at δ = 0.001"] == pytest.approx(spent)
    assert total_of_ledgers([tmp_path]).epsilon == pytest.approx(spent)
    report = verify_run(tmp_path)
    assert report.verdict == "holds", report.reason
    assert report.epsilon == pytest.approx(spent, rel=1e-3)
    budget = Budget(tmp_path / "people.toml", epsilon=spent + 0.01, delta=1e-3)
    assert budget.check(session.plan, STEPS).after == pytest.approx(spent)


@pytest.mark.parametrize("groups", [None, 3, 8])
def test_a_ledger_with_other_groups_is_noticed(tmp_path, groups):
    with open_session(make_plan(seed=None, sigma=2.0), ledger=tmp_path / "ledger.jsonl") as session:
        train(session)
        session.write_card(tmp_path, title="x", chosen_by="x", not_private={})
    lines = read_lines(tmp_path)
    lines[0]["groups"] = groups
    chain(tmp_path, lines)
    edit_card(tmp_path, lambda card: card["ledger"].update(head=head_of(tmp_path)))
    found = {x["check"]: x["verdict"] for x in verify_run(tmp_path).findings}
    assert found["ledger"] == "holds"
    assert found["plan"] == found["statements of the card"] == "does not hold"


# -- settings --------------------------------------------------------------------------------------


def test_the_search_takes_the_smallest_predicted_error():
    steps, target = 40, (3.0, 1e-4, 2000)
    settings = {"expected_batch_size": 20, "steps": steps}
    plan = PrivacyConfig(**settings, noise="auto").calibrate(*target)

    noise = {}
    for bands in {1, 8, 40, plan.bands}:
        config = PrivacyConfig(**settings, noise="correlated", bands=bands)
        noise[bands] = config.calibrate(*target).noise_multiplier
    errors = {
        bands: sigma * np.linalg.norm(np.tri(steps) @ np.linalg.inv(_matrix(bands, steps)))
        for bands, sigma in noise.items()
    }
    assert 1 < plan.bands < 40
    assert errors[plan.bands] == min(errors.values())
    predicted = errors[8] / noise[8] / math.sqrt(steps)
    assert BandedNoise(8).error(steps) == pytest.approx(predicted)
    assert choose_bands(1, 9, steps, lambda bands: float(bands)) == 1


@pytest.mark.parametrize("noise", ["auto", "correlated"])
def test_a_full_batch_takes_independent_noise(noise):
    config = PrivacyConfig(expected_batch_size=N, steps=5, noise=noise)
    if noise == "correlated":
        with pytest.raises(ValueError, match="gains nothing .* use noise='gaussian'"):
            config.calibrate(3.0, 1e-3, N)
    else:
        plain = PrivacyConfig(expected_batch_size=N, steps=5).calibrate(3.0, 1e-3, N)
        assert config.calibrate(3.0, 1e-3, N) == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bands": 12}, "bands=12 exceeds the number of steps, 11; choose at most 11"),
        ({"bands": 11}, "bands=11 groups of 60 examples are smaller than expected_batch_size=6"),
        ({"bands": 0}, "bands must be an integer >= 1"),
        ({"bands": 2, "noise": "gaussian"}, "bands=2 belongs to noise='correlated'"),
        ({"bands": 2, "noise": "auto"}, "bands=2 belongs to noise='correlated'"),
        ({"bands": None}, "settled by PrivacyConfig.calibrate"),
        ({"bands": None, "noise": "auto"}, "settled by PrivacyConfig.calibrate"),
        ({"sampler": "fixed"}, "needs sampler='poisson', not 'fixed'"),
        (
            {"sampler": "shuffle", "uncertified": True, "noise": "auto", "bands": None},
            "needs sampler='poisson', not 'shuffle'",
        ),
        ({"postprocess": (EMA(0.9), AdamBC())}, "not known behind correlated noise and a filter"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**settings)


def test_a_basis_that_turns_is_refused():
    from dpkfc.curvature.gep import GEP
    from dpkfc.curvature.probes import PublicData

    gep = GEP(probe=PublicData(torch.zeros(8, 3), provenance="zeros"), rank=1)
    with pytest.raises(ValueError, match="does not go with GEP, whose coordinates change"):
        make_plan(preconditioner=gep, clipping=gep.required_clipping)


def test_shares_are_refused():
    with pytest.raises(ValueError, match="share= needs sampler='poisson'.*'cyclic_poisson'"):
        open_session(make_plan(), share=True)


def test_an_audit_of_independent_noise_is_refused():
    from dpkfc.audit import Subject, audit_step

    subject = Subject(
        plan=make_plan(seed=None), model=lambda: nn.Linear(3, 2), dataset=(), loss_fn=cross_entropy
    )
    with pytest.raises(ValueError, match="the audit tests independent noise"):
        audit_step(subject)
