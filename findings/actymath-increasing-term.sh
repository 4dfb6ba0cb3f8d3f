#!/usr/bin/env bash
# actymath goes on paying increasing benefits after their term.
#
# Packages: actymath 0.1.4, pandas 2.3.3, numpy 2.4.6.
# Behaviour: Ia_due(x1)[n1], Ia(x1)[n1] and IA(x1)[n1] are described as increasing benefits for a
#   term n. They are (S(x) - S(x+n)) / D(x) and (R(x) - R(x+n)) / D(x), and lack n N(x+n) or n
#   M(x+n): after the term the amount n that was reached is paid for life. For a person of 40 and
#   ten years the annuity is 184 in place of 45 and the assurance 3.29 in place of 0.15. An annuity
#   of 1 to 10 in ten years cannot be worth more than 55. The increasing endowment, IEA, contains
#   the same assurance.
# Expected: (S(x) - S(x+n) - n N(x+n)) / D(x), and the same with R and M.
# Instead: subtract n times the deferred level benefit, from the columns N, M and D.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actymath==0.1.4' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
1 years: annuity 22.57, by hand 1.00, level 1.00, at most 1; assurance 0.3393, by hand 0.0019
5 years: annuity 103.14, by hand 13.79, level 4.70, at most 15; assurance 1.6757, by hand 0.0337
10 years: annuity 184.23, by hand 45.48, level 8.69, at most 55; assurance 3.2908, by hand 0.1489
20 years: annuity 293.32, by hand 139.45, level 14.87, at most 210; assurance 6.2605, by hand 0.8182
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from actymath.calc import Calc

rates = [0.002 * 1.09 ** year for year in range(60)]
interest = 0.03
for term in (1, 5, 10, 20):
    calc = Calc(index=range(60))
    calc.add_i(interest)
    calc.add_life(40, rates)
    calc.add_term(term)
    for column in ('Ia_due(x1)[n1]', 'IA(x1)[n1]', 'a_due(x1)[n1]'):
        calc.populate(column)
    alive, assurance, annuity = 1.0, 0.0, 0.0
    for year in range(term):
        annuity += (year + 1) * alive / (1 + interest) ** year
        assurance += (year + 1) * alive * rates[year] / (1 + interest) ** (year + 1)
        alive *= 1 - rates[year]
    print(f"{term} years: annuity {calc['Ia_due(x1)[n1]'].iloc[0]:.2f}, by hand {annuity:.2f},",
          f"level {calc['a_due(x1)[n1]'].iloc[0]:.2f}, at most {term * (term + 1) // 2};",
          f"assurance {calc['IA(x1)[n1]'].iloc[0]:.4f}, by hand {assurance:.4f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
