#!/usr/bin/env bash
# The tests of pandas-tabulate correct the chi-square of a table of 2 x 2, and Cramér's V with it.
#
# Packages: pandas-tabulate 0.1.0, pandas 2.3.3, scipy 1.16.2, numpy 2.3.3.
# Behaviour: chi2 and Cramér's V come from scipy's chi2_contingency with Yates' correction, which
#   is applied to tables of 2 x 2 alone. Two columns that are equal have an association of 0.8 in
#   place of 1 for ten people, and a third group of one person makes it 1.
# Expected: Pearson's chi-square, as in Stata's "tabulate var1 var2, chi2", which the function is
#   documented to be equivalent to, and V = 1 for equal columns: Cramér's V is the root of
#   Pearson's chi-square divided by n and the smaller dimension less one.
# Instead: scipy.stats.contingency.association, and chi2_contingency with correction=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'scipy==1.16.2' 'pandas-tabulate==0.1.0'
cat > expected.txt <<'EXPECTED'
equal columns, ten people: V 0.8, right 1.0000; chi2 6.40, p 0.011, Pearson 10.00, p 0.002
a third group of one: V 1.0, right 1.0000; chi2 22.00, p 0.000, Pearson 22.00, p 0.000
treatment and cure: V 0.3004, right 0.3504; chi2 3.61, p 0.058, Pearson 4.91, p 0.027
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pandas_tabulate import tabulate
from scipy.stats import chi2_contingency
from scipy.stats.contingency import association

tables = {'equal columns, ten people': (['a'] * 5 + ['b'] * 5, ['x'] * 5 + ['y'] * 5),
          'a third group of one': (['a'] * 5 + ['b'] * 5 + ['c'], ['x'] * 5 + ['y'] * 5 + ['z']),
          'treatment and cure': (['drug'] * 20 + ['none'] * 20, (['cured'] * 14 + ['ill'] * 6) + (['cured'] * 7 + ['ill'] * 13))}
for label, (one, other) in tables.items():
    shown = tabulate(pd.Series(one), pd.Series(other), chi2=True, cramers_v=True).data['statistics']
    counts = pd.crosstab(pd.Series(one), pd.Series(other))
    pearson = chi2_contingency(counts, correction=False)
    print(f"{label}: V {shown['cramers_v']['value']}, right {association(counts):.4f}; "
          f"chi2 {shown['chi2']['statistic']:.2f}, p {shown['chi2']['p_value']:.3f}, "
          f"Pearson {pearson.statistic:.2f}, p {pearson.pvalue:.3f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
