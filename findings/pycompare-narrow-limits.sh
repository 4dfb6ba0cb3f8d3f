#!/usr/bin/env bash
# Two packages for Bland-Altman plots draw limits of agreement that are too narrow.
#
# Packages: pyCompare 1.5.4, bland-altman 0.1.4, matplotlib 3.11.2, numpy 2.4.6, scipy 1.17.1.
# Behaviour: both divide the sum of the squared differences by n in place of n - 1, so that the limits of
#   5 pairs are 11 % too narrow. pyCompare offers exact confidence intervals for small samples, and multiplies
#   their factors, made for n - 1, with that standard deviation. Its 95 % interval of the mean
#   difference of 5 pairs holds the true one in 93 % of all studies.
# Expected: the sample standard deviation, as Bland and Altman use it.
# Instead: pingouin or statsmodels, or multiply the distances from the mean by sqrt(n / (n - 1)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyCompare==1.5.4' 'bland-altman==0.1.4' 'matplotlib==3.11.2' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
pyCompare:    limits -7.13 to 9.13
bland-altman: limits -7.13 to 9.13
with n - 1:   limits -8.09 to 10.09
95 % interval of the mean: 5.15 to each side, with n - 1 5.76
studies in which such an interval holds the true mean: 93.2%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
from bland_altman import bland_altman_plot
from pyCompare import blandAltman
from scipy.stats import t as student

one = np.array([118.0, 131, 125, 140, 122])
other = np.array([121.0, 126, 127, 133, 124])
difference = one - other
right = difference.mean() + 1.96 * difference.std(ddof=1) * np.array([-1, 1])
axes = blandAltman(one, other, ax=plt.subplots()[1])
drawn = sorted({round(float(line.get_ydata()[0]), 2) for line in axes.lines})
print('pyCompare:    limits', drawn[0], 'to', drawn[-1])
plt.figure()
bland_altman_plot(one, other)
drawn = sorted({round(float(line.get_ydata()[0]), 2) for line in plt.gcf().axes[0].lines})
print('bland-altman: limits', drawn[0], 'to', drawn[-1])
print('with n - 1:   limits', round(float(right[0]), 2), 'to', round(float(right[1]), 2))
low, high = np.sort(axes.patches[0].get_extents().transformed(axes.transData.inverted()).get_points()[:, 1])
right = student.ppf(0.975, 4) * difference.std(ddof=1) / np.sqrt(5)
print(f'95 % interval of the mean: {(high - low) / 2:.2f} to each side, with n - 1 {right:.2f}')
covered = 2 * student.cdf(student.ppf(0.975, 4) * np.sqrt(4 / 5), 4) - 1
print(f'studies in which such an interval holds the true mean: {covered:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
