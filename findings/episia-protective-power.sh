#!/usr/bin/env bash
# episia finds no power in a study of anything that lowers a risk.
#
# Packages: episia 0.1.3, scipy 1.13.1, statsmodels 0.14.4, numpy 1.26.4, pandas 2.2.3.
# Behaviour: power_calculation subtracts the quantile of the test from the difference of the risks
#   with its sign. For a risk ratio or odds ratio below 1 the result is a power near 0, the lower
#   the more people there are. The sizes that sample_size_risk_ratio gives for the same ratio are
#   right.
# Expected: the power of a two-sided test, which the documented default is, for both directions; the
#   size for a power of 80 % has a power of 80 %.
# Why it matters here: the power of a comparison before and after privacy decides whether it is
#   done.
# Instead: exchange the groups, or statsmodels.stats.power.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'episia==0.1.3'
cat > expected.txt <<'EXPECTED'
risk 0.1 to 0.2, 100 in each group: power 0.51, of 20000 simulated studies 0.51
risk 0.1 to 0.2, 500 in each group: power 0.99, of 20000 simulated studies 0.99
risk 0.1 to 0.2, 2000 in each group: power 1.00, of 20000 simulated studies 1.00
risk 0.2 to 0.1, 100 in each group: power 0.00, of 20000 simulated studies 0.52
risk 0.2 to 0.1, 500 in each group: power 0.00, of 20000 simulated studies 0.99
risk 0.2 to 0.1, 2000 in each group: power 0.00, of 20000 simulated studies 1.00
size for a power of 0.80: 199 in each group, whose power is 0.00000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from episia.stats.samplesize import power_calculation, sample_size_risk_ratio
from scipy.stats import norm

for ratio, risk in ((2.0, 0.1), (0.5, 0.2)):
    for people in (100, 500, 2000):
        seen = power_calculation(n_per_group=people, risk_unexposed=risk, risk_ratio=ratio).power
        other = risk * ratio
        random = np.random.default_rng(0)
        first, second = (random.binomial(people, rate, 20000) / people for rate in (risk, other))
        pooled = (first + second) / 2
        z = np.abs(first - second) / np.sqrt(np.maximum(pooled * (1 - pooled), 1e-9) * 2 / people)
        print(f'risk {risk} to {other}, {people} in each group: power {seen:.2f}, '
              f'of 20000 simulated studies {np.mean(z > norm.ppf(0.975)):.2f}')
size = sample_size_risk_ratio(risk_unexposed=0.2, risk_ratio=0.5, power=0.8).n_per_group
seen = power_calculation(n_per_group=size, risk_unexposed=0.2, risk_ratio=0.5).power
print(f'size for a power of 0.80: {size:.0f} in each group, whose power is {seen:.5f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
