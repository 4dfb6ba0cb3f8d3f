#!/usr/bin/env bash
# abpy-toolkit's adjusted p-values of Holm and Benjamini-Hochberg are not monotone.
#
# Packages: abpy-toolkit 0.1.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, matplotlib 3.10.6,
#   statsmodels 0.14.5.
# Behaviour: correction='holm' multiplies the sorted p-values by n, n - 1 and so on, and 'bh' by n /
#   rank, and stops there. Holm's method rejects step by step and ends at the first p-value that is
#   not small enough; adjusted p-values therefore carry the largest one so far, and those of
#   Benjamini and Hochberg the smallest one of the larger p-values. Without that a comparison with a
#   larger p-value is significant where one with a smaller is not, so Holm finds too many (the error
#   that it should keep at 5 % is larger) and Benjamini-Hochberg too few.
# Expected: the adjusted p-values of statsmodels, in the order of the p-values.
# Instead: statsmodels.stats.multitest.multipletests.
# Source: Holm, Scandinavian Journal of Statistics 1979; Benjamini and Hochberg, Journal of the
#   Royal Statistical Society B 1995.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'matplotlib==3.10.6' 'statsmodels==0.14.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'abpy-toolkit==0.1.1'
cat > expected.txt <<'EXPECTED'
holm, p-values [0.012, 0.03, 0.031, 0.045]: [0.048, 0.09, 0.062, 0.045], significant [True, False, False, True]
  statsmodels [0.048, 0.09, 0.09, 0.09], [True, False, False, False]
bh, p-values [0.012, 0.03, 0.031, 0.045]: [0.048, 0.06, 0.041, 0.045], significant [True, False, True, True]
  statsmodels [0.041, 0.041, 0.041, 0.045], [True, True, True, True]
holm, p-values [0.03, 0.031, 0.032]: [0.09, 0.062, 0.032], significant [False, False, True]
  statsmodels [0.09, 0.09, 0.09], [False, False, False]
bh, p-values [0.03, 0.031, 0.032]: [0.09, 0.046, 0.032], significant [False, True, True]
  statsmodels [0.032, 0.032, 0.032], [True, True, True]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from abpy.corrections.multiple import apply_corrections
from statsmodels.stats.multitest import multipletests

names = {'holm': 'holm', 'bh': 'fdr_bh'}
for values in ((0.012, 0.030, 0.031, 0.045), (0.030, 0.031, 0.032)):
    for short, name in names.items():
        comparisons = {f'{number}': {'p_value': value} for number, value in enumerate(values)}
        adjusted = apply_corrections(comparisons, short)
        seen = [round(adjusted[f'{number}']['p_value_adjusted'], 3) for number in range(len(values))]
        right = multipletests(values, method=name)[1].round(3).tolist()
        print(f'{short}, p-values {list(values)}: {seen}, significant {[value < 0.05 for value in seen]}')
        print(f'  statsmodels {right}, {[value < 0.05 for value in right]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
