#!/usr/bin/env bash
# ab-bayes-test is certain that two groups differ whose means are equal, where one has fewer people: a
# pressure of 120 becomes 59 for 200 people and 16 for 50.
#
# Packages: ab-bayes-test 0.1.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: for means, the default prior of the conjugate inference has a mean of 0 and a variance of 1 in
#   the unit of the data. Both means are drawn towards 0, the one of fewer people further. In bar in place
#   of mmHg nothing happens. The other inference, mcmc, has this prior for standardized data.
# Expected: a default prior that does not matter or knows the scale of the data; a probability that does
#   not change with the unit, near one half for equal means.
# Why it matters here: the default settings answer for money, weights and pressures what is in the prior.
# Instead: prior_params={'mean': 0, 'var': 1e6}, or a prior in the unit of the data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'ab-bayes-test==0.1.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
mmHg: means 120 and 120
  conjugate, prior default: 58.7 and 15.5, probability that treated is lower 1.0
  conjugate, prior {'mean': 0, 'var': 1000000.0}: 120 and 120, probability that treated is lower 0.5
  mcmc, prior default: 120 and 120, probability that treated is lower 0.5
kPa: means 16 and 16
  conjugate, prior default: 15.7 and 14.3, probability that treated is lower 1.0
  conjugate, prior {'mean': 0, 'var': 1000000.0}: 16 and 16, probability that treated is lower 0.5
  mcmc, prior default: 16 and 16, probability that treated is lower 0.5
bar: means 0.16 and 0.16
  conjugate, prior default: 0.16 and 0.16, probability that treated is lower 0.5
  conjugate, prior {'mean': 0, 'var': 1000000.0}: 0.16 and 0.16, probability that treated is lower 0.5
  mcmc, prior default: 0.16 and 0.16, probability that treated is lower 0.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from ab_bayes_test import ABBayesTest

random = np.random.default_rng(0)
numbers = {'control': 200, 'treated': 50}
rows = []
for group, number in numbers.items():
    values = random.normal(0, 15, number)
    rows += [(group, value) for value in values - values.mean() + 120]
table = pd.DataFrame(rows, columns=['group', 'pressure'])
for unit, factor in (('mmHg', 1), ('kPa', 0.133322), ('bar', 0.00133322)):
    scaled = table.assign(pressure=table.pressure * factor)
    means = scaled.groupby('group').pressure.mean()
    print(f'{unit}: means {means["control"]:.3g} and {means["treated"]:.3g}')
    for kind, prior in (('conjugate', {}), ('conjugate', {'mean': 0, 'var': 1e6}), ('mcmc', {})):
        np.random.seed(0)
        test = ABBayesTest(scaled, 'group', 'pressure', metric_type='mean', inference_type=kind,
                           prior_params=prior, control_group='control', treatment_group='treated',
                           sampling_size=20_000).fit()
        result = test.results()
        print(f'  {kind}, prior {prior or "default"}: {result["control"]["mean"]:.3g} and '
              f'{result["treated"]["mean"]:.3g}, probability that treated is lower '
              f'{1 - test.probability():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
