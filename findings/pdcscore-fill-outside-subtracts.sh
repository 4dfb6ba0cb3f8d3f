#!/usr/bin/env bash
# pdcscore subtracts a fill of the drug that lies before or behind the period of the measurement: with one of November 58
# days covered from January on become 27, and the share of days covered can be negative.
#
# Packages: pdcscore 1.1.9, pandas 2.2.3, numpy 1.26.4.
# Behaviour: with overlap_adjustment=True the days of each fill are the end of its overlap with the period minus the start,
#   plus one. Without an overlap this is a negative number, and it is added to the others. With False it is not.
# Expected: 0 days for such a fill, as overlap_adjustment=False has it.
# Why it matters here: tables of pharmacies go on before and after a period. A patient at 80 % is called not adherent, and
#   the more so the longer ago the other fill was.
# Instead: drop the rows that do not touch the period before the call.
# Source: the days of the fills and of the period counted one by one; a share of days is between 0 and 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pdcscore==1.1.9'
cat > expected.txt <<'EXPECTED'
two fills in the period: True 58 of 90 days, score 0.644; False 58 of 90 days, score 0.644; by hand 58 days
and 30 days from 1 November on: True 27 of 90 days, score 0.300; False 58 of 90 days, score 0.644; by hand 58 days
and 30 days from 15 May on: True 14 of 90 days, score 0.156; False 58 of 90 days, score 0.644; by hand 58 days
only 30 days from 1 October on: True -62 of 90 days, score -0.689; False 0 of 90 days, score 0.000; by hand 0 days
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pdcscore import pdcCalc


def scores(fills, adjustment):
    table = pd.DataFrame({'patient': 'A', 'drug': 'X', 'fill': pd.to_datetime([day for day, _ in fills]),
                          'supply': [supply for _, supply in fills], 'start': pd.Timestamp('2022-01-01'),
                          'end': pd.Timestamp('2022-03-31')})
    row = pdcCalc(table, 'patient', 'drug', 'fill', 'supply', 'start', 'end', adjustment).calculate_pdc_scores().iloc[0]
    return f'{row.dayscovered} of {row.totaldays} days, score {row.pdc_score:.3f}'


def by_hand(fills):
    days = {day for start, supply in fills for day in pd.date_range(start, periods=supply)}
    return len(days & set(pd.date_range('2022-01-01', '2022-03-31')))


inside = [('2022-01-01', 30), ('2022-02-01', 28)]
for name, fills in (('two fills in the period', inside), ('and 30 days from 1 November on', [('2021-11-01', 30), *inside]),
                    ('and 30 days from 15 May on', [*inside, ('2022-05-15', 30)]), ('only 30 days from 1 October on', [('2021-10-01', 30)])):
    print(f'{name}: True {scores(fills, True)}; False {scores(fills, False)}; by hand {by_hand(fills)} days')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
