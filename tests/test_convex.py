"""The plan of a convex head: the release of second moments, and what its noise does."""

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from dpkfc import PrivacyConfig, Session
from dpkfc.convex import (
    STEPS,
    convex_clip,
    convex_config,
    convex_rate,
    gaussian_noise,
    moments_release,
    whitened_clip,
    whitened_config,
    whitened_rate,
)
from dpkfc.curvature.second_moments import SecondMoments, pack_symmetric, unpack_symmetric
from dpkfc.data.loading import layout
from dpkfc.features import AdditiveModel
from dpkfc.gradients.moment_sum import sum_second_moments
from dpkfc.privacy import Budget
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.weight_noise import noise_covariance
from tests.features.test_additive import TINY, encode_rows
from tests.sessions import cross_entropy


def _session(count=300, *, epsilon=50.0, test_mode_seed=1, **more):
    rows = encode_rows(count, TINY)
    labels = (rows[:, 0] > 0).long()
    model = AdditiveModel(TINY, 2)
    features = model[0].features
    config = convex_config(count, epsilon, 1e-5, features, test_mode_seed=test_mode_seed)
    plan = config.calibrate(epsilon, 1e-5, count)
    optimizer = torch.optim.SGD(model.parameters(), lr=convex_rate("categorical"))
    return Session(plan, model, optimizer, (rows, labels), **more)


# -- the release of second moments -----------------------------------------------------------------


def _moments(rows, norm):
    head = nn.Linear(rows.shape[1], 2, bias=False).double()
    parts = layout(np.arange(len(rows)), 16)
    batches = [((rows[part.records],), part) for part in parts]
    return sum_second_moments(
        nn.Sequential(), head, norm, batches, lambda number: (rows[number : number + 1],)
    )


def test_second_moments_are_the_clipped_sum_of_outer_products():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    rows[3] = math.nan
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for row in rows:
        outer = torch.outer(row, row)
        if outer.isfinite().all():
            expected += outer * min(1.0, 2.0 / float(outer.norm()))
    found = _moments(rows, 2.0)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_moments_are_summed_a_block_of_rows_at_a_time(monkeypatch):
    roots = []
    # The last block of seven has a single row.
    for most in (50, 7):
        monkeypatch.setattr("dpkfc.session._SUMMED_ROWS", most)
        with _session(50) as session:
            session.release_curvature()
            roots.append(session.preconditioner.metric["1"].input.root)
            assert not session._loader._batch_indices, "they are for worker processes"
    assert_close(roots[1], roots[0])


def test_a_process_without_training_rows_adds_zeros_of_the_size_of_the_moments(monkeypatch):
    """All rows of its part may be for tests."""
    with _session(50) as session:
        kind = moments_release(1.0)
        whole = session._sum_moments(kind)
        monkeypatch.setattr(session, "_share", ("part",))
        monkeypatch.setattr(type(session._loader), "__len__", lambda _: 0)
        assert_close(session._sum_moments(kind), torch.zeros_like(whole))


def test_packing_keeps_the_matrix_and_its_norm():
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T
    packed = pack_symmetric(matrix)
    assert_close(unpack_symmetric(packed), matrix)
    assert_close(packed.norm(), matrix.norm())


def test_the_plan_composes_the_moments_with_the_steps():
    plan = convex_config(5000, 1.0, 1e-6, 100).calibrate(1.0, 1e-6, 5000)
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(plan.noise_multiplier), STEPS)
    accountant.compose(
        dp_accounting.GaussianDpEvent(moments_release(gaussian_noise(1.0, 1e-6)).noise_multiplier)
    )
    assert plan.epsilon() == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3)
    assert 0.99 < plan.epsilon() <= 1.0
    # 30 % of μ² are the moments', the rest is the steps'.
    whole = gaussian_noise(1.0, 1e-6)
    steps = plan.noise_multiplier / math.sqrt(STEPS)
    assert (whole / steps) ** 2 == pytest.approx(0.7, abs=0.01)


