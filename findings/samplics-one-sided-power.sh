#!/usr/bin/env bash
# samplics' one-sided power of a proportion is the power of a two-sided test.
#
# Packages: samplics 0.6.1, numpy 2.2.6, polars 1.31.0, scipy 1.15.3, statsmodels 0.14.4, pandas
#   2.2.3.
# Behaviour: calculate_power_prop(two_sides=False) keeps the quantile of α / 2, with numbers and
#   with lists; the power for means of the same package changes it to α. Numbers go through the
#   arcsine by default, lists never do, so that one study has two powers. Dictionaries of strata are
#   calculated, and None is returned.
# Expected: the quantile of α for a one-sided test, which has more power; one result for one study.
# Why it matters here: the number of records that a comparison needs is planned by it, and is a
#   quarter too large for a one-sided question.
# Instead: calculate_power_prop with twice the α, and numbers in place of lists.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'scipy==1.15.3' 'statsmodels==0.14.4' 'polars==1.31.0' 'pyarrow==19.0.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'samplics==0.6.1'
cat > expected.txt <<'EXPECTED'
100 people, two sides: numbers 0.52, lists 0.53, of simulated studies 0.54; its power for a mean 0.52
100 people, one side: numbers 0.52, lists 0.53, of simulated studies 0.62; its power for a mean 0.64
300 people, two sides: numbers 0.94, lists 0.94, of simulated studies 0.94; its power for a mean 0.93
300 people, one side: numbers 0.94, lists 0.94, of simulated studies 0.97; its power for a mean 0.97
a dictionary of one stratum: None
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from samplics import calculate_power, calculate_power_prop
from scipy.stats import norm

random = np.random.default_rng(0)
for people in (100, 300):
    seen = random.binomial(people, 0.6, 200000) / people
    z = (np.arcsin(np.sqrt(seen)) - np.arcsin(np.sqrt(0.5))) * 2 * np.sqrt(people)
    for sides, limit in ((True, norm.ppf(0.975)), (False, norm.ppf(0.95))):
        simulated = np.mean((np.abs(z) if sides else z) > limit)
        number = calculate_power_prop(sides, 0.5, 0.6, people)
        listed = calculate_power_prop(sides, [0.5], [0.6], [people])[0]
        mean = calculate_power(sides, 0.2, 1.0, people, 0.05)
        print(f"{people} people, {'two sides' if sides else 'one side'}: numbers {number:.2f}, lists {listed:.2f}, "
              f'of simulated studies {simulated:.2f}; its power for a mean {mean:.2f}')
print('a dictionary of one stratum:', calculate_power_prop(True, {'ward': 0.5}, {'ward': 0.6}, {'ward': 100}))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
