#!/usr/bin/env bash
# episia's attributable fraction in the population is larger than what removing the exposure would
# avoid.
#
# Packages: episia 0.1.3, scipy 1.13.1, numpy 1.26.4, pandas 2.2.3.
# Behaviour: attributable_fraction_population takes the share of the cases that are exposed, a / (a
#   + b), and puts it into Levin's formula p (RR - 1) / (p (RR - 1) + 1), whose p is the exposed
#   share of all people. With the share of the cases the formula is p (RR - 1) / RR.
# Expected: (risk of all - risk of the unexposed) / risk of all. Both right formulas give it.
# Why it matters here: a subgroup's share of an outcome, or of an error of a model, is overstated,
#   most where the exposure is rare.
# Instead: (risk - t.risk_unexposed) / risk with risk = t.total_cases / t.total.
# Source: Levin 1953; Miettinen, American Journal of Epidemiology 1974.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'episia==0.1.3'
cat > expected.txt <<'EXPECTED'
a tenth is exposed, risk ratio 5.0: episia 0.59, share of cases avoided 0.29, Levin 0.29, Miettinen 0.29
half is exposed, risk ratio 5.0: episia 0.77, share of cases avoided 0.67, Levin 0.67, Miettinen 0.67
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from episia.stats.contingency import Table2x2

for title, cells in {'a tenth is exposed': (50, 90, 50, 810), 'half is exposed': (50, 10, 50, 90)}.items():
    table = Table2x2(*cells)
    a, b, c, d = cells
    risk, unexposed = (a + b) / sum(cells), b / (b + d)
    ratio = table.risk_ratio().estimate
    people, cases = (a + c) / sum(cells), a / (a + b)
    print(f'{title}, risk ratio {ratio:.1f}: episia {table.attributable_fraction_population():.2f}, '
          f'share of cases avoided {(risk - unexposed) / risk:.2f}, '
          f'Levin {people * (ratio - 1) / (people * (ratio - 1) + 1):.2f}, '
          f'Miettinen {cases * (ratio - 1) / ratio:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
