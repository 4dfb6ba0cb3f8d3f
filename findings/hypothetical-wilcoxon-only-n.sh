#!/usr/bin/env bash
# The Wilcoxon test of hypothetical does not look at the data: its p-value depends on the number of
# people alone.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: V is documented as the sum of the ranks of positive differences. WilcoxonTest asks
#   whether the rank of a difference is positive and not the difference, and ranks always are, so V
#   is n(n + 1) / 2 and its z-value a function of n. With ten people a treatment after which half
#   are better and half worse has a p-value of 0.005, as one after which all are better, and as one
#   after which all are worse. All samples without an effect are significant from five people on.
# Expected: V = 27 and p = 1.00 for the second of them.
# Instead: scipy.stats.wilcoxon.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
all better: V 55, p 0.005; sum of the positive ranks 55, p of scipy 0.002
half better, half worse: V 55, p 0.005; sum of the positive ranks 21, p of scipy 0.557
all worse: V 55, p 0.005; sum of the positive ranks 0, p of scipy 0.002
200 samples of 5 people without an effect: 1 p-value, 4.3e-02
200 samples of 10 people without an effect: 1 p-value, 5.1e-03
200 samples of 50 people without an effect: 1 p-value, 8.0e-10
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hypothetical.nonparametric import WilcoxonTest
from scipy import stats

treatments = {
    'all better': [2, 5, 1, 7, 4, 3, 6, 9, 8, 10],
    'half better, half worse': [2, -5, 1, -7, 4, -3, 6, -9, 8, -10],
    'all worse': [-2, -5, -1, -7, -4, -3, -6, -9, -8, -10],
}
for name, differences in treatments.items():
    test = WilcoxonTest(np.array(differences, dtype=float))
    ranks = stats.rankdata(np.abs(differences))
    positive = ranks[np.array(differences) > 0].sum()
    print(f'{name}: V {test.V:.0f}, p {test.p:.3f}; sum of the positive ranks {positive:.0f},',
          f'p of scipy {stats.wilcoxon(differences).pvalue:.3f}')
random = np.random.default_rng(0)
for people in (5, 10, 50):
    seen = {round(float(WilcoxonTest(random.normal(0, 1, people)).p), 10) for _ in range(200)}
    print(f'200 samples of {people} people without an effect: {len(seen)} p-value, {seen.pop():.1e}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
