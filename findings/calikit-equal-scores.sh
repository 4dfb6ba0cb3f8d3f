#!/usr/bin/env bash
# The calibration error of calikit depends on the order of the file where scores are equal: the same
# forecast of 0.3 is calibrated perfectly, or wrong by 0.42.
#
# Packages: calikit 0.1.0.
# Behaviour: its default bins hold equal numbers of records. They divide equal scores in the order in
#   which they stand, so in a file that is sorted by the outcome each bin holds one outcome only.
#   Marks from 1 to 10, for which it has an option, are full of equal scores. Spiegelhalter's test
#   beside it is right.
# Expected: equal scores in one bin, so that the order of records does not matter.
# Why it matters here: a private model whose noise hides the signal gives all records nearly one score,
#   and its tables are often sorted by outcome or by hospital.
# Instead: --scheme width, which puts equal scores into one bin.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'calikit==0.1.0'
cat > expected.txt <<'EXPECTED'
risk of 0.3 for all, 300 of 1000 ill, sorted by outcome: calibration error 0.42, with bins of equal width 0.00; p-value of the test 1.00
risk of 0.3 for all, 300 of 1000 ill, shuffled: calibration error 0.02, with bins of equal width 0.00; p-value of the test 1.00
marks from 1 to 10 that are right, 20 bins, sorted by outcome: calibration error 0.22
marks from 1 to 10 that are right, 20 bins, shuffled: calibration error 0.03
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import random

from calikit import bin_predictions, ece, spiegelhalter

outcomes = [1] * 300 + [0] * 700
shuffled = random.Random(0).sample(outcomes, 1000)
for name, labels in (('sorted by outcome', outcomes), ('shuffled', shuffled)):
    errors = [ece(bin_predictions([0.3] * 1000, labels, scheme=scheme)) for scheme in ('mass', 'width')]
    p_value = spiegelhalter([0.3] * 1000, labels)[1]
    print(f'risk of 0.3 for all, 300 of 1000 ill, {name}: calibration error {errors[0]:.2f},',
          f'with bins of equal width {errors[1]:.2f}; p-value of the test {p_value:.2f}')
marks = [mark for mark in range(1, 11) for _ in range(100)]
risks = [(mark - 1) / 9 for mark in marks]
honest = [int(place % 100 < round(100 * risk)) for place, risk in enumerate(risks)]
mixed = random.Random(0).sample(list(zip(risks, honest)), 1000)
for name, pairs in (('sorted by outcome', list(zip(risks, honest))), ('shuffled', mixed)):
    error = ece(bin_predictions(*map(list, zip(*pairs)), k=20))
    print(f'marks from 1 to 10 that are right, 20 bins, {name}: calibration error {error:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
