#!/usr/bin/env bash
# pyirr's Krippendorff's alpha is right for four or five grades, and wrong for two and three.
#
# Packages: pyirr 0.84.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, statsmodels 0.14.5.
# Behaviour: kripp_alpha takes the entries of the coincidence matrix above its diagonal from
#   numpy.triu_indices_from(cm, k=len(cm) // 2 - 1). That is the first diagonal for four and five
#   grades. For two and three grades it begins at the main diagonal, so numbers of patients that the
#   doctors agree about are paired with the differences between grades. For six and more grades it
#   begins further out and raises an IndexError.
# Expected: 1 for perfect agreement, and by the definition 1 - observed / expected disagreement for
#   all.
# Instead: k=1 in a copy, or the package krippendorff.
# Source: Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'statsmodels==0.14.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pyirr==0.84.1.2'
cat > expected.txt <<'EXPECTED'
2 grades, the same: alpha -0.78, by its definition 1.00
2 grades, a fifth by chance: alpha -0.55, by its definition 0.82
2 grades, always the next grade: alpha 1.00, by its definition -0.99
3 grades, the same: alpha -1.01, by its definition 1.00
3 grades, a fifth by chance: alpha -0.77, by its definition 0.78
3 grades, always the next grade: alpha 0.45, by its definition -0.49
4 grades, the same: alpha 1.00, by its definition 1.00
4 grades, a fifth by chance: alpha 0.81, by its definition 0.81
4 grades, always the next grade: alpha -0.33, by its definition -0.33
5 grades, the same: alpha 1.00, by its definition 1.00
5 grades, a fifth by chance: alpha 0.80, by its definition 0.80
5 grades, always the next grade: alpha -0.25, by its definition -0.25
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyirr import kripp_alpha

def alpha_by_definition(ratings):
    values = ratings.ravel()
    within = np.mean([pair[0] != pair[1] for pair in ratings])
    pairs = values[:, None] != values[None, :]
    return 1 - within / (pairs.sum() / (values.size * (values.size - 1)))

draw = np.random.RandomState(0)
for grades in (2, 3, 4, 5):
    first = draw.randint(grades, size=100) + 1.0
    other = np.where(draw.uniform(size=100) < 0.2, draw.randint(grades, size=100) + 1.0, first)
    doctors = {'the same': first, 'a fifth by chance': other, 'always the next grade': first % grades + 1}
    for name, second in doctors.items():
        ratings = np.column_stack([first, second])
        print(f'{grades} grades, {name}: alpha {kripp_alpha(ratings).value:.2f},',
              f'by its definition {alpha_by_definition(ratings):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
