#!/usr/bin/env bash
# The last payment is missing from the schedule of cuffnote where a loan is paid faster.
#
# Packages: cuffnote 0.3.12, pandas 2.3.3, numpy 1.26.4, numpy-financial 1.0.0, matplotlib 3.10.7.
# Behaviour: ExtraMonthlyPrincipal adds an extra payment to each instalment. Where what is left is
#   larger than the instalment and smaller than instalment and extra payment together, the balance of
#   the last month becomes negative, and rows with a negative balance are removed. The schedule then
#   ends with a debt: 1,549 for 700 a month on 200,000, and 2,461 for 2,000. Principal and interest
#   of that month are in no total, and one period too many counts as saved.
# Expected: a last payment of what is left, as for 600 or 1,000 a month.
# Instead: add a last row by hand where the ending balance is not 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cuffnote==0.3.12' 'pandas==2.3.3' 'numpy==1.26.4' 'numpy-financial==1.0.0' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
600 extra a month: 169 payments, by hand 169; saved 191; owed at the end 0.00, principal paid 200000.00 of 200000
700 extra a month: 154 payments, by hand 155; saved 206; owed at the end 1549.42, principal paid 198450.58 of 200000
900 extra a month: 133 payments, by hand 134; saved 227; owed at the end 1549.37, principal paid 198450.63 of 200000
1000 extra a month: 126 payments, by hand 126; saved 234; owed at the end 0.00, principal paid 200000.00 of 200000
2000 extra a month: 76 payments, by hand 77; saved 284; owed at the end 2460.56, principal paid 197539.44 of 200000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from cuffnote.mortgages import ExtraMonthlyPrincipal, Mortgage

for extra in (600, 700, 900, 1000, 2000):
    mortgage = Mortgage(250000, 0.2, 0.04, '2020-01-01', 30)
    faster = ExtraMonthlyPrincipal(mortgage, extra)
    table = faster.get_amortization_table()
    owed, periods = 200000.0, 0
    while owed > 0.005:
        owed += owed * 0.04 / 12
        owed -= min(owed, mortgage.get_payment() + extra)
        periods += 1
    print(f'{extra} extra a month: {len(table)} payments, by hand {periods}; saved {faster.get_periods_saved()};',
          f'owed at the end {table["Ending Balance"].iloc[-1]:.2f},',
          f'principal paid {table["Cumulative Principal Paid"].iloc[-1]:.2f} of 200000')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
