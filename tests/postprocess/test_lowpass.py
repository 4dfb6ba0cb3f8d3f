"""Low-pass filters against scipy, against DOPPLER's recursion written out, and against its
published coefficients.
"""

import math

import numpy as np
import pytest
import torch
from scipy.signal import butter, cheby1, lfilter

from dpkfc.postprocess import EMA, LowPass
from tests.postprocess.cases import noise_gain, run

OTHER = LowPass((0.15, -0.05), (1.0, -0.9))
FILTERS = [
    LowPass(),
    LowPass.chebyshev(),
    LowPass((0.3,), (1.0, -0.7)),
    LowPass.butterworth(4, 0.3),
    OTHER,
    LowPass((2, 1, 1), (4,)),
]


def doppler(b, a, inputs):
    """The recursion of the paper, with its own recursion for c."""
    m = []
    c = []
    for t in range(len(inputs)):
        past = range(1, min(t, len(a) - 1) + 1)
        window = range(min(t, len(b) - 1) + 1)
        m.append(sum(b[k] * inputs[t - k] for k in window) - sum(a[k] * m[t - k] for k in past))
        c.append(sum(b[k] for k in window) - sum(a[k] * c[t - k] for k in past))
    return [x / y for x, y in zip(m, c, strict=True)]


@pytest.mark.parametrize("lowpass", FILTERS, ids=str)
def test_the_output_is_that_of_the_recursion_and_of_scipy(lowpass):
    inputs = np.random.default_rng(0).normal(size=40)
    found = [float(r.gradients["w"]) for r in run(lowpass, torch.from_numpy(inputs).reshape(-1, 1))]
    np.testing.assert_allclose(
        found, doppler(list(lowpass.b), list(lowpass.a), inputs), rtol=1e-9, atol=1e-12
    )
    answer = lfilter(lowpass.b, lowpass.a, np.ones(40))
    np.testing.assert_allclose(
        found, lfilter(lowpass.b, lowpass.a, inputs) / answer, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("lowpass", FILTERS, ids=str)
def test_the_noise_gain_is_the_sum_of_squares_of_the_impulse_response(lowpass):
    h = lfilter(lowpass.b, lowpass.a, np.eye(1, 30)[0])
    expected = [0.25 * (h[: t + 1] ** 2).sum() / h[: t + 1].sum() ** 2 for t in range(30)]
    found = [r.noise_variance for r in run(lowpass, torch.zeros(30, 1).double())]
    assert all(isinstance(v, float) for v in found)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_the_authors_default_is_a_chebyshev_filter():
    lowpass = LowPass.chebyshev()
    b, a = cheby1(2, 10, 0.02)
    np.testing.assert_allclose(lowpass.a, [1, -1.98342955, 0.98549544], atol=5e-9)
    np.testing.assert_allclose(lowpass.b, [1.6332e-4, 3.2665e-4, 1.6332e-4], atol=5e-9)
    assert (lowpass.b, lowpass.a) == (tuple(b), tuple(a))
    assert sum(b) / sum(a) == pytest.approx(0.3162269, abs=1e-6)  # 10 dB
    assert noise_gain(lowpass, 3000) == pytest.approx(0.0711784, abs=5e-7)
    c = lfilter(lowpass.b, lowpass.a, np.eye(1, 71)[0]).cumsum()
    table = {
        0: 1.6332e-4,
        1: 8.1390e-4,
        2: 2.10666e-3,
        5: 9.7125e-3,
        10: 0.033903,
        20: 0.116786,
        50: 0.430555,
        70: 0.506033,
    }
    for t, value in table.items():
        assert c[t] == pytest.approx(value, rel=5e-5)


def test_the_default_is_a_butterworth_filter_of_order_two():
    b, a = butter(2, 0.1)
    np.testing.assert_allclose(LowPass().b, b, rtol=1e-12)
    np.testing.assert_allclose(LowPass().a, a, rtol=1e-12)
    assert LowPass().describe() == LowPass.butterworth().describe()
    assert noise_gain(LowPass(), 1000) == pytest.approx(0.1097, abs=5e-5)


def test_filters_that_cannot_work_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="unstable: a has a root of size 1.1"):
        LowPass((0.1,), (1.0, -1.1))
    with pytest.raises(ValueError, match="unstable"):
        LowPass((1.0,), (1.0, -1.0))  # a running sum
    with pytest.raises(ValueError, match="vanishes or turns its sign.*LowPass"):
        LowPass((1.0, -1.0), (1.0,))  # passes no constant
    with pytest.raises(ValueError, match="vanishes or turns its sign"):
        LowPass((-0.1, 0.4), (1.0, -0.7))
    with pytest.raises(ValueError, match=r"b\[0\] and a\[0\] not zero"):
        LowPass((0.0, 1.0), (1.0,))
    # The answer to a constant is 1 + 3 · 0.999ᵗ sin(2π t / 400): its first 200 steps are positive.
    turn, fade = 2 * math.pi / 400, 0.999
    sine = 3 * fade * math.sin(turn)
    poles = (1.0, -2 * fade * math.cos(turn), fade**2)
    with pytest.raises(ValueError, match="turns its sign"):
        LowPass((1.0, poles[1] + sine, poles[2] - sine), poles)
    with pytest.raises(ValueError, match="finite numbers"):
        LowPass((float("nan"),), (1.0,))
    with pytest.raises(ValueError, match="cutoff must lie in"):
        LowPass.butterworth(2, 1.0)
    with pytest.raises(ValueError, match="kappa of EMA"):
        EMA(2.0)
