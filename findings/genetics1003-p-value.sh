#!/usr/bin/env bash
# genetics1003 rejects the Hardy-Weinberg equilibrium at 0.05 where the p-value is 0.053, and keeps a marker at 1e-6 whose
# p-value is 6e-7: it approximates a distribution that it needs for one degree of freedom only.
#
# Packages: genetics1003 2.1.1.
# Behaviour: the p-value of each chi-square test is the Wilson-Hilferty approximation, "a reliable approximation for df >= 1".
#   With one degree of freedom, which 2x2 tables and the equilibrium of two alleles always have, it is too small around
#   0.05 and too large below 0.01, by a factor of five at 1e-6 and of 350 at 1e-12. Functions that compute the exact value
#   are in the same class and not called.
# Expected: erfc(sqrt(chi-square / 2)), which the standard library of Python has.
# Why it matters here: 0.05 and 1e-6 are the two limits by which deviations are reported and markers are removed.
# Instead: math.erfc(math.sqrt(statistic / 2)) for one degree of freedom.
# Source: the square of a standard normal number has the chi-square distribution with one degree of freedom.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'genetics1003==2.1.1'
cat > expected.txt <<'EXPECTED'
(20, 50, 65): chi-square 3.75, genetics1003 p = 0.05 (Reject H0), exact 0.053
(23, 41, 40): chi-square 3.75, genetics1003 p = 0.05 (Reject H0), exact 0.053
(77, 74, 33): chi-square 3.97, genetics1003 p = 0.044 (Reject H0), exact 0.046
(120, 80, 52): chi-square 25.04, genetics1003 p = 2.6e-06 (Reject H0), exact 5.6e-07
(120, 60, 60): chi-square 52.27, genetics1003 p = 1.7e-10 (Reject H0), exact 4.8e-13
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import erfc, sqrt
from genetics1003 import HardyWeinbergCalculator

for counts in ((20, 50, 65), (23, 41, 40), (77, 74, 33), (120, 80, 52), (120, 60, 60)):
    result = HardyWeinbergCalculator(dict(zip(('AA', 'Aa', 'aa'), counts))).perform_test()
    right = erfc(sqrt(result['chi_square_statistic'] / 2))
    print(f"{counts}: chi-square {result['chi_square_statistic']:.2f}, genetics1003 p = {result['p_value']:.2g} ({result['result'].split(' (')[0]}), exact {right:.2g}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
