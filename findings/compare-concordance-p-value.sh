#!/usr/bin/env bash
# The bootstrap test of compare_concordance returns half the p-value of its other test, for either
# direction.
#
# Packages: compare_concordance 0.0.2, numpy 2.4.6, scipy 1.17.1.
# Behaviour: both functions compare the concordance indices of two models and return a p-value.
#   compare_concordance doubles the tail of the normal distribution, as a two-sided test does;
#   compare_concordance_with_bootstrap takes the absolute z-score and one tail. Its largest p-value
#   is thus 0.5, and two models that are equally good differ "at 0.05" twice as often as they
#   should.
# Expected: 2 (1 - Φ(|z|)) in both, or a signed z-score in a one-sided test.
# Instead: double the p-value of the bootstrap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'compare_concordance==0.0.2' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
two models without information, 200 comparisons
compare_concordance: largest p 1.00, below 0.05 in 5%
with bootstrap: largest p 0.50, below 0.05 in 10%
with bootstrap, both tails: largest p 1.00, below 0.05 in 5%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from compare_concordance import compare_concordance, compare_concordance_with_bootstrap
from scipy.stats import norm

random = np.random.default_rng(1)
rows = []
for trial in range(200):
    death, end = random.exponential(size=60), random.exponential(2, size=60)
    time, died = np.minimum(death, end), (death <= end).astype(int)
    one, other = random.normal(size=60), random.normal(size=60)
    exact = compare_concordance(time, died, one, other)[-1]
    _, z, p = compare_concordance_with_bootstrap(time, died, one, other, num_samples=60, seed=trial)
    rows.append((exact, p, 2 * (1 - norm.cdf(abs(z)))))
exact, p, doubled = np.array(rows).T
print('two models without information, 200 comparisons')
print(f'compare_concordance: largest p {exact.max():.2f}, below 0.05 in {np.mean(exact < 0.05):.0%}')
print(f'with bootstrap: largest p {p.max():.2f}, below 0.05 in {np.mean(p < 0.05):.0%}')
print(f'with bootstrap, both tails: largest p {doubled.max():.2f}, below 0.05 in {np.mean(doubled < 0.05):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
