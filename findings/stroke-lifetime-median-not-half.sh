#!/usr/bin/env bash
# The median survival of stroke-lifetime is not where half of the patients are alive: 60 % of them are, on its own curve, if
# a fifth dies in the first year.
#
# Packages: stroke-lifetime 3.0.2, numpy 2.2.6.
# Behaviour: the deaths of the first year are taken out with (1 + 0.5) / (1 + p1) - 1. The curve itself is (1 - p1) times
#   (1 - hazard), so that 1 - 0.5 / (1 - p1) would be half. A comment beside another function says that its author replaced
#   this formula there, to get "the expected result for the survival-time graph".
# Expected: survival_by_year is 0.5 at the median. With p1 = 0.5 both would be 1 year, and the quartiles are off alike.
# Why it matters here: life expectancy, QALYs, admissions and costs are all counted up to this median.
# Instead: look for 0.5 in the survival by year.
# Source: the cumulative probability of death of the package itself, find_FDeath_yearn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'stroke-lifetime==3.0.2'
cat > expected.txt <<'EXPECTED'
man of 60, mRS 0: dead after a year 1 %, median 20.65 years, at that time 51 % are alive; half are alive at 20.91 years
man of 70, mRS 2: dead after a year 5 %, median 8.28 years, at that time 54 % are alive; half are alive at 8.90 years
man of 75, mRS 3: dead after a year 17 %, median 3.35 years, at that time 60 % are alive; half are alive at 4.21 years
man of 80, mRS 3: dead after a year 22 %, median 2.25 years, at that time 60 % are alive; half are alive at 2.92 years
man of 80, mRS 4: dead after a year 47 %, median 1.09 years, at that time 52 % are alive; half are alive at 1.25 years
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from stroke_lifetime.fixed_params import get_fixed_params
from stroke_lifetime.models import find_FDeath_yearn, find_lpDeath_year1, find_lpDeath_yearn, find_pDeath_year1
from stroke_lifetime.models import find_survival_time_for_pDeath

p = get_fixed_params('mRS')
for age, score in ((60, 0), (70, 2), (75, 3), (80, 3), (80, 4)):
    first = find_pDeath_year1(find_lpDeath_year1(age, 1, score, p['lg_mean_ages'], p['lg_coeffs']))
    later = find_lpDeath_yearn(age, 1, score, p['gz_mean_age'], p['gz_coeffs'])
    median = find_survival_time_for_pDeath(0.5, first, later, p['gz_gamma'])[0]
    alive = 1 - find_FDeath_yearn(median, p['gz_gamma'], first, later)[1]
    times = np.linspace(1, 60, 590001)
    half = times[np.argmax(1 - find_FDeath_yearn(times, p['gz_gamma'], first, later)[1] <= 0.5)]
    print(f'man of {age}, mRS {score}: dead after a year {100 * first:.0f} %, median {median:.2f} years, at that time '
          f'{100 * alive:.0f} % are alive; half are alive at {half:.2f} years')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
