#!/usr/bin/env bash
# The two-tailed bootstrap p-values of equiboots are one-tailed, and above 0.5 for negative
# differences.
#
# Packages: equiboots 0.0.1a14, statsmodels 0.14.4, scikit-learn 1.7.2, scipy 1.15.2, pandas 2.2.3,
#   numpy 2.2.4, matplotlib 3.10.1, seaborn 0.13.2, tqdm 4.67.1.
# Behaviour: with 5000 resamples or more the p-value is the share of differences below 0. It is
#   doubled where the tail type is "two-tailed", which the interval of the same test refuses: its
#   name is "two_tailed". The share is turned round only above 1 - alpha / 2, so that the p-value
#   of a group that is worse goes up to 0.975 and jumps to 0.025.
# Expected: twice the smaller of the shares below and above 0, the same for a difference and for
#   its opposite.
# Why it matters here: an audit looks for groups with a lower recall, whose differences are
#   negative; a correction for many tests then uses 0.96.
# Instead: compute the p-value from the differences by hand.
# Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 15.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statsmodels==0.14.4' 'scikit-learn==1.7.2' 'scipy==1.15.2' 'pandas==2.2.3' 'numpy==2.2.4' 'matplotlib==3.10.1' 'seaborn==0.13.2' 'tqdm==4.67.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'equiboots==0.0.1a14'
cat > expected.txt <<'EXPECTED'
difference of +1.0 standard errors: p-value 0.158, by both shares 0.316; significant False
difference of -1.0 standard errors: p-value 0.841, by both shares 0.318; significant False
difference of +1.8 standard errors: p-value 0.037, by both shares 0.073; significant False
difference of -1.8 standard errors: p-value 0.964, by both shares 0.073; significant False
difference of +2.0 standard errors: p-value 0.024, by both shares 0.047; significant True
difference of -2.0 standard errors: p-value 0.022, by both shares 0.043; significant True
difference of +3.0 standard errors: p-value 0.001, by both shares 0.003; significant True
difference of -3.0 standard errors: p-value 0.001, by both shares 0.002; significant True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from equiboots.StatisticalTester import StatisticalTester

random = np.random.default_rng(0)
noise = random.normal(size=10000)
noise -= noise.mean()
config = {'test_type': 'bootstrap_test', 'alpha': 0.05, 'adjust_method': 'none', 'confidence_level': 0.95,
          'tail_type': 'two_tailed', 'metrics': ['Recall_diff']}
for shift in (1.0, -1.0, 1.8, -1.8, 2.0, -2.0, 3.0, -3.0):
    values = 0.02 * (noise + shift)
    differences = [{'reference': {'Recall_diff': 0.0}, 'group': {'Recall_diff': value}} for value in values]
    seen = StatisticalTester().analyze_metrics([{}], 'reference', config, differences=differences)['group']['Recall_diff']
    right = 2 * min((values < 0).mean(), (values > 0).mean())
    print(f'difference of {shift:+.1f} standard errors: p-value {seen.p_value:.3f}, by both shares {right:.3f}; significant {seen.is_significant}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
