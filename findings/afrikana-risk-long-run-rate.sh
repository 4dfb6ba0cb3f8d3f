#!/usr/bin/env bash
# afrikana-risk turns a portfolio at its long-run average into one of several times the risk.
#
# Packages: afrikana-risk 1.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: ttc_pd says that it backs out the systematic factor and neutralises it, given the
#   long-run average default rate. It takes the average for the factor itself: N((G(pd) - sqrt(R)
#   G(average)) / sqrt(1 - R)). A lower average raises the result, and in a year in which the
#   portfolio is exactly at its long-run average 1 % becomes 6 %, 2 % becomes 9 % and 10 % becomes
#   20 %. The average given as 50 %, whatever it is, leaves the probabilities nearest to what they
#   were.
# Expected: the same probability where it is the long-run average, and a higher one for a higher
#   average.
# Instead: scale the odds by the ratio of the long-run average to the mean of this year.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'afrikana-risk==1.0.0'
cat > expected.txt <<'EXPECTED'
1% this year; long-run average half of it 7.5%, the same 6.1%, twice 4.8%, 50 % 0.6%
2% this year; long-run average half of it 10.6%, the same 8.6%, twice 6.8%, 50 % 1.3%
5% this year; long-run average half of it 16.8%, the same 13.7%, twice 10.6%, 50 % 3.7%
10% this year; long-run average half of it 24.2%, the same 19.7%, twice 15.0%, 50 % 8.2%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from afrikana_risk.credit.scorer import CreditScorer

random = np.random.default_rng(0)
training = pd.DataFrame({'x': random.normal(size=400), 'recovery_rate': 0.5, 'outstanding': 1.0, 'limit': 1.0, 'drawn': 1.0})
training['default'] = (random.random(400) < 0.1).astype(int)
scorer = CreditScorer().fit(training, feature_cols=['x'])
for now in (0.01, 0.02, 0.05, 0.10):
    portfolio = pd.DataFrame({'pd': [now] * 100})
    rates = [scorer.ttc_pd(portfolio, long_run_dr=average).iloc[0] for average in (now / 2, now, 2 * now, 0.5)]
    print(f'{now:.0%} this year; long-run average half of it {rates[0]:.1%}, the same {rates[1]:.1%},',
          f'twice {rates[2]:.1%}, 50 % {rates[3]:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
