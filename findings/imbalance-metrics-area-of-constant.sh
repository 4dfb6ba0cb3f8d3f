#!/usr/bin/env bash
# The area under the precision-recall curve of imbalance-metrics is 0.51 for a score that is the same for
# everybody, where 1 % are ill and the area is 0.01; a score that finds all of them in 50 has 0.17.
#
# Packages: imbalance-metrics 0.0.6, scikit-learn 1.6.1, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3.
# Behaviour: pr_davis says that it uses the method of Davis and Goadrich, which interpolates false
#   positives and not precision, and does so between thresholds only. Before the first one it draws a
#   straight line from a precision of 1 at a recall of 0, the line that the method is against. pr_manning
#   does the same, where its method takes the largest precision to the right, 0.01.
# Expected: the share of the ill for a constant score, by both methods.
# Why it matters here: a model of few distinct scores, such as a private tree, has a large first step.
# Instead: average_precision_score of scikit-learn.
# Source: Davis and Goadrich, The relationship between Precision-Recall and ROC curves, ICML 2006.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'imbalance-metrics==0.0.6' 'scikit-learn==1.6.1' \
  'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
the same for everybody: pr_davis 0.505, pr_manning 0.505, by the method of Davis 0.010, average precision 0.010
two scores, half of the healthy have the lower one: pr_davis 0.510, pr_manning 0.510, by the method of Davis 0.020, average precision 0.020
a thousand scores, the ill among the first 50: pr_davis 0.165, pr_manning 0.196, by the method of Davis 0.166, average precision 0.189
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
import pandas
from imbalance_metrics.classification_metrics import pr_davis, pr_manning
from sklearn.metrics import average_precision_score


def exact(truth, score):
    """Compute the area by the method of Davis and Goadrich: false positives are linear in true ones."""
    area, hits, alarms = 0.0, 0.0, 0.0
    for value in numpy.unique(score)[::-1]:
        here = truth[score == value]
        more, false = here.sum(), (here == 0).sum()
        for part in (numpy.arange(10000) + 0.5) / 10000 if more else ():
            found, wrong = hits + part * more, alarms + part * false
            area += found / (found + wrong) * more / truth.sum() / 10000
        hits, alarms = hits + more, alarms + false
    return area


truth = pandas.Series(10 * [1] + 990 * [0])
scores = {'the same for everybody': numpy.full(1000, 0.3),
          'two scores, half of the healthy have the lower one': numpy.r_[numpy.full(505, 0.6), numpy.full(495, 0.1)],
          'a thousand scores, the ill among the first 50': numpy.r_[numpy.arange(5, 55, 5), numpy.delete(
              numpy.arange(1000), numpy.arange(5, 55, 5))] * -1.0}
for name, score in scores.items():
    print(f'{name}: pr_davis {pr_davis(truth, score):.3f}, pr_manning {pr_manning(truth, score):.3f}, by the method of '
          f'Davis {exact(truth, score):.3f}, average precision {average_precision_score(truth, score):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
