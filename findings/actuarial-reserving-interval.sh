#!/usr/bin/env bash
# actuarial-reserving's bootstrap leaves the last development out of its intervals.
#
# Packages: actuarial-reserving 0.1.0, numpy 2.4.6, pandas 2.3.3, matplotlib 3.11.2.
# Behaviour: summary draws accident years with replacement for its 95 % interval. The last factors
#   are known from one or two of the oldest years; in a third of the draws these are missing, the
#   factor is NaN and is skipped, as if claims did not grow any more. Where each year grows by
#   exactly the same factors nothing is uncertain, and the interval reaches from an ultimate without
#   any reserve to the estimate. The estimate is the upper end of the interval.
# Expected: an interval of one point where all years develop alike, or draws that keep a year with
#   each factor.
# Instead: bootstrap the residuals of the triangle, as in the overdispersed Poisson model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actuarial-reserving==0.1.0' 'numpy==2.4.6' 'pandas==2.3.3' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
growth of all years: 1.50, 1.20, 1.20
2020: paid 2160, ultimate 2160, 95 % interval 2160 to 2160
2021: paid 3600, ultimate 4320, 95 % interval 3600 to 4320
2022: paid 2250, ultimate 3240, 95 % interval 2250 to 3240
2023: paid 1200, ultimate 2592, 95 % interval 1800 to 2592
draws without the oldest year: 34%, by hand 32%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from reserving import ChainLadder, Triangle

growth = (1.5, 1.2, 1.2)
years = (2020, 2021, 2022, 2023)
claims = {}
for row, (year, first) in enumerate(zip(years, (1000, 2000, 1500, 1200))):
    values = [float(first)]
    for factor in growth[:3 - row]:
        values.append(values[-1] * factor)
    claims[year] = values + [None] * (4 - len(values))
triangle = Triangle(pd.DataFrame.from_dict(claims, orient='index', columns=[1, 2, 3, 4]))
model = ChainLadder(triangle).fit()
print('growth of all years:', ', '.join(f'{factor:.2f}' for factor in model.factors()))
np.random.seed(0)
table = model.summary(n_boot=999)
for year, row in table.iterrows():
    print(f"{year}: paid {row['latest']:.0f}, ultimate {row['ultimate']:.0f},",
          f"95 % interval {row['ci_lower']:.0f} to {row['ci_upper']:.0f}")
np.random.seed(0)
draws = model._bootstrap_ultimates(999)
print(f'draws without the oldest year: {np.mean(draws[:, 1] < 4319):.0%}, by hand {0.75 ** 4:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
