#!/usr/bin/env bash
# The curve of Rényi privacy that dp-accelerator returns is far below the exact one.
#
# Packages: dp-accelerator 0.1.0, numpy 2.4.6.
# Behaviour: get_rdp_curve and compute_rdp_curve are described as the full curve, from the Rust
#   backend. They return order × rate² / (2 × noise²), which holds for small rates and small orders
#   and is a lower number than the exact one elsewhere. get_epsilon of the same object does not use
#   it and is right. Without sampling both agree.
# Expected: the sum over the binomial distribution, and an ε by the curve that is that of
#   get_epsilon or a little more.
# Why it matters here: curves are what is added where several mechanisms are composed, and the total
#   is too small.
# Instead: RdpAccountant of dp-accounting.
# Source: Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dp-accelerator==0.1.0'
cat > expected.txt <<'EXPECTED'
noise 1.0, rate 0.01, 10000 steps: at order 16 8.000, exact 30878.508; epsilon by the curve 5.30, by get_epsilon 6.71
noise 1.0, rate 0.1, 1000 steps: at order 16 80.000, exact 5543.912; epsilon by the curve 20.19, by get_epsilon 27.18
noise 4.0, rate 1.0, 10 steps: at order 16 5.000, exact 5.000; epsilon by the curve 4.11, by get_epsilon 3.62
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import comb, exp, log

from dp_accelerator import DPSGDAccountant


def exact(order, rate, noise):  # of one step of Poisson sampling, for a whole order
    terms = sum(comb(order, k) * rate**k * (1 - rate) ** (order - k) * exp(k * (k - 1) / (2 * noise**2))
                for k in range(order + 1))
    return log(terms) / (order - 1)


for noise, rate, steps in ((1.0, 0.01, 10000), (1.0, 0.1, 1000), (4.0, 1.0, 10)):
    accountant = DPSGDAccountant(noise, int(60000 * rate), 60000)
    curve = accountant.get_rdp_curve(steps)
    epsilon = min(value + log(1e5) / (order - 1) for order, value in curve.items())
    print(f'noise {noise}, rate {rate}, {steps} steps: at order 16 {curve[16]:.3f}, exact '
          f'{steps * exact(16, rate, noise):.3f}; epsilon by the curve {epsilon:.2f}, '
          f'by get_epsilon {accountant.get_epsilon(steps):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
