#!/usr/bin/env bash
# The Bland-Altman plot of methcomp has the first method where it says the mean of both: a method that reads
# 40 % less differs by 67 % in place of 50 %, and exchanging the methods changes more than the sign.
#
# Packages: methcomp 1.0.0, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, statsmodels 0.14.4, shapely 2.0.7,
#   matplotlib 3.9.4.
# Behaviour: blandaltman computes np.mean([method1, method1]). The axis called "Mean of methods" has the first
#   method, so that differences without any trend seem to grow with the level, by the noise of that method;
#   Bland and Altman take the mean to avoid this. Differences in per cent are divided by it, too.
# Expected: the mean of both methods.
# Instead: plot (a + b) / 2 and (a - b) / ((a + b) / 2) by hand.
# Source: Bland and Altman, Comparing methods of measurement: why plotting difference against standard method
#   is misleading, Lancet 1995.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'methcomp==1.0.0' 'numpy==1.26.4' 'scipy==1.10.1' \
  'pandas==2.2.3' 'statsmodels==0.14.4' 'shapely==2.0.7' 'matplotlib==3.9.4'
cat > expected.txt <<'EXPECTED'
correlation of the difference and the level: methcomp 0.46, with the mean of both -0.06
60 and 100: level 60, difference -66.7 %; by hand 80 and -50.0 %
100 and 60: level 100, difference 40.0 %; by hand 80 and 50.0 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import numpy
from matplotlib import pyplot
from methcomp import blandaltman

generator = numpy.random.default_rng(0)
truth = generator.normal(100, 10, 200)
one, other = truth + generator.normal(0, 10, (2, 200))
points = blandaltman(one, other, ax=pyplot.subplots()[1]).collections[0].get_offsets()
found = numpy.corrcoef(points[:, 0], points[:, 1])[0, 1]
print(f'correlation of the difference and the level: methcomp {found:.2f}, with the mean of both '
      f'{numpy.corrcoef((one + other) / 2, one - other)[0, 1]:.2f}')
for name, first, second in (('60 and 100', numpy.full(200, 60.0), numpy.full(200, 100.0)), ('100 and 60', numpy.full(200, 100.0), numpy.full(200, 60.0))):
    points = blandaltman(first, second, diff='percentage', ax=pyplot.subplots()[1]).collections[0].get_offsets()
    print(f'{name}: level {points[0, 0]:.0f}, difference {points[0, 1]:.1f} %; by hand {(first[0] + second[0]) / 2:.0f} and '
          f'{(first[0] - second[0]) / ((first[0] + second[0]) / 2) * 100:.1f} %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
