#!/usr/bin/env bash
# The geometric mean score of imbalance-metrics is 0.10 for a perfect classifier of a disease that 1 %
# have, and 0.50 for one that half have: it is a number times the right one, and the number is the data.
#
# Packages: imbalance-metrics 0.0.6, scikit-learn 1.6.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3.
# Behaviour: with weighted=True, its default, gmean_score multiplies the recall of each class by a weight
#   of the class; the weights add up to 1. A product of recalls times a product of weights is the
#   unweighted score times a constant that depends on the shares of the classes alone, so nothing is
#   weighted: the order of two classifiers is the same, and scores of two data sets do not compare.
# Expected: 1 for a perfect classifier; weights as exponents, which change what counts more.
# Instead: weighted=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'imbalance-metrics==0.0.6' 'scikit-learn==1.6.1' \
  'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
1 % ill, perfect: gmean_score 0.099, unweighted 1.000, their ratio 0.099
1 % ill, finds all of the ill and half of the healthy: gmean_score 0.070, unweighted 0.707, their ratio 0.099
1 % ill, finds half of the ill and all of the healthy: gmean_score 0.070, unweighted 0.707, their ratio 0.099
half ill, perfect: gmean_score 0.500, unweighted 1.000, their ratio 0.500
half ill, finds a quarter of each: gmean_score 0.125, unweighted 0.250, their ratio 0.500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas
from imbalance_metrics.classification_metrics import gmean_score


def report(name, truth, guesses):
    truth, guesses = pandas.Series(truth), pandas.Series(guesses)
    weighted, plain = gmean_score(truth, guesses), gmean_score(truth, guesses, weighted=False)
    print(f'{name}: gmean_score {weighted:.3f}, unweighted {plain:.3f}, their ratio {weighted / plain:.3f}')


rare = 10 * [1] + 990 * [0]
report('1 % ill, perfect', rare, rare)
report('1 % ill, finds all of the ill and half of the healthy', rare, 10 * [1] + 495 * [0] + 495 * [1])
report('1 % ill, finds half of the ill and all of the healthy', rare, 5 * [1] + 5 * [0] + 990 * [0])
half = 500 * [1] + 500 * [0]
report('half ill, perfect', half, half)
report('half ill, finds a quarter of each', half, 125 * [1] + 375 * [0] + 125 * [0] + 375 * [1])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
