#!/usr/bin/env bash
# The Deming regression of methcomp does not use which values belong together: two methods that have nothing
# in common have a slope of 0.93, as if they agreed, and sorting one of two lists changes nothing.
#
# Packages: methcomp 1.0.0, numpy 1.26.4, scipy 1.10.1, pandas 2.2.3, statsmodels 0.14.4, shapely 2.0.7,
#   matplotlib 3.9.4.
# Behaviour: deming takes np.cov(x, y)[1][1] for the covariance, which is the variance of the second method, and
#   has its square in place of the square of the covariance under the root. The slope depends on the two
#   variances alone: it is the same for each order of the second method, and never negative.
# Expected: (b + sqrt(b^2 + 4 k c^2)) / (2 c) with b = var(y) - k var(x), the covariance c and the ratio k.
# Instead: scipy.odr, or the formula above.
# Source: Linnet, Evaluation of regression procedures for methods comparison studies, Clinical Chemistry 1993.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'methcomp==1.0.0' 'numpy==1.26.4' 'scipy==1.10.1' \
  'pandas==2.2.3' 'statsmodels==0.14.4' 'shapely==2.0.7' 'matplotlib==3.9.4'
cat > expected.txt <<'EXPECTED'
20 % less: methcomp 1.85 + 0.78 * Method 1, by hand -0.09 + 0.80, correlation 0.91
the same values, one list sorted: methcomp 1.85 + 0.78 * Method 1, by hand 98.40 + -0.20, correlation -0.08
the same values, one list reversed: methcomp 1.85 + 0.78 * Method 1, by hand 159.53 + -0.81, correlation -0.99
nothing in common: methcomp 7.67 + 0.93 * Method 1, by hand 86.20 + 0.12, correlation 0.02
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import matplotlib

matplotlib.use('Agg')
import numpy
from matplotlib import pyplot
from methcomp import deming


def by_hand(one, other):
    (first, both), (_, second) = numpy.cov(one, other)
    slope = (second - first + numpy.sqrt((second - first) ** 2 + 4 * both ** 2)) / (2 * both)
    return other.mean() - slope * one.mean(), slope


generator = numpy.random.default_rng(1)
truth = generator.normal(100, 15, 60)
first = truth + generator.normal(0, 4, 60)
second = 0.8 * truth + generator.normal(0, 4, 60)
for name, one, other in (('20 % less', first, second), ('the same values, one list sorted', first, numpy.sort(second)),
                         ('the same values, one list reversed', numpy.sort(first), numpy.sort(second)[::-1]),
                         ('nothing in common', generator.normal(100, 15, 60), generator.normal(100, 15, 60))):
    axes = deming(one, other, bootstrap=None, ax=pyplot.subplots()[1])
    print(f'{name}: methcomp {axes.get_legend_handles_labels()[1][1]}, by hand {by_hand(one, other)[0]:.2f} + '
          f'{by_hand(one, other)[1]:.2f}, correlation {numpy.corrcoef(one, other)[0, 1]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
