#!/usr/bin/env bash
# efa_utils's parallel analysis takes a correlation matrix for answers.
#
# Packages: efa_utils 0.8.6, factor_analyzer 0.5.1, numpy 1.26.4, pandas 2.2.3, scipy 1.13.1,
#   scikit-learn 1.5.2, statsmodels 0.14.4.
# Behaviour: parallel_analysis compares the eigenvalues of the answers with the ones of random
#   answers of as many people. It hands the correlation matrix of the random answers to
#   FactorAnalyzer without is_corr_matrix, which correlates its columns again, as if each question
#   were a person. The random eigenvalues are then far too large, and the last one is 0. With
#   extraction='components' the eigenvalues of the data are right, and factors below the wrong ones
#   are not found. The default extraction does the same to the data, where the matrix is singular,
#   and raises a LinAlgError or not by rounding.
# Expected: random eigenvalues near 1 for many people.
# Instead: numpy.linalg.eigvalsh of correlation matrices of random numbers, as below.
# Source: Horn, Psychometrika 1965.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'scikit-learn==1.5.2' 'statsmodels==0.14.4' 'factor_analyzer==0.5.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'efa_utils==0.8.6'
cat > expected.txt <<'EXPECTED'
300 people: eigenvalues 3.04 1.66 0.98 random 2.02 1.69 1.49 factors 1; random by hand 1.38 1.29 1.2 factors 2
3000 people: eigenvalues 2.97 1.30 0.97 random 1.38 1.29 1.24 factors 1; random by hand 1.13 1.09 1.07 factors 2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import contextlib
import io

import numpy as np
import pandas as pd
from efa_utils import parallel_analysis

for people, loading in ((300, 0.33), (3000, 0.2)):
    draw = np.random.RandomState(0)
    factors = np.repeat(draw.normal(size=(people, 2)), 5, axis=1)
    answers = factors * ([0.7] * 5 + [loading] * 5) + 0.7 * draw.normal(size=(people, 10))
    table = pd.DataFrame(answers, columns=list('abcdefghij'))
    np.random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        found = parallel_analysis(table, list(table), k=50, print_graph=False, extraction='components')
    lines = [line.split() for line in text.getvalue().splitlines() if line[:1].isdigit()]
    random = [np.linalg.eigvalsh(np.corrcoef(draw.normal(size=(10, people))))[::-1] for _ in range(50)]
    random = np.quantile(random, 0.99, axis=0)
    values = np.linalg.eigvalsh(table.corr())[::-1]
    right = int(np.argmax(values <= 1.1 * random))
    print(f'{people} people: eigenvalues', *[line[2] for line in lines[:3]], 'random', *[line[1] for line in lines[:3]],
          f'factors {found}; random by hand', *random[:3].round(2), f'factors {right}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
