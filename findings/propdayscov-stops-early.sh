#!/usr/bin/env bash
# propdayscov ends the time of observation with the last day on which there is a drug: who fills a prescription once and
# never again has covered all days, with a share of 1.
#
# Packages: propdayscov 1.2.0, pandas 1.5.3, numpy 1.23.5.
# Behaviour: the denominator goes from MBRELIGSTART to the last covered day and not to MBRELIGEND, which is used to cut the
#   supply only. So the share falls with the gaps between fills, and not with the time after the last one.
# Expected: TOT_DAYS, "the total number of days in patient analysis window", which are 365 with a window of one year.
# Why it matters here: stopping is the commonest way not to take a drug. Of two patients with two fills the one that comes
#   back in December has 0.16, and the one that has given up in March 0.98.
# Instead: divide COV_DAYS by the days from MBRELIGSTART to MBRELIGEND.
# Source: the docstring, "First/Last date of coverage eligibility"; the measure of the Pharmacy Quality Alliance divides by
#   the days to the end of the period.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==1.5.3' 'numpy==1.23.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'propdayscov==1.2.0'
cat > expected.txt <<'EXPECTED'
one fill on 1 January, then nothing: propdayscov 30 of 30 days, share 1.000; of the year 0.082
two fills, then nothing: propdayscov 60 of 61 days, share 0.984; of the year 0.164
six fills, then nothing: propdayscov 180 of 181 days, share 0.994; of the year 0.493
each second month until November: propdayscov 180 of 334 days, share 0.539; of the year 0.493
on 1 January and on 1 December: propdayscov 60 of 364 days, share 0.165; of the year 0.164
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from propdayscov.propdayscov import calc_pdc


def share(fills):
    table = pd.DataFrame({'P_ID': 'A', 'DRUGNAME': 'X', 'FILLDATE': pd.to_datetime(fills), 'DAYSSUPPLY': 30,
                          'MBRELIGSTART': pd.Timestamp('2022-01-01'), 'MBRELIGEND': pd.Timestamp('2022-12-31')})
    row = calc_pdc(table).iloc[0]
    return f'{row.COV_DAYS} of {row.TOT_DAYS} days, share {row.PDC_RATIO:.3f}', len(fills) * 30 / 365


months = [f'2022-{month:02d}-01' for month in range(1, 13)]
for name, fills in (('one fill on 1 January, then nothing', months[:1]), ('two fills, then nothing', months[:2]),
                    ('six fills, then nothing', months[:6]), ('each second month until November', months[::2]),
                    ('on 1 January and on 1 December', [months[0], months[11]])):
    seen, true = share(fills)
    print(f'{name}: propdayscov {seen}; of the year {true:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
