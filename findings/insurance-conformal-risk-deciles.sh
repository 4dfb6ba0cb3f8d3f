#!/usr/bin/env bash
# The deciles of insurance-conformal-risk hold policies several times where premiums are equal.
#
# Packages: insurance-conformal-risk 0.1.0, polars 1.35.2, numpy 2.4.6.
# Behaviour: shortfall_report puts a policy into each decile whose lower and upper limit, both
#   included, enclose its premium. A premium that is itself a limit, as in a tariff with classes,
#   is in several deciles, all of its policies in each.
# Expected: each policy in one decile, and numbers that add up to all policies. The means of the
#   deciles then weight to the mean of the book.
# Why it matters here: premiums of motor and household insurance are tables, and the report is
#   meant to find the segment that is too cheap.
# Instead: rank the policies by premium and cut the ranks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polars==1.35.2' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'insurance-conformal-risk==0.1.0'
cat > expected.txt <<'EXPECTED'
1000 different premiums: policies in the deciles 100 100 100 100 100 100 100 100 100 100, together 1000; mean shortfall by the deciles 0.0458, of the 1000 policies 0.0458
four tariff classes: policies in the deciles 253 253 478 225 469 244 244 522 278 278, together 3244; mean shortfall by the deciles 0.0453, of the 1000 policies 0.0460
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from insurance_conformal_risk.premium_sufficiency import PremiumSufficiencyController

random = np.random.default_rng(0)
for label, premium in (('1000 different premiums', random.uniform(100, 400, 1000)), ('four tariff classes', random.choice([100.0, 150.0, 220.0, 400.0], 1000))):
    claims = premium * random.exponential(0.4, 1000)
    controller = PremiumSufficiencyController(alpha=0.05, B=4.0).calibrate(claims, premium)
    table = controller.shortfall_report(claims, premium)
    weighted = (table['mean_shortfall'] * table['n_obs']).sum() / table['n_obs'].sum()
    upper = controller.predict(premium)['upper_bound'].to_numpy()
    print(f'{label}: policies in the deciles {" ".join(str(number) for number in table["n_obs"])}, together {table["n_obs"].sum()}; '
          f'mean shortfall by the deciles {weighted:.4f}, of the 1000 policies {(np.maximum(claims - upper, 0) / premium).mean():.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
