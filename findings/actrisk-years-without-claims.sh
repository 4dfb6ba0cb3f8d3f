#!/usr/bin/env bash
# actrisk leaves years without a claim out of its exceedance curve of the largest loss.
#
# Packages: actrisk 0.1.0.7, actstats 0.1.1.3, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3, statsmodels 0.15.0,
#   PyYAML 6.0.4.
# Behaviour: analyze_results gives quantiles of the sum of the losses of a year (aep) over all years, and
#   of the largest loss of a year (oep) over the years with a claim. For an event that comes once in
#   ten years the median year has a largest loss of 695 and losses of 0, though the largest one is a
#   part of the sum. apply_deductible_and_limit returns the years with a claim as well, so that the
#   mean of its losses is ten times too large.
# Expected: a largest loss of 0 in a year without a claim, so oep is never above aep.
# Instead: reindex the losses of the years to all years that were simulated, with 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actrisk==0.1.0.7' 'actstats==0.1.1.3' 'numpy==2.4.6' 'scipy==1.17.1' 'pandas==2.3.3' 'statsmodels==0.15.0' 'pyyaml==6.0.4' 'setuptools==68.2.2'
cat > expected.txt <<'EXPECTED'
years without a claim: 90%
50%: largest loss (oep) 695, sum (aep) 0; largest loss of all years 0
90%: largest loss (oep) 2369, sum (aep) 0; largest loss of all years 0
95%: largest loss (oep) 3061, sum (aep) 682; largest loss of all years 671
99%: largest loss (oep) 4785, sum (aep) 2380; largest loss of all years 2325
loss of a year above 500: mean of actrisk 614, over all years 60
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from actrisk.core.actsimulator import StochasticSimulator

np.random.seed(0)
simulator = StochasticSimulator('poisson', (0.1,), 'exponential', (1000,), 20000, True)
with contextlib.redirect_stdout(io.StringIO()):
    losses = np.array(simulator.gen_agg_simulations())
claims = simulator.all_simulations
largest = claims.groupby('year')['amount'].max().reindex(range(1, 20001), fill_value=0)
table = simulator.analyze_results(quantiles=[0.5, 0.9, 0.95, 0.99])
print(f'years without a claim: {np.mean(losses == 0):.0%}')
for share, row in table.iterrows():
    print(f"{share:.0%}: largest loss (oep) {row['oep']:.0f}, sum (aep) {row['aep']:.0f};",
          f'largest loss of all years {np.quantile(largest, share):.0f}')
paid = simulator.apply_deductible_and_limit(500, 5000, 0, 1e9)['gross_loss']
print(f'loss of a year above 500: mean of actrisk {paid.mean():.0f}, over all years {paid.sum() / 20000:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
