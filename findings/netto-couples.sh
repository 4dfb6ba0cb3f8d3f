#!/usr/bin/env bash
# The taxes of a married couple in netto mix the limits of couples with the limits of one person.
#
# Packages: netto 0.1.0, scipy 1.15.3, numpy 2.2.6.
# Behaviour: with is_married the steps of the German income tax are doubled, as the law has it. The
#   solidarity surcharge keeps the limit of one person, an income tax of 16,956 in 2022 in place of
#   33,912: a couple with 120,000 pays 1,745 where it is free of it. calc_income_tax, documented like
#   calc_income_tax_by_integration, ignores is_married, and taxes the couple like one person.
# Expected: twice the limit for couples (paragraph 3 of the Solidaritätszuschlaggesetz), and two functions
#   with one result.
# Instead: compute the surcharge of a couple as twice the surcharge of half of the tax.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'netto==0.1.0' 'scipy==1.15.3' 'numpy==2.2.6'
cat > expected.txt <<'EXPECTED'
one person, taxable 40000: income tax 8177, by its other function 8177; surcharge 0.00, with the limit of the law 0.00
one person, taxable 100000: income tax 32664, by its other function 32664; surcharge 1796.50, with the limit of the law 1796.50
one person, taxable 120000: income tax 41064, by its other function 41064; surcharge 2258.50, with the limit of the law 2258.50
couple, taxable 40000: income tax 4277, by its other function 8177; surcharge 0.00, with the limit of the law 0.00
couple, taxable 100000: income tax 23632, by its other function 32664; surcharge 794.47, with the limit of the law 0.00
couple, taxable 120000: income tax 31727, by its other function 41064; surcharge 1744.99, with the limit of the law 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import netto
import netto.config as config

config.year = 2022
for married in (False, True):
    config.is_married = married
    for income in (40000, 100000, 120000):
        seen, formula = netto.calc_income_tax_by_integration(income), netto.calc_income_tax(income)
        soli = 2 * netto.calc_soli(seen / 2) if married else netto.calc_soli(seen)
        print(f'{"couple" if married else "one person"}, taxable {income}: income tax {seen:.0f}, by its other function {formula:.0f};',
              f'surcharge {netto.calc_soli(seen):.2f}, with the limit of the law {soli:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
