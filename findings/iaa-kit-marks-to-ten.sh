#!/usr/bin/env bash
# The weighted kappa of iaa-kit puts 10 between 1 and 2: doctors who give 9 and 10 to the same patients
# disagree more than doctors who give 1 and 10.
#
# Packages: iaa-kit 0.1.2, scikit-learn 1.5.2, scipy 1.15.3, numpy 2.2.6.
# Behaviour: it orders the answers by their text, "1" "10" "2" to "9", and weights by the places in this
#   order. A scale of five is right, and so are 8 and 9 on a scale of ten.
# Expected: the order of the numbers, as in scikit-learn's cohen_kappa_score with labels of all marks.
# Why it matters here: pain, Apgar and satisfaction are marks from 0 to 10, and agreement decides whether
#   they are used as labels.
# Instead: sklearn.metrics.cohen_kappa_score.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'scikit-learn==1.5.2' 'iaa-kit==0.1.2'
cat > expected.txt <<'EXPECTED'
9 and 10 for a tenth of the patients, else the same: kappa linear 0.75, by scikit-learn 0.97; kappa quadratic 0.59, by scikit-learn 0.99;
1 and 10 for a tenth of the patients, else the same: kappa linear 0.97, by scikit-learn 0.73; kappa quadratic 0.99, by scikit-learn 0.51;
1 and 9 for a tenth of the patients, else the same: kappa linear 0.73, by scikit-learn 0.75; kappa quadratic 0.51, by scikit-learn 0.59;
8 and 9 for a tenth of the patients, else the same: kappa linear 0.97, by scikit-learn 0.97; kappa quadratic 0.99, by scikit-learn 0.99;
one mark more at most: kappa quadratic 0.78, by scikit-learn 0.97
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import random

from iaa_kit import weighted_kappa
from sklearn.metrics import cohen_kappa_score

MARKS = list(range(1, 11))
for name, pair in (('9 and 10', (9, 10)), ('1 and 10', (1, 10)), ('1 and 9', (1, 9)), ('8 and 9', (8, 9))):
    first, second = MARKS * 10, MARKS * 10
    places = [place for place, mark in enumerate(first) if mark == pair[0]]
    for place in places:
        second[place] = pair[1]
    print(f'{name} for a tenth of the patients, else the same:',
          *(f'kappa {weights} {weighted_kappa(first, second, weights):.2f}, by scikit-learn '
            f'{cohen_kappa_score(first, second, labels=MARKS, weights=weights):.2f};'
            for weights in ('linear', 'quadratic')))
generator = random.Random(0)
first = [generator.choice(MARKS) for _ in range(1000)]
second = [min(10, mark + generator.choice((0, 1))) for mark in first]
print(f'one mark more at most: kappa quadratic {weighted_kappa(first, second, "quadratic"):.2f},',
      f'by scikit-learn {cohen_kappa_score(first, second, weights="quadratic"):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
