#!/usr/bin/env bash
# calcnook taxes sales of earlier years at the rates that it documents for sales from 23 July 2024.
#
# Packages: calcnook 0.2.0.
# Behaviour: india.capital_gains documents that the Budget of 2024 "raised LTCG on equity to 12.5% (from 10%)
#   and STCG to 20% (from 15%), effective 23 Jul 2024 (transactions on or after)". calculate takes the date
#   of sale and uses the new rates for every date. A debt fund that was bought in 2021 gets the rule "acquired
#   on/after 1 Apr 2023".
# Expected: the rates in force on the date of sale, or an error for a date before them.
# Instead: use it for sales from 23 July 2024 only, and for debt funds bought from 1 April 2023.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'calcnook==0.2.0'
cat > expected.txt <<'EXPECTED'
raised LTCG on equity to 12.5% (from 10%) and STCG to 20% (from 15%),
effective 23 Jul 2024 (transactions on or after).
bought 2022-01-10, sold 2024-05-10: LTCG at 12.5%, 10% by its own documentation
bought 2022-01-10, sold 2024-09-10: LTCG at 12.5%, the rate of that day
bought 2024-01-10, sold 2024-05-10: STCG at 20.0%, 15% by its own documentation
bought 2024-01-10, sold 2024-09-10: STCG at 20.0%, the rate of that day
debt fund bought 2021-01-10: SLAB_RATE; taxed at marginal slab rate (Sec 50AA, debt MF acquired on/after 1 Apr 2023; no LTCG benefit, no indexation).
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from calcnook.countries.india import capital_gains

print(*[line.strip() for line in capital_gains.__doc__.splitlines()
        if 'raised LTCG' in line or 'effective 23 Jul' in line], sep='\n')
for bought, sold, old in (('2022-01-10', '2024-05-10', 0.10), ('2022-01-10', '2024-09-10', None),
                          ('2024-01-10', '2024-05-10', 0.15), ('2024-01-10', '2024-09-10', None)):
    seen = capital_gains.calculate('equity_listed', 1000000, 1500000, bought, sold)
    print(f'bought {bought}, sold {sold}: {seen.classification} at {seen.applicable_rate:.1%},',
          'the rate of that day' if old is None else f'{old:.0%} by its own documentation')
seen = capital_gains.calculate('debt_mf', 1000000, 1500000, '2021-01-10', '2025-01-10')
print(f'debt fund bought {seen.purchase_date}: {seen.classification}; {seen.note}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