def test_a_plan_without_the_release_is_refused():
    with pytest.raises(ValueError, match="SecondMoments is built from a release"):
        PrivacyConfig(
            expected_batch_size=5, steps=1, max_grad_norm=1, preconditioner=SecondMoments()
        )


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, bias=False))]
)
def test_a_model_without_a_linear_head_is_refused_before_a_charge(tmp_path, model):
    plan = convex_config(20, 1.0, 1e-5, 3).calibrate(1.0, 1e-5, 20)
    data = torch.zeros(20, 3), torch.zeros(20, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ward = Budget(tmp_path / "ward.toml", epsilon=9.0, delta=1e-5)
    with Session(plan, model, optimizer, data, budget=ward) as session:
        with pytest.raises(ValueError, match="SecondMoments is for one trained layer"):
            session.release_curvature()
        assert session.ledger.count == 0
    assert not ward.charges


def test_the_moments_are_not_released_for_a_loss_that_is_refused(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=60.0, delta=1e-5)
    with _session(budget=ward, test_mode_seed=None) as session:
        batch = next(session.batches())
        with pytest.raises(ValueError, match="mixes examples"):
            session.step(batch, lambda m, b: cross_entropy(m, b) - cross_entropy(m, b).mean())
        assert session.ledger.count == 0 and not ward.charges
        session.release_curvature()
        assert session.ledger.count == 1 == len(ward.charges)


def test_the_metric_is_the_damped_root_of_what_was_released():
    with _session() as session:
        session.release_curvature()
        state = session.preconditioner
        assert state is not None
        assert session.ledger.extra == {"moments": 1} and session.steps_done == 0
        assert session.ledger.releases[0]["purpose"] == "moments"
        digest = state.digest
        session.release_curvature()
        assert session.preconditioner.digest == digest, "one release serves all"
        features = session.model[0](encode_rows(300, TINY)).double()
        moments = features.T @ features / 300
        kind = session.plan.extra_release("moments")
        noise = kind.stddev / 300 * math.sqrt(2 * len(moments))
        root = state.metric["1"].input.root.double()
        inverse = torch.linalg.inv(root @ root)
        # The inverse is moments + ν I but for the noise, and what stands below it.
        assert float((inverse - moments - noise * torch.eye(len(moments))).norm(2)) < 3 * noise


def test_a_run_goes_on_with_the_moments_of_its_checkpoint(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    with _session(ledger_path=ledger) as session:
        session.release_curvature()
        session.save(tmp_path / "checkpoint")
        digest = session.preconditioner.digest
    with _session(ledger_path=ledger, resume=True) as session:
        session.restore(tmp_path / "checkpoint")
        assert session.preconditioner.digest == digest
        for batch in session.batches():
            session.step(batch, cross_entropy)
        assert session.ledger.extra == {"moments": 1}
        assert session.steps_done == STEPS
    with _session(ledger_path=ledger, resume=True) as session:
        with pytest.raises(LedgerError, match="has paid for moments"):
            session.release_curvature()


def test_several_records_of_a_unit_count_as_one_row():
    rows = encode_rows(60, TINY)
    labels = (rows[:, 0] > 0).long()
    model = AdditiveModel(TINY, 2)
    config = convex_config(
        20, 9.0, 1e-5, model[0].features, unit="patient", max_records_per_unit=3, test_mode_seed=1
    )
    plan = config.calibrate(9.0, 1e-5, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    units = torch.arange(60) // 3
    with Session(plan, model, optimizer, (rows, labels), units=units) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        assert session.preconditioner.report[0]["trace"] < 2


def test_a_head_on_features_of_all_rows_takes_the_same_steps():
    rows = encode_rows(60, TINY)
    labels = (rows[:, 0] > 0).long()
    weights = []
    for is_split in (False, True):
        model = AdditiveModel(TINY, 2)
        plan = convex_config(60, 9.0, 1e-5, model[0].features, steps=3, test_mode_seed=1)
        head, inputs = model.split_off_features(rows) if is_split else (model, rows)
        optimizer = torch.optim.SGD(head.parameters(), lr=2.0)
        with Session(plan.calibrate(9.0, 1e-5, 60), head, optimizer, (inputs, labels)) as session:
            for batch in session.batches():
                session.step(batch, cross_entropy)
            with session.averaged_weights():
                weights.append(model.state_dict()["1.weight"].clone())
            assert list(session.released_state()) == ["1.weight"]
    assert_close(*weights)


# -- what the noise does ---------------------------------------------------------------------------


def test_the_covariance_is_what_noise_alone_makes_of_a_quadratic_loss():
    with _session(epsilon=8.0) as session:
        session.release_curvature()
        plan, state = session.plan, session.preconditioner
    covariance = noise_covariance(plan, state, 2.0, 0.3)
    root = state.metric["1"].input.root.double()
    width = len(root)
    values, basis = torch.linalg.eigh(root)
    damped = values**-2
    kind = plan.extra_release("moments")
    noise = kind.stddev / plan.dataset_size * math.sqrt(2 * width)
    known = damped - noise
    rest = (state.report[0]["trace"] - known[known > noise].sum()) / (known <= noise).sum()
    known[known <= noise] = max(0.0, float(rest))
    hessian = 0.3 * basis @ torch.diag(known) @ basis.T
    expected = torch.zeros_like(root)
    for noisy_step in range(STEPS):
        weights = torch.zeros(width, width, dtype=torch.float64)
        average = torch.zeros_like(weights)
        for step in range(STEPS):
            gradient = root @ hessian @ weights
            if step == noisy_step:
                gradient = gradient + torch.eye(width, dtype=torch.float64)
            weights = weights - 2.0 * root @ gradient
            average = 0.87 * average + 0.13 * weights
        expected += average @ average.T
    expected *= (plan.stddev / plan.expected_batch_size) ** 2
    assert_close(covariance, expected, rtol=1e-4, atol=1e-9)


def test_a_clip_norm_follows_from_public_numbers():
    small, large = (convex_clip(rows, 3.7, 200, "gaussian") for rows in (1000, 16_000))
    assert large == pytest.approx(4 * small)
    assert convex_clip(10**9, 3.7, 100, "gaussian") == 5.0
    assert convex_clip(1000, 3.7, 200, "categorical") == pytest.approx(math.sqrt(2) * small)
    with pytest.raises(ValueError, match="likelihood"):
        convex_rate("poisson")


# --------------------------------------------------------------------------------------------------
# Rows of norm 1 that public examples have whitened.


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_whitened_rows_have_the_rule_of_white_rows_in_their_own_length(likelihood):
    # Rows of norm 1 have 1 / √d of the length of white rows, and so have their gradients.
    assert whitened_clip(9000, 1.0, 400, likelihood) * 20 == pytest.approx(
        convex_clip(9000, 1.0, 400, likelihood)
    )
    assert whitened_rate(800, likelihood) == pytest.approx(2 * whitened_rate(400, likelihood))


def test_the_clip_of_whitened_rows_falls_faster_where_noise_prevails():
    few, more = (whitened_clip(rows, 4.0, 400, "categorical") for rows in (100, 6400))
    assert more == pytest.approx(few * 64 ** (1 / 2 + 1 / 3))
    bends = [whitened_clip(rows, 1.0, 400, "categorical") for rows in (6499, 6500, 6501)]
    assert bends == sorted(bends) and bends[2] == pytest.approx(bends[0], rel=1e-3)


def test_a_head_learns_whitened_rows_by_the_rule():
    generator = torch.Generator().manual_seed(0)
    rows = functional.normalize(torch.randn(4000, 20, generator=generator), dim=1)
    labels = (rows[:, 0] > rows[:, 1]).long()
    config = whitened_config(len(rows), 1.0, 1e-5, 20, test_mode_seed=0)
    plan = config.calibrate(1.0, 1e-5, len(rows))
    assert not plan.config.extra_releases and plan.steps == STEPS
    head = nn.Linear(20, 2, bias=False)
    nn.init.zeros_(head.weight)
    optimizer = torch.optim.SGD(head.parameters(), lr=whitened_rate(20), momentum=0.9)
    with Session(plan, head, optimizer, (rows, labels)) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        with session.averaged_weights(), torch.no_grad():
            right = (head(rows).argmax(1) == labels).float().mean()
    assert right > 0.9


def test_without_noise_the_features_alone_decide_the_clip():
    """So little noise is asked for that 1 / μ of all steps rounds to zero."""
    bound = convex_clip(100, 1e-9, 16, "categorical")
    assert convex_clip(100, 0.0, 16, "categorical") == bound
    assert whitened_clip(100, 0.0, 16, "categorical") == bound / 4
