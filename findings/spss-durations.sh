#!/usr/bin/env bash
# SPSS durations above 24 hours lose their days in pyreadstat and in pandas.read_spss.
#
# Packages: pyreadstat 1.3.7, pandas 3.1.1.
# Behaviour: a column with the format TIME or DTIME is a duration in seconds. Both readers turn it
#   into a time of day, modulo 24 hours, without a word: a stay of 25 hours becomes 01:00.
# Expected: a duration, or the seconds.
# Instead: pyreadstat.read_sav(..., disable_datetime_conversion=True), then convert by the format.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==3.1.1' 'pyreadstat==1.3.7' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
TIME8 pyreadstat ['01:00:00', '01:00:00', '02:00:00']
TIME8 pandas ['01:00:00', '01:00:00', '02:00:00']
DTIME12 pyreadstat ['01:00:00', '01:00:00', '02:00:00']
DTIME12 pandas ['01:00:00', '01:00:00', '02:00:00']
without conversion [3600.0, 90000.0, 180000.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
import pyreadstat

frame = pd.DataFrame({'stay': [3600.0, 25 * 3600.0, 50 * 3600.0]})
for name in ('TIME8', 'DTIME12'):
    pyreadstat.write_sav(frame, 'stays.sav', variable_format={'stay': name})
    print(name, 'pyreadstat', [str(x) for x in pyreadstat.read_sav('stays.sav')[0]['stay']])
    print(name, 'pandas', [str(x) for x in pd.read_spss('stays.sav')['stay']])
seconds, _ = pyreadstat.read_sav('stays.sav', disable_datetime_conversion=True)
print('without conversion', seconds['stay'].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
