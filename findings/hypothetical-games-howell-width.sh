#!/usr/bin/env bash
# The confidence intervals of the Games-Howell test of hypothetical have the same width whatever the
# data are and in whatever unit.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: GamesHowell documents the difference plus and minus a quantile times the standard error.
#   It adds and subtracts the quantile alone, about 3.4 for three groups. A difference in kilograms has
#   an interval of 7 kg, in grams one of 7 g, and in tonnes one of 7 t, where the p-value beside it is
#   the same.
# Expected: intervals that change with the unit, and contain 0 where the p-value is above 0.05.
# Instead: multiply the half width by the std_error of the same row, which is computed right.
# Source: Games and Howell, Pairwise Multiple Comparison Procedures with Unequal N's, 1976.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
a and c in kg: difference 8.103, interval 4.6494 to 11.557, by hand 3.019 to 13.19, p 0.001
a and c in g: difference 8103, interval 8099.7 to 8106.6, by hand 3019 to 1.319e+04, p 0.001
a and c in t: difference 0.008103, interval -3.4456 to 3.4618, by hand 0.003019 to 0.01319, p 0.001
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hypothetical.posthoc import GamesHowell
from scipy import stats

random = np.random.default_rng(1)
kilograms = np.concatenate([random.normal(mean, 10, 20) for mean in (70, 75, 80)])
groups = np.repeat(['a', 'b', 'c'], 20)
for unit, factor in (('kg', 1), ('g', 1000), ('t', 0.001)):
    result = GamesHowell(kilograms * factor, group=groups).test_result.iloc[1]
    one, other = (kilograms[groups == name] * factor for name in 'ac')
    parts = one.var(ddof=1) / 20, other.var(ddof=1) / 20
    freedom = sum(parts) ** 2 / sum(part**2 / 19 for part in parts)
    half = stats.studentized_range.ppf(0.95, 3, freedom) * np.sqrt(sum(parts) / 2)
    difference = other.mean() - one.mean()
    print(f"a and c in {unit}: difference {result['mean_difference']:.4g},",
          f"interval {result['lower limit']:.5g} to {result['upper_limit']:.5g},",
          f"by hand {difference - half:.4g} to {difference + half:.4g}, p {float(np.squeeze(result['p_value'])):.3f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
