#!/usr/bin/env bash
# The test of means in bayes-ab divides by the number of people in place of its root: a difference of 0.7
# standard errors has a probability of 100 % in place of 76 %, while the intervals beside it overlap.
#
# Packages: bayes-ab 0.4.3, numpy 1.26.4, scipy 1.17.1.
# Behaviour: the means are drawn with a standard deviation of sigma / n, ten times too small for 100
#   people. The chance to beat all and the expected loss of NormalDataTest come from these draws; its
#   intervals come from a formula and are right. The more people, the larger the error.
# Expected: sigma / sqrt(n), which gives nearly one minus the p-value of a one-sided t-test under a flat
#   prior.
# Why it matters here: every experiment ends with a winner, also one of two equal groups.
# Instead: the intervals, or draws of t distributions.
# Source: Gelman and others, Bayesian Data Analysis, section 3.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bayes-ab==0.4.3' 'numpy==1.26.4' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
25 people, 0.1 standard errors: chance that B is better by a t distribution 0.54, bayes-ab 0.69; its intervals overlap
25 people, 0.7 standard errors: chance that B is better by a t distribution 0.76, bayes-ab 1.00; its intervals overlap
100 people, 0.1 standard errors: chance that B is better by a t distribution 0.54, bayes-ab 0.84; its intervals overlap
100 people, 0.7 standard errors: chance that B is better by a t distribution 0.76, bayes-ab 1.00; its intervals overlap
2500 people, 0.1 standard errors: chance that B is better by a t distribution 0.54, bayes-ab 1.00; its intervals overlap
2500 people, 0.7 standard errors: chance that B is better by a t distribution 0.76, bayes-ab 1.00; its intervals overlap
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from bayes_ab.experiments import NormalDataTest
from scipy.stats import ttest_ind

random = np.random.default_rng(0)
for people in (25, 100, 2500):
    first = random.normal(10, 2, people)
    first += 10 - first.mean()
    error = first.std(ddof=1) * np.sqrt(2 / people)
    for distance in (0.1, 0.7):
        second = random.permutation(first) + distance * error
        test = NormalDataTest()
        test.add_variant_data('A', first.tolist())
        test.add_variant_data('B', second.tolist())
        with contextlib.redirect_stdout(io.StringIO()):
            a, b = test.evaluate(seed=1)[0]
        right = ttest_ind(second, first, alternative='less').pvalue
        overlap = 'overlap' if a['bounds'][1] > b['bounds'][0] else 'apart'
        print(f'{people} people, {distance} standard errors: chance that B is better by a t distribution '
              f'{right:.2f}, bayes-ab {b["prob_being_best"]:.2f}; its intervals {overlap}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
