#!/usr/bin/env bash
# actymath gives a term assurance the premium of an endowment.
#
# Packages: actymath 0.1.4, pandas 2.3.3, numpy 2.4.6.
# Behaviour: the column NP(x1)[n1] is described as the net premium of a term assurance. It divides
#   the value of an endowment assurance, EA(x1)[n1], which pays at the end of the term to everybody
#   who lives, by the annuity. A term assurance of 1000 for ten years costs a person of 40 the
#   premium 85.93 in place of 2.88.
# Expected: A(x1)[n1] / a_due(x1)[n1], with the term assurance of the same package.
# Instead: divide these two columns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actymath==0.1.4' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
NP(x1)[n1]: 0.08593
A(x1)[n1]: 0.02506
EA(x1)[n1]: 0.74685
a_due(x1)[n1]: 8.69153
described as: Net Premium a term assurance for term n.
by hand: assurance 0.02506, annuity 8.69153, premium 0.00288
for 1000: 85.93 a year, by hand 2.88
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from actymath.calc import Calc

rates = [0.002 * 1.09 ** year for year in range(60)]
interest, term = 0.03, 10
calc = Calc(index=range(60))
calc.add_i(interest)
calc.add_life(40, rates)
calc.add_term(term)
for column in ('NP(x1)[n1]', 'A(x1)[n1]', 'EA(x1)[n1]', 'a_due(x1)[n1]'):
    calc.populate(column)
    print(f'{column}: {calc[column].iloc[0]:.5f}')
print('described as:', calc.formulae['NP(x{life})[n{term_id}]'].strip())
alive, assurance, annuity = 1.0, 0.0, 0.0
for year in range(term):
    annuity += alive / (1 + interest) ** year
    assurance += alive * rates[year] / (1 + interest) ** (year + 1)
    alive *= 1 - rates[year]
print(f'by hand: assurance {assurance:.5f}, annuity {annuity:.5f}, premium {assurance / annuity:.5f}')
print(f"for 1000: {1000 * calc['NP(x1)[n1]'].iloc[0]:.2f} a year, by hand {1000 * assurance / annuity:.2f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
