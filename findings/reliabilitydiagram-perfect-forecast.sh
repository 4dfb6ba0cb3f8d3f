#!/usr/bin/env bash
# The Brier score of ReliabilityDiagram is 0.01 for a perfect forecast and 0 for none: it takes each
# probability for the middle of its bin.
#
# Packages: reliabilitydiagram 0.0.3, numpy 2.4.6, statsmodels 0.15.0, scipy 1.17.1, pandas 3.1.1.
# Behaviour: forecast_attributes counts the forecasts in bins of equal width and computes the score and
#   its reliability as if each forecast were the middle of its bin. A probability of 0 is 0.1 in the
#   first of five bins. With the default of five bins a forecast that is always right has the score and
#   the reliability of one that says 10 and 90 %, and with two bins 0.0625.
# Expected: "Perfect forecasts will have a brier score of zero", as its documentation says; the mean of
#   the forecasts of a bin in place of its middle.
# Why it matters here: the reliability is the error of calibration, and an ensemble of few members has
#   probabilities at the edges of bins.
# Instead: the mean of the squared differences, computed from the probabilities.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'reliabilitydiagram==0.0.3' 'numpy==2.4.6' \
  'statsmodels==0.15.0' 'scipy==1.17.1' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
always right, 2 bins: Brier score 0.0625, reliability 0.0625; from the probabilities 0.0000
always right, 5 bins: Brier score 0.0100, reliability 0.0100; from the probabilities 0.0000
always right, 10 bins: Brier score 0.0025, reliability 0.0025; from the probabilities 0.0000
90 % right, says 10 and 90 %, 5 bins: Brier score 0.0900, reliability 0.0000; from the probabilities 0.0900
90 % right, says 0 and 100 %, 5 bins: Brier score 0.0900, reliability 0.0000; from the probabilities 0.1000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from ReliabilityDiagram import ReliabilityDiagram

people = 1000
happens = numpy.arange(people) % 2 == 0  # above the middle of the climatology, -1 and 1 by turns
climatology = numpy.tile([-1.0, 1.0], (people, 20))
right = numpy.arange(people) % 20 >= 2  # 90 % of each


def report(name, bins, probability):
    members = numpy.where(numpy.arange(10) < numpy.round(10 * probability)[:, None], 2.0, -2.0)
    diagram = ReliabilityDiagram(numpy.where(happens, 2.0, -2.0), members, climatology, 0.5, 1, nbins=bins)
    score, reliability, _ = diagram.forecast_attributes()
    print(f'{name}, {bins} bins: Brier score {score:.4f}, reliability {reliability:.4f}; from the probabilities '
          f'{numpy.mean((probability - happens) ** 2):.4f}')


for bins in (2, 5, 10):
    report('always right', bins, happens.astype(float))
report('90 % right, says 10 and 90 %', 5, numpy.where(happens == right, 0.9, 0.1))
report('90 % right, says 0 and 100 %', 5, numpy.where(happens == right, 1.0, 0.0))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
