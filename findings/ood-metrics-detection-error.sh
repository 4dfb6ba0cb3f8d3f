#!/usr/bin/env bash
# The detection error of ood-metrics has the weights of the two kinds exchanged: for scores of pure chance, with
# 1 % of the images in distribution, it is 0.01 in place of 0.94 or more.
#
# Packages: ood-metrics 1.1.2, numpy 2.4.6, scikit-learn 1.9.1, matplotlib 3.11.2.
# Behaviour: detection_error, documented as the misclassification probability when the TPR is 95 %, multiplies
#   the false positive rate by the share of the positives and the rate of misses by the share of the negatives.
# Expected: share of positives × misses + share of negatives × false positives, which is the share of all
#   examples on the wrong side; the paper that it follows takes both kinds for equally frequent, 0.5 each.
#   All three agree for equal numbers alone.
# Instead: equal numbers of both kinds, or the formula below.
# Source: Liang, Li and Srikant, Enhancing the Reliability of Out-of-distribution Image Detection, ICLR 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scikit-learn==1.9.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'ood-metrics==1.1.2'
cat > expected.txt <<'EXPECTED'
1000 in and 1000 out, no difference: ood-metrics 0.49, share on the wrong side 0.49, by the paper 0.49
1000 in and 1000 out, 3 standard deviations: ood-metrics 0.07, share on the wrong side 0.07, by the paper 0.07
100 in and 9900 out, no difference: ood-metrics 0.01, share on the wrong side 0.94, by the paper 0.50
100 in and 9900 out, 3 standard deviations: ood-metrics 0.00, share on the wrong side 0.04, by the paper 0.05
9900 in and 100 out, no difference: ood-metrics 0.96, share on the wrong side 0.01, by the paper 0.50
9900 in and 100 out, 3 standard deviations: ood-metrics 0.13, share on the wrong side 0.01, by the paper 0.09
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from ood_metrics import detection_error
from sklearn.metrics import roc_curve

random = np.random.default_rng(0)
for inside, outside in ((1000, 1000), (100, 9900), (9900, 100)):
    labels = np.r_[np.ones(inside, int), np.zeros(outside, int)]
    for name, distance in (('no difference', 0.0), ('3 standard deviations', 3.0)):
        scores = random.normal(0, 1, inside + outside) + distance * labels
        fpr, tpr, thresholds = roc_curve(labels, scores)
        counted = min(np.mean((scores >= t) != labels) for t, rate in zip(thresholds, tpr) if rate >= 0.95)
        paper = min(0.5 * (1 - t) + 0.5 * f for t, f in zip(tpr, fpr) if t >= 0.95)
        print(f'{inside} in and {outside} out, {name}: ood-metrics {detection_error(scores, labels):.2f}, '
              f'share on the wrong side {counted:.2f}, by the paper {paper:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
