#!/usr/bin/env bash
# The chi-square test of hypothetical cuts the expected frequency down to a whole number.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: ChiSquareTest documents that the expected frequencies are the mean of the observed ones
#   where they are not given. It fills an array like the one of the counts with the mean, and an array
#   of whole numbers cuts 1.67 down to 1. The expected frequencies then do not add up to the number of
#   people, and the statistic of nearly equal counts is many times too large. The same counts with a
#   decimal point have another statistic.
# Expected: the mean, as it is documented.
# Instead: pass the counts as floats, or scipy.stats.chisquare.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
[1, 2, 2]: expected 1 each, chi-square 2.000, p 0.368; mean 1.667, chi-square 0.400, p 0.819
[3, 2, 3, 3, 2, 3]: expected 2 each, chi-square 2.000, p 0.849; mean 2.667, chi-square 0.500, p 0.992
[19, 20, 20, 20]: expected 19 each, chi-square 0.158, p 0.984; mean 19.750, chi-square 0.038, p 0.998
[19.0, 20, 20, 20]: expected 19.75 each, chi-square 0.038, p 0.998; mean 19.750, chi-square 0.038, p 0.998
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hypothetical.gof import ChiSquareTest
from scipy import stats

for counts in ([1, 2, 2], [3, 2, 3, 3, 2, 3], [19, 20, 20, 20], [19.0, 20, 20, 20]):
    test = ChiSquareTest(counts)
    right = stats.chisquare(counts)
    print(f'{counts}: expected {test.expected[0]} each, chi-square {test.chi_square:.3f}, p {test.p_value:.3f};',
          f'mean {sum(counts) / len(counts):.3f}, chi-square {right.statistic:.3f}, p {right.pvalue:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
