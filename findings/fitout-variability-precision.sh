#!/usr/bin/env bash
# fitout rounds the variability of the heart rate to whole milliseconds, whatever precision is asked for.
#
# Packages: fitout 0.3.1.
# Behaviour: HeartRateVariability documents the argument precision, "the precision for numerical data (default is 0)", and
#   does not hand it on. The reader of the breathing rate, which is the same but for the name of the file, does.
# Expected: 18.49 with precision=2, as in the file.
# Why it matters here: the differences between nights that such a series is read for are of a few milliseconds. 18.49 and
#   18.51 become 18 and 19, 18.51 and 19.46 become the same.
# Instead: reader = HeartRateVariability(source); reader.precision = 2.
# Source: the docstring and the values of the files.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'fitout==0.3.1'
cat > expected.txt <<'EXPECTED'
in the files: [18.49, 18.51, 19.46, 19.55, 17.52] mean 18.71
variability, precision=0: [18, 19, 19, 20, 18] mean 18.80
variability, precision=1: [18, 19, 19, 20, 18] mean 18.80
variability, precision=2: [18, 19, 19, 20, 18] mean 18.80
breathing rate, precision=2: [18.49, 18.51, 19.46, 19.55, 17.52]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date
from pathlib import Path
from statistics import mean
from fitout import BreathingRate, HeartRateVariability, NativeFileLoader

FOLDER = Path('Takeout/Fitbit/Heart Rate Variability')
FOLDER.mkdir(parents=True)
nights = [18.49, 18.51, 19.46, 19.55, 17.52]
for day, value in enumerate(nights, 2):
    (FOLDER / f'Daily Heart Rate Variability Summary - 2024-07-({day - 1}).csv').write_text(
        f'timestamp,rmssd,nremhr,entropy\n2024-07-{day:02d}T00:00:00,{value},49.6,2.4\n')
    (FOLDER / f'Daily Respiratory Rate Summary - 2024-07-{day:02d}.csv').write_text(
        f'timestamp,daily_respiratory_rate\n2024-07-{day:02d}T00:00:00,{value}\n')
start, end = date(2024, 7, 2), date(2024, 7, 6)
print('in the files:', nights, 'mean', round(mean(nights), 2))
for precision in (0, 1, 2):
    values = HeartRateVariability(NativeFileLoader('./'), precision=precision).get_data(start, end)
    print(f'variability, precision={precision}: {values} mean {mean(values):.2f}')
print('breathing rate, precision=2:', BreathingRate(NativeFileLoader('./'), precision=2).get_data(start, end))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
