#!/usr/bin/env bash
# The privacy budget that FederatedHPLearning computes for sampled clients multiplies ε by the sampling rate,
# as no bound does: ten rounds with an ε of 5 and a rate of 5 % are 2.7, and at least 10.3 by an example.
#
# Packages: FederatedHPLearning 1.0.2, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1,
#   matplotlib 3.11.2.
# Behaviour: compute_rdp_privacy_budget, documented to use RDP composition bounds, returns
#   q ε √(T ln(1/δ)). Sampling at a rate of q makes ln(1 + q (e^ε - 1)) of ε, which is near q ε for small ε
#   alone. Randomised response, the simplest mechanism with the ε that is given, breaks the result.
# Expected: an ε for which the probability of a larger privacy loss is at most δ for each mechanism with the
#   budget that is given.
# Instead: an accountant for sampled mechanisms, such as dp-accounting.
# Source: Balle, Barthe and Gaboardi, Privacy Amplification by Subsampling, NeurIPS 2018, theorem 9.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'FederatedHPLearning==1.0.2'
cat > expected.txt <<'EXPECTED'
rate 1.00, ε 1.0, 10 rounds: budget 10.73, randomised response 10.00; at the budget its δ is 0e+00, with 1e-05 stated
rate 0.05, ε 0.5, 10 rounds: budget 0.27, randomised response 0.26; at the budget its δ is 4e-06, with 1e-05 stated
rate 0.05, ε 5.0, 1 rounds: budget 0.85, randomised response 2.12; at the budget its δ is 4e-02, with 1e-05 stated
rate 0.05, ε 5.0, 10 rounds: budget 2.68, randomised response 10.32; at the budget its δ is 8e-02, with 1e-05 stated
rate 0.01, ε 8.0, 10 rounds: budget 0.86, randomised response 10.15; at the budget its δ is 9e-02, with 1e-05 stated
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from federated_hplearning import compute_rdp_privacy_budget

DELTA = 1e-5


def exact_epsilon(rate, epsilon, rounds):
    """ε at DELTA for answers of a client who is sampled, against the answer of another one otherwise."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    with_one, without = rate * truth + (1 - rate) * (1 - truth), 1 - truth

    def delta(bound):
        total = 0.0
        for hits in range(rounds + 1):
            ways = math.comb(rounds, hits)
            p = ways * with_one ** hits * (1 - with_one) ** (rounds - hits)
            q = ways * without ** hits * (1 - without) ** (rounds - hits)
            total += max(0.0, p - math.exp(bound) * q)
        return total

    low, high = 0.0, rounds * epsilon
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high, delta


for rate, epsilon, rounds in ((1.0, 1.0, 10), (0.05, 0.5, 10), (0.05, 5.0, 1), (0.05, 5.0, 10), (0.01, 8.0, 10)):
    seen = compute_rdp_privacy_budget(rate, epsilon, rounds, DELTA)
    exact, delta = exact_epsilon(rate, epsilon, rounds)
    print(f'rate {rate:.2f}, ε {epsilon:.1f}, {rounds} rounds: budget {seen:.2f}, randomised response {exact:.2f}; '
          f'at the budget its δ is {delta(seen):.0e}, with {DELTA:.0e} stated')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
