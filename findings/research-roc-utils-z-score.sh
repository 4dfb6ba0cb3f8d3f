#!/usr/bin/env bash
# The z-score of research-roc-utils is not a number for any two models of usual size, and its t-statistic
# finds a difference between equal models the more often, the more people there are.
#
# Packages: research-roc-utils 0.1.1, scikit-learn 1.5.2, scipy 1.15.3, matplotlib 3.10.3, pandas 2.2.3,
#   numpy 2.2.6.
# Behaviour: the variance of an area under the curve is divided by the number of ill people times the number
#   of healthy ones. roc_z_score leaves this out; roc_t_stat takes the root before it divides; and both
#   subtract the correlation times the product of the variances, not of their roots. The denominator of
#   the first, said to be the test of Hanley and McNeil, is then the root of a negative number.
# Expected: a value beyond 1.96 in 5 % of the comparisons of equal models.
# Why it matters here: it decides whether privacy made a model worse.
# Instead: DeLong's test, or the bootstrap of the same package (boot_p_val).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'scipy==1.15.3' 'scikit-learn==1.5.2' 'matplotlib==3.10.3'
env/bin/python -m pip install -q -q --disable-pip-version-check 'research-roc-utils==0.1.1'
cat > expected.txt <<'EXPECTED'
40 people, areas of 0.73 and 0.73: z-scores that are not numbers 95%, t-statistics beyond 1.96 1%, by the true standard error 5%
200 people, areas of 0.72 and 0.72: z-scores that are not numbers 100%, t-statistics beyond 1.96 6%, by the true standard error 5%
2000 people, areas of 0.72 and 0.72: z-scores that are not numbers 100%, t-statistics beyond 1.96 30%, by the true standard error 6%
20000 people, areas of 0.72 and 0.72: z-scores that are not numbers 100%, t-statistics beyond 1.96 60%, by the true standard error 5%
2000 people, areas of 0.72 and 0.81: z-scores that are not numbers 100%, t-statistics beyond 1.96 100%, by the true standard error 100%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from research_roc_utils import roc_utils
from scipy.stats import pearsonr
from sklearn.metrics import roc_auc_score

random = np.random.default_rng(0)


def scores(people, better):
    ill = np.arange(people) < people // 4
    common = random.normal(size=people)
    first = ill + common + 0.7 * random.normal(size=people)
    second = (1 + better) * ill + common + 0.7 * random.normal(size=people)
    return ill.astype(int), first, second


for people, better in ((40, 0), (200, 0), (2000, 0), (20000, 0), (2000, 0.5)):
    seen, areas = [], []
    for run in range(200):
        labels, first, second = scores(people, better)
        areas.append((roc_auc_score(labels, second), roc_auc_score(labels, first)))
        seen.append((roc_utils.roc_z_score(labels, second, first, pearsonr),
                     roc_utils.roc_t_stat(labels, second, first, pearsonr)))
    areas, seen = np.array(areas), np.array(seen)
    difference = areas[:, 0] - areas[:, 1]
    right = (np.abs(difference / difference.std()) > 1.96).mean()
    missing = np.isnan(seen[:, 0]).mean()
    print(f'{people} people, areas of {areas[:, 1].mean():.2f} and {areas[:, 0].mean():.2f}:',
          f'z-scores that are not numbers {missing:.0%}, t-statistics beyond 1.96',
          f'{(np.abs(seen[:, 1]) > 1.96).mean():.0%}, by the true standard error {right:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
