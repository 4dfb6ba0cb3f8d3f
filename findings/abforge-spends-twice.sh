#!/usr/bin/env bash
# The sequential test of abforge, made for looking at results early "without inflating the false positive rate", finds a
# difference where there is none in 6 to 13 % of the experiments with an error of 5 %.
#
# Packages: abforge 0.1.0, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3, plotly 6.3.0.
# Behaviour: at each look the boundary is the quantile of all of the error that has been spent until then, so that what
#   was spent at earlier looks is spent again. At the last look it is 1.96, as if there had been no other.
# Expected: a boundary whose error, together with those before, is what the spending function allows: with looks at
#   each fifth of the data 2.03 at the end for O'Brien-Fleming, and an error of 5 % altogether.
# Why it matters here: the error that is promised is the reason for the package.
# Instead: boundaries of group sequential designs, for example from R's gsDesign.
# Source: Lan and DeMets, Discrete sequential boundaries for clinical trials, 1983.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'pandas==2.3.3' 'plotly==6.3.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'abforge==0.1.0'
cat > expected.txt <<'EXPECTED'
obrien_fleming, 1 looks: a difference in 4.4% of 2000 experiments without one; last boundary 1.96
obrien_fleming, 5 looks: a difference in 6.3% of 2000 experiments without one; last boundary 1.96
obrien_fleming, 10 looks: a difference in 7.2% of 2000 experiments without one; last boundary 1.96
pocock, 1 looks: a difference in 4.4% of 2000 experiments without one; last boundary 1.96
pocock, 5 looks: a difference in 9.9% of 2000 experiments without one; last boundary 1.96
pocock, 10 looks: a difference in 12.8% of 2000 experiments without one; last boundary 1.96
linear, 1 looks: a difference in 4.4% of 2000 experiments without one; last boundary 1.96
linear, 5 looks: a difference in 9.2% of 2000 experiments without one; last boundary 1.96
linear, 10 looks: a difference in 11.6% of 2000 experiments without one; last boundary 1.96
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from abforge import SequentialTest

PEOPLE, RATE, EXPERIMENTS = 5000, 0.3, 2000
for spending in ('obrien_fleming', 'pocock', 'linear'):
    for looks in (1, 5, 10):
        random = np.random.default_rng(0)
        test = SequentialTest(max_n=PEOPLE, alpha=0.05, spending=spending)
        sizes = np.linspace(PEOPLE // looks, PEOPLE, looks, dtype=int)
        new = random.binomial(PEOPLE // looks, RATE, (EXPERIMENTS, 2, looks)).cumsum(axis=2)
        found = 0
        for control, treatment in new:
            for size, old, other in zip(sizes, control, treatment):
                result = test.evaluate(int(old), int(size), int(other), int(size), futility_threshold=None)
                if result.decision == 'stop_significant':
                    found += 1
                    break
        print(f'{spending}, {looks} looks: a difference in {found / EXPERIMENTS:.1%} of {EXPERIMENTS} experiments without '
              f'one; last boundary {test.evaluate(1500, PEOPLE, 1501, PEOPLE).upper_boundary:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
