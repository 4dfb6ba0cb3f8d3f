#!/usr/bin/env bash
# With percent=True the area of pauc is 8,400 in place of 84, the specificity at a cut-off -19 in place of
# 80, and the accuracy 30 in place of 80.
#
# Packages: pauc 0.2.2, numpy 2.4.6, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: ROC multiplies both rates by 100 and goes on as if they were between 0 and 1: the area is
#   integrated over both, so it is 10,000 times the right one; get_coords computes the specificity as 1
#   minus a percentage, and counts from rates a hundred times too large.
# Expected: 84 and the same counts, as for percent=TRUE of pROC, which the names follow.
# Instead: multiply by 100 afterwards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pauc==0.2.2' 'numpy==2.4.6' 'scipy==1.17.1' \
  'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
percent=False: AUC 0.84; at a cut-off of 4.5 specificity 0.8, sensitivity 0.8, accuracy 0.8
percent=True: AUC 8400; at a cut-off of 4.5 specificity -19, sensitivity 80, accuracy 30.5
by hand: 21 of 25 pairs are in the right order; at 4.5, 4 of 5 are healthy below and 4 of 5 ill above
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from pauc import ROC

ill = 5 * [0] + 5 * [1]
score = [1, 2, 3, 4, 7, 3.5, 5, 6, 8, 9]
for percent in (False, True):
    roc = ROC(ill, score, percent=percent)
    point = roc.get_coords(x=4.5, ret=['specificity', 'sensitivity', 'accuracy'])
    print(f'percent={percent}: AUC {roc.auc:g}; at a cut-off of 4.5',
          ', '.join(f'{name} {float(value):g}' for name, value in point.items()))
print('by hand: 21 of 25 pairs are in the right order; at 4.5, 4 of 5 are healthy below and 4 of 5 ill above')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
