#!/usr/bin/env bash
# The information agreement of pyagree is 1 between a doctor who gives everybody the same grade and one
# who uses all grades, where the limit that it is defined by is 0.
#
# Packages: pyagree 0.0.4, numpy 2.4.6.
# Behaviour: ia_c is the information agreement, extended by continuity to tables in which a doctor uses
#   one grade only. There it is one minus the share of the rows that are not empty. The function that
#   counts those, count_nonnull_rows, counts the rows that are empty, so the result is one minus the
#   right one. With one patient who is graded otherwise it uses another formula, which is right.
# Expected: the share of the rows that are empty, 0 where the other doctor uses all grades and
#   1/2 where both doctors always give the same one of two grades.
# Instead: count the rows with table.any(axis=1).
# Source: Casagrande, Fabris and Girometti, Beyond kappa: an informational index for diagnostic
#   agreement in dichotomous and multivalue ordered-categorical ratings, 2020; the limit is computed
#   below, with 10^-1000 in each empty cell.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyagree==0.0.4' 'numpy==2.4.6' 'mpmath==1.3.0'
cat > expected.txt <<'EXPECTED'
two grades, one doctor gives everybody grade 1, the other half of them grade 2: ia_c 1.00, limit 0.00
three grades, one doctor gives everybody grade 1, the other a third of them each: ia_c 1.00, limit 0.00
five grades, one doctor gives everybody grade 1, the other half of them grade 2: ia_c 0.40, limit 0.60
five grades, both give everybody grade 1: ia_c 0.20, limit 0.80
three grades, 1000 patients, one of them not like the others: ia_c 0.14
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import mpmath
import numpy
from pyagree import ia_c


def limit(table):
    """Compute mutual information over the smaller entropy, with almost nothing in each empty cell."""
    mpmath.mp.dps = 2100
    cells = [[mpmath.mpf(int(value)) if value else mpmath.mpf(10) ** -1000 for value in row] for row in table]
    total = sum(map(sum, cells))

    def entropy(counts):
        return -sum(count / total * mpmath.log(count / total) for count in counts)

    rows, columns = entropy(map(sum, cells)), entropy(map(sum, zip(*cells)))
    return float((rows + columns - entropy(value for row in cells for value in row)) / min(rows, columns))


for name, column in (('two grades, one doctor gives everybody grade 1, the other half of them grade 2', [50, 50]),
                     ('three grades, one doctor gives everybody grade 1, the other a third of them each', [30, 30, 30]),
                     ('five grades, one doctor gives everybody grade 1, the other half of them grade 2', [50, 50, 0, 0, 0]),
                     ('five grades, both give everybody grade 1', [50, 0, 0, 0, 0])):
    table = numpy.zeros((len(column), len(column)), dtype=int)
    table[:, 0] = column
    print(f'{name}: ia_c {ia_c(table):.2f}, limit {limit(table):.2f}')
table = numpy.array([[334, 0, 0], [333, 0, 0], [332, 1, 0]])
print(f'three grades, 1000 patients, one of them not like the others: ia_c {ia_c(table):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
