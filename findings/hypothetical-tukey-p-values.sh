#!/usr/bin/env bash
# The adjusted p-values of Tukey's test in hypothetical contradict its own decisions.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: TukeysTest divides each difference by the standard deviation of one of the groups, not by
#   the standard error, and asks the studentized range for n / k groups, the people of one group, in
#   place of k. The standard deviations belong to groups and are set beside pairs of groups. A
#   difference that the same row calls significant has a p-value of 0.9 or 0.5, with 40 people in each
#   group as with 10.
# Expected: p-values below 0.05 where the difference is significant.
# Instead: scipy.stats.tukey_hsd.
# Source: Tukey, The Problem of Multiple Comparisons, 1953.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
10 people, a - b: difference -5.1, significant False, p 0.900, by scipy 0.529
10 people, a - c: difference -18.8, significant True, p 0.502, by scipy 0.001
10 people, b - c: difference -13.7, significant True, p 0.900, by scipy 0.020
40 people, a - b: difference -5.1, significant True, p 0.900, by scipy 0.049
40 people, a - c: difference -19.1, significant True, p 0.900, by scipy 0.000
40 people, b - c: difference -14.0, significant True, p 0.900, by scipy 0.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hypothetical.posthoc import TukeysTest
from scipy import stats

random = np.random.default_rng(2)
for people in (10, 40):
    samples = [random.normal(mean, 10, people) for mean in (70, 76, 90)]
    values, groups = np.concatenate(samples), np.repeat(['a', 'b', 'c'], people)
    seen = TukeysTest(values, group=groups).group_comparison
    right = stats.tukey_hsd(*samples).pvalue
    for (one, other), (_, row) in zip(((0, 1), (0, 2), (1, 2)), seen.iterrows()):
        print(f"{people} people, {row['groups']}: difference {row['mean difference']:.1f},",
              f"significant {row['significant difference']}, p {row['p_adjusted']:.3f},",
              f'by scipy {right[one, other]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
