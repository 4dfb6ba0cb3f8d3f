"""Two worlds: the bound stays below the claim of an honest step, and exceeds it where there is too
little noise.
"""

import numpy as np
import pytest

from dpkfc.audit import distinguishing as module
from dpkfc.audit.distinguishing import distinguish_neighbors
from tests.audit.sizes import size
from tests.injected_bugs import in_clip, in_noise
from tests.injected_bugs.subjects import canaries_of, select, subject_of

ALPHA, RUNS = 1e-9, size(100, 1500)
LEAKS = {
    "a tenth of the noise": in_noise.scale_stddev(lambda stddev, divisor: 0.1),
    "shards draw noise from the same seed": in_noise.sharded,
    **size({}, {"clip after noise": in_clip.clip_after_noise}),
}


def bound(name, patch=None):
    """Of a subject, without and with a leak in its step."""
    canaries = select(canaries_of(name), "loss × 1e4", "loss × -1e4")
    with pytest.MonkeyPatch.context() as m:
        if patch is not None:
            patch(m)
        runs = max(RUNS, 200) if patch is in_noise.sharded else RUNS
        return distinguish_neighbors(subject_of(name), canaries, runs=runs, alpha=ALPHA)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", size(("DP-KFC",), ("DP-SGD", "DP-KFC", "GEP", "batches of one size"))
)
def test_an_honest_step_stays_below_its_claim_and_near_it(name, evidence):
    found = bound(name)
    assert found.finding().passed and found.mu_claimed == 1
    assert size(-1, 0.3) < found.mu_lower <= 1  # the score sees what there is to see
    evidence(
        "two worlds", name, runs=found.runs, mu_lower=found.mu_lower, mu_claimed=1.0, alpha=ALPHA
    )


@pytest.mark.quick("a tenth of the noise")
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_exceeds_the_claim(name, evidence):
    """Noise that is shared between shards has the right law in every number: only a learned score
    sees it cancel.
    """
    found = bound("DP-SGD", LEAKS[name])
    assert not found.finding().passed
    evidence(
        "two worlds",
        name,
        runs=found.runs,
        mu_lower=found.mu_lower,
        mu_claimed=found.mu_claimed,
        alpha=ALPHA,
    )


def test_the_bound_is_that_of_the_exact_intervals():
    subject = subject_of("DP-SGD")
    steps = []
    canaries = select(canaries_of("DP-SGD"), "loss × 1e4", "loss × -1e4")
    found = distinguish_neighbors(
        subject, canaries, runs=20, progress=lambda done, of: steps.append((done, of))
    )
    assert steps == [(k, 40) for k in range(1, 41)]
    assert found.mu_lower <= 2.5  # what fifteen runs without an error would allow
    assert "20 releases a world" in found.finding().detail


def test_canaries_that_move_no_release_are_one_error(monkeypatch):
    def release(*arguments, seed=None):
        return iter([np.zeros(3)] * 2)

    monkeypatch.setattr(module, "_release_samples", release)
    canaries = select(canaries_of("DP-SGD"), "loss × 1e4", "loss × -1e4")
    with pytest.raises(ValueError, match="no canary moves a release; .* give other canaries"):
        distinguish_neighbors(subject_of("DP-SGD"), canaries, runs=20)


def test_scores_look_along_the_difference_and_where_the_noise_repeats():
    subject = subject_of("DP-SGD")
    sizes = [p.numel() for p in subject.model().parameters()]
    d, generator = sum(sizes), np.random.default_rng(0)
    noise = generator.standard_normal((20, d))
    noise[:, 60:] = noise[:, : d - 60]
    assert module._find_lags(list(noise))[0] == 60
    pattern = generator.standard_normal(d)
    views = module._make_directions(pattern, sizes, [60])
    assert views.shape == (len(sizes) + 4, d)
    assert np.allclose(np.linalg.norm(views, axis=1), 1)
    stays, moved = views[len(sizes)], views[len(sizes) + 1]
    assert np.allclose(noise @ stays, noise @ moved)  # so that their difference holds no noise
    assert np.allclose(moved[60:], stays[: d - 60]) and not moved[:60].any()
