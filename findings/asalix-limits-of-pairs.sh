#!/usr/bin/env bash
# The control charts of asalix have the factors of samples of two, whatever the size of the
# samples.
#
# Packages: asalix 0.1.3, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: The factors A2, D3, D4, A3, B3 and B4 are looked up by the smallest difference of the
#   table's sizes and the wanted one, without its sign, which is the smallest size always. The
#   wanted one is also the number of samples and not their size. For samples of five the limits of
#   an X-bar chart are 1.88 ranges from the mean in place of 0.58, and the lower limit of the
#   ranges is 0.076 where it is 0. Of samples that are shifted by four standard errors none is out
#   of them, where 87 % should be.
# Expected: A2 = 0.577, D3 = 0, D4 = 2.114 for samples of five: 0.3 % of the samples of a stable
#   process are out.
# Instead: take the factors from the table for the size of the samples.
# Source: Montgomery, Introduction to Statistical Quality Control, appendix VI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'asalix==0.1.3'
cat > expected.txt <<'EXPECTED'
samples of 2: limits 1.880 ranges from the mean, in the table 1.88; of 200 samples that are shifted by 4 standard errors 175 are out, by the table 175
samples of 3: limits 1.880 ranges from the mean, in the table 1.023; of 200 samples that are shifted by 4 standard errors 15 are out, by the table 170
samples of 5: limits 1.880 ranges from the mean, in the table 0.577; of 200 samples that are shifted by 4 standard errors 0 are out, by the table 174
samples of 10: limits 1.880 ranges from the mean, in the table 0.308; of 200 samples that are shifted by 4 standard errors 0 are out, by the table 163
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import asalix
import numpy as np

random = np.random.default_rng(0)
from asalix.numerical_methods import NumericalMethods

for size, factor in ((2, 1.880), (3, 1.023), (5, 0.577), (10, 0.308)):
    samples = {day: random.normal(100, 10, size) for day in range(200)}
    low, _, high, _, mean, spread = NumericalMethods.calculate_control_limits(samples, 'XbarR')
    shifted = random.normal(100 + 25 / np.sqrt(size) * 1.6, 10, (200, size)).mean(axis=1)
    right = mean + factor * spread
    print(f'samples of {size}: limits {(high - mean) / spread:.3f} ranges from the mean, in the table {factor};',
          f'of 200 samples that are shifted by 4 standard errors {np.sum(shifted > high)} are out, by the table {np.sum(shifted > right)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
