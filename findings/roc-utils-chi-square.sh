#!/usr/bin/env bash
# The cut-off that roc-utils finds by the largest chi-square statistic is not the one with the largest: it
# divides by one factor of the denominator and multiplies by the others.
#
# Packages: roc-utils 0.2.2, numpy 1.24.4, scipy 1.9.3, pandas 1.5.3, matplotlib 3.7.5.
# Behaviour: the documented statistic is (tpr - fpr)^2 / (q (1 - q) (1/P + 1/N)), q the share of positive
#   results. The parentheses around the denominator are missing, so it is (tpr - fpr)^2 / q, times (1 - q)
#   and a constant. It prefers cut-offs above which few people are: 38 % of the ill in place of 74 %.
# Expected: the documented formula, which is the chi-square statistic of the table at the cut-off.
# Instead: scipy.stats.chi2_contingency for each cut-off, or objective='youden'.
# Source: Miller and Siegmund, Maximally Selected Chi Square Statistics, Biometrics 1982.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'roc-utils==0.2.2' 'numpy==1.24.4' 'scipy==1.9.3' \
  'pandas==1.5.3' 'matplotlib==3.7.5'
cat > expected.txt <<'EXPECTED'
ill people higher by 1.0: roc-utils: cut-off 1.30, chi-square 46.1, which it says is 1.7e-08; 38% of the ill and 10% of the healthy are above
ill people higher by 1.0: the largest of all: cut-off 0.38, chi-square 59.7; 74% of the ill and 35% of the healthy are above
ill people higher by 1.0: by Youden: cut-off 0.56, chi-square 57.9; 67% of the ill and 29% of the healthy are above
ill people higher by 2.0: roc-utils: cut-off 1.72, chi-square 144.9, which it says is 4.2e-08; 61% of the ill and 4% of the healthy are above
ill people higher by 2.0: the largest of all: cut-off 1.09, chi-square 188.1; 82% of the ill and 14% of the healthy are above
ill people higher by 2.0: by Youden: cut-off 0.92, chi-square 185.3; 86% of the ill and 18% of the healthy are above
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from roc_utils import compute_roc
from scipy.stats import chi2_contingency, norm


def statistic(values, ill, cut):
    positive = values > cut
    table = [[(positive & ill).sum(), (positive & ~ill).sum()], [(~positive & ill).sum(), (~positive & ~ill).sum()]]
    return 0.0 if positive.all() or not positive.any() else chi2_contingency(table, correction=False)[0]


spread = norm.ppf((numpy.arange(200) + 0.5) / 200)
for shift in (1.0, 2.0):
    values, ill = numpy.r_[spread, spread + shift], numpy.arange(400) >= 200
    best = max(numpy.unique(values), key=lambda cut: statistic(values, ill, cut))
    found = compute_roc(values, ill, objective='chi2').opd['chi2']
    youden = compute_roc(values, ill, objective='youden').opd['youden']
    for name, cut, value in (('roc-utils', found.opt, f', which it says is {found.opo:.1e}'),
                             ('the largest of all', best, ''), ('by Youden', youden.opt, '')):
        print(f'ill people higher by {shift}: {name}: cut-off {cut:.2f}, chi-square {statistic(values, ill, cut):.1f}{value}; '
              f'{(values[ill] > cut).mean():.0%} of the ill and {(values[~ill] > cut).mean():.0%} of the healthy are above')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
