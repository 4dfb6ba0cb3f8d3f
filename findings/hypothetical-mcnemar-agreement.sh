#!/usr/bin/env bash
# The McNemar test of hypothetical compares the pairs that agree, and its exact p-value is up to 2.
#
# Packages: hypothetical 0.3.0, numpy 1.26.4, pandas 2.3.3, scipy 1.13.1, statsmodels 0.14.4,
#   numpy-indexed 0.3.7.
# Behaviour: McNemarTest documents (n12 - n21)² / (n12 + n21) and computes it with n11 and n22, the
#   pairs that both tests call positive or both negative: 20.05 in its documented example, for which
#   it documents 4.55, and 4655 where the disease is frequent. With the continuity correction these
#   are the denominator as well. Where both agree about 70 positive and 70 negative people it is 0. The
#   exact p-value doubles P(X <= n12): with n12 = 16 and n21 = 6 it is 1.98 in place of 0.05.
# Expected: the same statistic for the first three tables, which differ in pairs that agree.
# Instead: statsmodels.stats.contingency_tables.mcnemar.
# Source: McNemar, Note on the sampling error of the difference between correlated proportions, 1947.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'numpy-indexed==0.3.7'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hypothetical==0.3.0'
cat > expected.txt <<'EXPECTED'
[[59, 6], [16, 80]]: 20.05 and corrected 2.88, by hand 4.55 and 3.68; exact p 0.052, by scipy 0.052
[[400, 6], [16, 80]]: 4654.55 and corrected 212.00, by hand 4.55 and 3.68; exact p 0.052, by scipy 0.052
[[70, 6], [16, 70]]: 0.00 and corrected 0.01, by hand 4.55 and 3.68; exact p 0.052, by scipy 0.052
[[59, 16], [6, 80]]: 20.05 and corrected 2.88, by hand 4.55 and 3.68; exact p 1.983, by scipy 0.052
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hypothetical.contingency import McNemarTest
from scipy import stats

for table in ([[59, 6], [16, 80]], [[400, 6], [16, 80]], [[70, 6], [16, 70]], [[59, 16], [6, 80]]):
    plain, corrected = McNemarTest(table, continuity=False), McNemarTest(table)
    one, other = table[0][1], table[1][0]
    right = (one - other) ** 2 / (one + other)
    exact = stats.binomtest(one, one + other).pvalue
    print(f'{table}: {plain.mcnemar_x2_statistic:.2f} and corrected {corrected.mcnemar_x2_statistic:.2f},',
          f'by hand {right:.2f} and {(abs(one - other) - 1) ** 2 / (one + other):.2f};',
          f'exact p {plain.exact_p_value:.3f}, by scipy {exact:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
