#!/usr/bin/env bash
# After a day on which the watch was not worn fitout reports a heart rate of 69,196 beats per minute.
#
# Packages: fitout 0.3.1.
# Behaviour: BasicHeartRate interpolates between two measurements. For the length of the gap it takes .seconds of a
#   difference of times, which leaves out whole days, and for the place within the gap all seconds. A rise by 20 beats in
#   a day and 25 seconds is continued for a day as if it were one in 25 seconds.
# Expected: values between those before and after the gap, or None.
# Why it matters here: a day without a file is common with a watch that must be charged. The values look like all others
#   in the list, and a few of them are most of the mean.
# Instead: read day by day, from the first measurement of each on.
# Source: the values of the files, between which an interpolation lies: from 60 to 80.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fitout==0.3.1'
cat > expected.txt <<'EXPECTED'
values in the files, in beats per minute: 60 or 80
2024-10-27 23:59:50 60
2024-10-29 00:00:00 69188
2024-10-29 00:00:10 69196
2024-10-29 00:00:20 80
2024-10-29 00:00:30 80
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import datetime
from pathlib import Path
from fitout import BasicHeartRate, NativeFileLoader

FOLDER = Path('Takeout/Fitbit/Physical Activity_GoogleData')
FOLDER.mkdir(parents=True)
evening = [('2024-10-27T23:59:50Z', 60.0), ('2024-10-27T23:59:55Z', 60.0)]
morning = [('2024-10-29T00:00:15Z', 80.0), ('2024-10-29T00:00:20Z', 80.0), ('2024-10-29T00:00:30Z', 80.0)]
for rows in (evening, morning):
    (FOLDER / f'heart_rate_{rows[0][0][:10]}.csv').write_text(
        'timestamp,beats per minute\n' + ''.join(f'{time},{rate}\n' for time, rate in rows))
reader = BasicHeartRate(NativeFileLoader('./'))
rates = reader.get_data(datetime(2024, 10, 27, 23, 59, 50), datetime(2024, 10, 29, 0, 0, 30))
print('values in the files, in beats per minute: 60 or 80')
for time, rate in zip(reader.dates, rates):
    if time is not None:
        print(time, rate)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
