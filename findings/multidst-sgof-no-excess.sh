#!/usr/bin/env bash
# The SGoF method of multidst keeps the p-values that are no excess, and drops the excess.
#
# Packages: multidst 0.1.11, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, statsmodels 0.15.0,
#   matplotlib 3.11.2.
# Behaviour: SGoF compares the number of p-values below 0.05 with the number that is expected by chance,
#   and rejects the smallest ones, as many as there are too many. sgof_test lowers the number until it
#   is what chance explains, and returns that number of tests as significant. Without any effect all
#   p-values below 0.05 are significant, in each set of 100 tests, and with 50, 100 or 200 true
#   effects of 1000 always the same 60 or so.
# Expected: nothing in 95 % of the sets without an effect, and more where there are more effects.
# Instead: reject the smallest p-values, found - critical + 1 of them, as it is computed here.
# Source: Carvajal-Rodríguez, de Uña-Alvarez and Rolán-Alvarez, A new multitest correction (SGoF) that
#   increases its statistical power when increasing the number of tests, 2009.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'statsmodels==0.15.0' 'matplotlib==3.11.2' 'multidst==0.1.11'
cat > expected.txt <<'EXPECTED'
1000 tests, 0 with an effect: 45 below 0.05, SGoF of multidst 45, SGoF by its definition 0
1000 tests, 50 with an effect: 112 below 0.05, SGoF of multidst 63, SGoF by its definition 50
1000 tests, 100 with an effect: 147 below 0.05, SGoF of multidst 63, SGoF by its definition 85
1000 tests, 200 with an effect: 243 below 0.05, SGoF of multidst 63, SGoF by its definition 181
100 tests without an effect, 200 times: something is significant in 100%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib

import numpy as np
from scipy import stats

with contextlib.redirect_stdout(None):
    from multidst.methods.sgof import sgof_test

random = np.random.default_rng(0)

def excess(values, level=0.05):
    found = sum(value <= level for value in values)
    critical = next(count for count in range(len(values) + 1) if stats.binom.sf(count - 1, len(values), level) < level)
    return max(0, found - critical + 1)

for effects in (0, 50, 100, 200):
    values = np.concatenate([random.uniform(0, 1, 1000 - effects), random.uniform(0, 1e-4, effects)])
    print(f'1000 tests, {effects} with an effect: {int(np.sum(values <= 0.05))} below 0.05, SGoF of multidst',
          f'{len(sgof_test(values, 0.05)[1])}, SGoF by its definition {excess(values)}')
runs = [len(sgof_test(random.uniform(0, 1, 100), 0.05)[1]) > 0 for _ in range(200)]
print(f'100 tests without an effect, 200 times: something is significant in {np.mean(runs):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
