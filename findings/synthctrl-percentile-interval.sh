#!/usr/bin/env bash
# The percentile interval of synthctrl is the one of the placebos around 0 and not of the effect: an effect of 10 has an
# interval from -2.3 to 1.9.
#
# Packages: synthctrl 0.1.1, pandas 2.2.3, numpy 1.26.4, scipy 1.15.3, matplotlib 3.10.1, seaborn 0.13.2,
#   statsmodels 0.14.4, scikit-learn 1.6.1, joblib 1.4.2.
# Behaviour: bootstrap_effect treats other units as if they were the treated one. Their effects, which are about 0, give
#   a standard error for the two other methods; for ci_method 'percentile' their quantiles are returned as the interval
#   of the effect.
# Expected: an interval around the effect, such as the effect less the quantiles of the placebos.
# Why it matters here: an interval that contains 0 is reported as no effect, and this one does whatever the effect is.
# Instead: subtract the two limits from the effect and exchange them, as below, or ci_method='normal'.
# Source: Abadie, Diamond and Hainmueller (2010), "Synthetic control methods for comparative case studies", Journal of
#   the American Statistical Association 105(490): placebos are the distribution without an effect.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'synthctrl==0.1.1' 'pandas==2.2.3' 'numpy==1.26.4' 'scipy==1.15.3' 'matplotlib==3.10.1' 'seaborn==0.13.2' 'statsmodels==0.14.4' 'scikit-learn==1.6.1' 'joblib==1.4.2'
cat > expected.txt <<'EXPECTED'
effect 0, estimate 0.2: percentile interval -2.3 to 1.9, normal -1.6 to 2.0, percentiles around the estimate -1.8 to 2.5
effect 10, estimate 10.2: percentile interval -2.3 to 1.9, normal 8.4 to 12.0, percentiles around the estimate 8.2 to 12.5
effect -10, estimate -9.8: percentile interval -2.3 to 1.9, normal -11.6 to -8.0, percentiles around the estimate -11.8 to -7.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from synthetic_control import ClassicSyntheticControl

random = np.random.default_rng(0)
levels, slopes = random.normal(50, 1, 15), random.normal(1, 0.05, 15)
levels[0], slopes[0] = 50, 1
for effect in (0, 10, -10):
    noise = np.random.default_rng(1)
    rows = [
        (unit, month, levels[unit] + slopes[unit] * month + noise.normal(0, 0.5) + effect * (unit == 0 and month >= 15),
         unit == 0, month >= 15)
        for unit in range(15) for month in range(20)
    ]
    table = pd.DataFrame(rows, columns=['clinic', 'month', 'visits', 'treated', 'after'])
    model = ClassicSyntheticControl(
        data=table, metric='visits', period_index='month', unit_id='clinic', treated='treated', after_treatment='after',
        bootstrap_rounds=60,
    )
    model.fit()
    found = model.estimate_effect()['att']
    interval, normal = (model.bootstrap_effect(ci_method=method) for method in ('percentile', 'normal'))
    low, high = interval['ci_lower'], interval['ci_upper']
    print(f'effect {effect}, estimate {found:.1f}: percentile interval {low:.1f} to {high:.1f}, normal '
          f"{normal['ci_lower']:.1f} to {normal['ci_upper']:.1f}, percentiles around the estimate {found - high:.1f} to "
          f'{found - low:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
