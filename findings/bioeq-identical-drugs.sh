#!/usr/bin/env bash
# bioeq cannot find a drug bioequivalent with itself.
#
# Packages: bioeq 0.1.4, polars 1.31.0, statsmodels 0.14.4, scipy 1.15.3, pandas 2.2.3, numpy 2.2.6.
# Behaviour: run_rsabe tests whether the upper bound of (difference of the logarithms)² - θ s² is at
#   most 0. It takes 0 for θ where the coefficient of variation is at most 30 %, so a square would
#   have to be negative: no data fulfil it. Above 30 % θ is the squared coefficient of the sample,
#   where the guidance has (ln 1.25 / 0.25)² = 0.797, and the wider limits end at 75 and 125 %.
# Expected: below 30 %, 80 to 125 % for the 90 % interval of the ratio, which the package's other
#   designs use; above it, θ = 0.797 and limits exp(±0.893 s).
# Why it matters here: the conclusion of a trial is turned round without a message.
# Instead: calculate_point_estimate of Crossover2x2, or the interval of the mixed model by hand.
# Source: FDA's guidance on progesterone, 2011; Davit and others, AAPS Journal 2012.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'scipy==1.15.3' 'statsmodels==0.14.4' 'polars==1.31.0' 'pyarrow==19.0.1' 'bioeq==0.1.4'
cat > expected.txt <<'EXPECTED'
variation 9 %: ratio 103 %, interval 100 to 105 %
  bioequivalent by bioeq: False, its limits 80 to 125 %, of the guidance 80 to 125 %
variation 18 %: ratio 105 %, interval 100 to 110 %
  bioequivalent by bioeq: False, its limits 80 to 125 %, of the guidance 80 to 125 %
variation 48 %: ratio 114 %, interval 101 to 128 %
  bioequivalent by bioeq: True, its limits 75 to 125 %, of the guidance 66 to 151 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import numpy as np
import polars as pl
from bioeq.replicate_crossover import ReplicateCrossover
from scipy import stats


def trial(spread, ratio):
    """Return the concentrations of 48 people who take each drug twice, test at ratio of reference."""
    random = np.random.default_rng(0)
    rows = []
    for person in range(48):
        sequence = ('TRTR', 'RTRT')[person % 2]
        level = 100 * math.exp(random.normal(0, 0.3))
        for period, drug in enumerate(sequence, 1):
            dose = level * math.exp(random.normal(0, spread)) * (ratio if drug == 'T' else 1)
            rows += [(person, sequence, period, hour, dose * math.exp(-0.1 * hour) if hour else 0.0,
                      'Test' if drug == 'T' else 'Reference') for hour in (0, 1, 2, 4, 8, 12, 24)]
    return pl.DataFrame(rows, ['person', 'sequence', 'period', 'hour', 'level', 'drug'], orient='row')


for spread in (0.1, 0.2, 0.5):
    study = ReplicateCrossover(trial(spread, 1.0), 'full', 'person', 'sequence', 'period', 'hour', 'level', 'drug')
    seen = study.run_rsabe('log_AUC')
    means = study.params_df.group_by('person', 'drug').agg(pl.col('log_AUC').mean())
    means = means.sort('person').pivot('drug', values='log_AUC')
    difference = (means['Test'] - means['Reference']).to_numpy()
    low, high = stats.t.interval(0.9, 47, difference.mean(), stats.sem(difference))
    limit = math.log(1.25) / 0.25 * math.sqrt(seen['within_subject_variance'])
    lower, upper = seen['expanded_limits']
    print(f"variation {seen['within_subject_cv']:.0f} %: ratio {seen['point_estimate']:.0f} %, interval "
          f'{100 * math.exp(low):.0f} to {100 * math.exp(high):.0f} %')
    print(f"  bioequivalent by bioeq: {bool(seen['be_conclusion'])}, its limits {lower:.0f} to {upper:.0f} %, "
          + ('of the guidance 80 to 125 %' if seen['within_subject_cv'] <= 30 else
             f'of the guidance {100 * math.exp(-limit):.0f} to {100 * math.exp(limit):.0f} %'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
