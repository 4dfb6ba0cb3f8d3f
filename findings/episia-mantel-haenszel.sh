#!/usr/bin/env bash
# episia's Mantel-Haenszel risk ratio and difference read the table the wrong way round.
#
# Packages: episia 0.1.3, scipy 1.13.1, statsmodels 0.14.4, numpy 1.26.4, pandas 2.2.3.
# Behaviour: Table2x2(a, b, c, d) has cases in its first row and exposed people in its first column.
#   mantel_haenszel_or weights a by c + d, which are people without the disease, where the unexposed
#   people b + d belong, so common_rr is not a risk ratio of any stratum. common_rd is a number of
#   people divided by the number of strata. The interval of the odds ratio adds P R + Q S only,
#   which leaves out half of the variance of Robins, Breslow and Greenland and takes it over a wrong
#   sum.
# Expected: for one stratum, the risk ratio and risk difference of the table; a difference within 1.
# Why it matters here: comparisons of subgroups, adjusted for the hospital, are published from it.
# Instead: statsmodels.stats.contingency_tables.StratifiedTable.
# Source: Mantel and Haenszel 1959; Robins, Breslow and Greenland, Biometrics 1986.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'episia==0.1.3'
cat > expected.txt <<'EXPECTED'
one stratum: risk ratio 1.56, by its definition 2.00; difference 10.00, by its definition 0.20
  odds ratio 2.67 from 1.63 to 4.35, statsmodels 2.67 from 1.42 to 5.02
common disease: risk ratio 4.33, by its definition 2.00; difference 22.50, by its definition 0.45
  odds ratio 11.00 from 4.94 to 24.48, statsmodels 11.00 from 5.13 to 23.59
two strata: risk ratio 1.77, by its definition 2.33; difference 10.00, by its definition 0.27
  odds ratio 3.50 from 2.29 to 5.35, statsmodels 3.50 from 2.10 to 5.84
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from episia.stats.contingency import Table2x2
from episia.stats.stratified import mantel_haenszel_or
from statsmodels.stats.contingency_tables import StratifiedTable

strata = {'one stratum': [(40, 20, 60, 80)], 'common disease': [(90, 45, 10, 55)],
          'two strata': [(40, 20, 60, 80), (30, 10, 20, 40)]}
for title, tables in strata.items():
    seen = mantel_haenszel_or([Table2x2(*table) for table in tables])
    n = [sum(table) for table in tables]
    ratio = (sum(a * (b + d) / t for (a, b, c, d), t in zip(tables, n))
             / sum(b * (a + c) / t for (a, b, c, d), t in zip(tables, n)))
    weights = [(a + c) * (b + d) / t for (a, b, c, d), t in zip(tables, n)]
    difference = np.average([a / (a + c) - b / (b + d) for a, b, c, d in tables], weights=weights)
    odds = StratifiedTable([np.array([[a, b], [c, d]]) for a, b, c, d in tables])
    low, high = odds.oddsratio_pooled_confint()
    print(f'{title}: risk ratio {seen.common_rr:.2f}, by its definition {ratio:.2f}; '
          f'difference {seen.common_rd:.2f}, by its definition {difference:.2f}')
    print(f'  odds ratio {seen.common_or:.2f} from {seen.or_ci[0]:.2f} to {seen.or_ci[1]:.2f}, '
          f'statsmodels {odds.oddsratio_pooled:.2f} from {low:.2f} to {high:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
