#!/usr/bin/env bash
# The p-value of fairlens for a difference between groups is about 0.5, however large the difference
# and the groups are.
#
# Packages: fairlens 0.1.0, pandas 1.5.3, scipy 1.11.4, scikit-learn 1.2.2, numpy 1.26.4.
# Behaviour: stat_distance resamples each group by itself, which keeps their difference, and counts how
#   often the resampled distance is at least the observed one. That is half of the time, and nearly
#   always for a histogram. It is documented as the test that both groups have one distribution. Only
#   the Kolmogorov-Smirnov and Kruskal-Wallis tests, which are scipy's, are right.
# Expected: a p-value near 0 for groups that differ by ten standard deviations.
# Why it matters here: its report of biased groups shows those with a p-value below 0.05, so it is empty
#   for an outcome of three classes or more, whose metric is one of these by default.
# Instead: scipy.stats.permutation_test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==1.5.3' 'scipy==1.11.4' 'scikit-learn==1.2.2' 'pyemd==1.0.0' 'dcor==0.6' 'matplotlib==3.8.4' 'seaborn==0.12.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fairlens==0.1.0'
cat > expected.txt <<'EXPECTED'
means that differ by 0.5 standard deviations: p-values of the mean 0.5, of the histogram 0.9, of Kolmogorov-Smirnov 0.0; by permutation 0.002
means that differ by 2.0 standard deviations: p-values of the mean 0.5, of the histogram 0.7, of Kolmogorov-Smirnov 0.0; by permutation 0.002
means that differ by 10.0 standard deviations: p-values of the mean 0.5, of the histogram 0.9, of Kolmogorov-Smirnov 0.0; by permutation 0.002
the best of three grades for 10 % of the women and 70 % of the men: women differ by 0.3, men differ by 0.3, smallest p-value 0.6
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import fairlens
import numpy as np
import pandas as pd
from scipy.stats import permutation_test

random = np.random.default_rng(0)
np.random.seed(0)
sex = np.repeat(['women', 'men'], 500)


def difference(first, second):
    return abs(first.mean() - second.mean())


for gap in (5, 20, 100):
    income = random.normal(100, 10, size=1000) + gap * (sex == 'men')
    table = pd.DataFrame(dict(sex=sex, income=income))
    values = [
        fairlens.metrics.stat_distance(
            table, 'income', {'sex': ['women']}, {'sex': ['men']}, mode=mode, p_value=True
        )[1] for mode in ('mean', 'hellinger', 'ks_distance')
    ]
    right = permutation_test((income[:500], income[500:]), difference, n_resamples=999,
                             permutation_type='independent', random_state=0).pvalue
    print(f'means that differ by {gap / 10} standard deviations: p-values of the mean {values[0]:.1f},',
          f'of the histogram {values[1]:.1f}, of Kolmogorov-Smirnov {values[2]:.1f};',
          f'by permutation {right:.3f}')
grades = np.concatenate([random.choice(list('ABC'), 500, p=shares) for shares in ((.1, .2, .7), (.7, .2, .1))])
scores = fairlens.FairnessScorer(pd.DataFrame(dict(sex=sex, grade=grades)), 'grade', ['sex'])
report = scores.distribution_score(p_value=True)
print('the best of three grades for 10 % of the women and 70 % of the men:',
      ', '.join(f'{row.Group} differ by {row.Distance:.1f}' for row in report.itertuples()) + ',',
      f'smallest p-value {report["P-Value"].min():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
