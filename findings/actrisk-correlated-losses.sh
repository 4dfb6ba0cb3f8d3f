#!/usr/bin/env bash
# actrisk doubles the losses of a year as soon as it is given a correlation, 0 and negative ones too.
#
# Packages: actrisk 0.1.0.7, actstats 0.1.1.3, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3, statsmodels 0.15.0,
#   PyYAML 6.0.4.
# Behaviour: StochasticSimulator draws the number of claims of a year and their amounts. With a
#   correlation of both, or a copula, it draws one rank for a year and takes each amount from the
#   ranks between it and 1, so that no amount lies below it: the amounts do not have the
#   distribution that was given. Exponential ones with a mean of 1000 have one of 2000.
# Expected: amounts of the distribution that was given, and with a correlation of 0 the same losses as
#   without one.
# Instead: draw both from a Gaussian copula yourself, one rank for each amount.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actrisk==0.1.0.7' 'actstats==0.1.1.3' 'numpy==2.4.6' 'scipy==1.17.1' 'pandas==2.3.3' 'statsmodels==0.15.0' 'pyyaml==6.0.4' 'setuptools==68.2.2'
cat > expected.txt <<'EXPECTED'
{}: claims 5.0, mean amount 1.0 thousand, losses of a year 1.0 times 5000
{'correlation': 0.0}: claims 5.0, mean amount 2.0 thousand, losses of a year 2.0 times 5000
{'correlation': 0.0, 'copula_type': 'gaussian'}: claims 5.0, mean amount 2.0 thousand, losses of a year 2.0 times 5000
{'correlation': -0.3}: claims 5.0, mean amount 1.9 thousand, losses of a year 1.9 times 5000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
from actrisk.core.actsimulator import StochasticSimulator

np.random.seed(0)
gaussian = {'correlation': 0.0, 'copula_type': 'gaussian'}
for options in ({}, {'correlation': 0.0}, gaussian, {'correlation': -0.3}):
    simulator = StochasticSimulator('poisson', (5,), 'exponential', (1000,), 20000, True, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        losses = simulator.gen_agg_simulations()
    amounts = simulator.all_simulations['amount']
    print(f'{options}: claims {len(amounts) / 20000:.1f}, mean amount {amounts.mean() / 1000:.1f} thousand,',
          f'losses of a year {np.mean(losses) / 5000:.1f} times 5000')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
