#!/usr/bin/env bash
# The two-sided flags of fairaudit flag each group, since their p-values are negative.
#
# Packages: fairaudit 0.0.1, statsmodels 0.14.6, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6.
# Behaviour: flag_groups with type 'interval' computes 1 - 2 Phi(|z|), which is between -1 and 0,
#   and hands it to the Benjamini-Hochberg procedure. Each p-value is below each limit, so all
#   groups are flagged, whatever alpha is.
# Expected: 2 (1 - Phi(|z|)). Without any difference at most alpha of the samples have a flag.
# Why it matters here: flags that are always raised say nothing, and a fair model seems unfair to
#   everybody.
# Instead: type 'lower' and type 'upper' with half of alpha each.
# Source: Benjamini and Hochberg, Controlling the False Discovery Rate, Journal of the Royal
#   Statistical Society B 1995.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statsmodels==0.14.6' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'numpy==2.4.6' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fairaudit==0.0.1'
cat > expected.txt <<'EXPECTED'
lower: 1 of 80 groups flagged, in 1 of 20 samples
upper: 2 of 80 groups flagged, in 2 of 20 samples
interval: 80 of 80 groups flagged, in 20 of 20 samples
chi-square test of the four groups: significant in 2 of 20 samples
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import os
import sys

import numpy as np
from scipy.stats import chi2_contingency

sys.stderr = open(os.devnull, 'w')  # progress bars
from fairaudit import Auditor, Metric

flagged, significant = {'lower': [], 'upper': [], 'interval': []}, 0
for sample in range(20):
    random = np.random.default_rng(sample)
    group = random.integers(0, 4, 1000)
    decision = (random.random(1000) < 0.4).astype(float)  # 40 % in each group
    outcome = decision.copy()
    groups = np.stack([group == place for place in range(4)], axis=1)
    auditor = Auditor(group.reshape(-1, 1), outcome, decision, Metric('statistical_parity'))
    for kind in flagged:
        flags, _ = auditor.flag_groups(groups, type=kind, alpha=0.05, bootstrap_params={'student': 'mad', 'student_threshold': -np.inf, 'B': 200})
        flagged[kind].append(int(flags.sum()))
    table = [[(decision[mask] == answer).sum() for mask in groups.T] for answer in (0, 1)]
    significant += chi2_contingency(table).pvalue < 0.05
for kind, counts in flagged.items():
    print(f'{kind}: {sum(counts)} of 80 groups flagged, in {sum(count > 0 for count in counts)} of 20 samples')
print(f'chi-square test of the four groups: significant in {significant} of 20 samples')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
