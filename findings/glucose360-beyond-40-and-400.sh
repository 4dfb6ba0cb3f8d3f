#!/usr/bin/env bash
# glucose360 counts a glucose of 39 mg/dL not as low and one of 410 not as high: a day at 39 has 0 % of time below
# range, in range and above range.
#
# Packages: glucose360 0.0.2, pandas 2.2.3, numpy 1.26.4, scipy 1.15.3.
# Behaviour: the time below range is the share of readings from 40 to 70, and the time above range from 180 to 400,
#   the limits of one maker's sensor. Readings beyond are in the number of all readings and in no range. A reading of
#   exactly 70 or 180 is in two of the three.
# Expected: below 70, from 70 to 180 and above 180, which add up to 100 %; FreeStyle Libre, which the package reads,
#   reports up to 500.
# Why it matters here: the worst readings improve the figures on which a dose is decided.
# Instead: (glucose < 70).mean() and (glucose > 180).mean().
# Source: Battelino and others (2019), "Clinical targets for continuous glucose monitoring data interpretation",
#   Diabetes Care 42(8).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'glucose360==0.0.2' 'pandas==2.2.3' 'numpy==1.26.4' 'scipy==1.15.3'
cat > expected.txt <<'EXPECTED'
readings [39.0]: below, in and above range 0, 0, 0 %, by hand 100, 0, 0 %
readings [120.0]: below, in and above range 0, 100, 0 %, by hand 0, 100, 0 %
readings [410.0]: below, in and above range 0, 0, 0 %, by hand 0, 0, 100 %
readings [39.0, 120.0]: below, in and above range 0, 50, 0 %, by hand 50, 50, 0 %
readings [120.0, 410.0, 450.0]: below, in and above range 0, 33, 0 %, by hand 0, 33, 67 %
readings [70.0]: below, in and above range 100, 100, 0 %, by hand 0, 100, 0 %
readings [180.0]: below, in and above range 0, 100, 100 %, by hand 0, 100, 0 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from glucose360 import features

times = pd.date_range('2026-03-01', periods=288, freq='5min')
for readings in ([39.0], [120.0], [410.0], [39.0, 120.0], [120.0, 410.0, 450.0], [70.0], [180.0]):
    glucose = pd.Series(readings * 288)[:288]
    day = pd.DataFrame({'Timestamp': times, 'Glucose': glucose})
    found = [features.percent_time_below_range(day), features.percent_time_in_range(day),
             features.percent_time_above_range(day)]
    right = [100 * (glucose < 70).mean(), 100 * glucose.between(70, 180).mean(), 100 * (glucose > 180).mean()]
    print(f"readings {readings}: below, in and above range {', '.join(f'{share:.0f}' for share in found)} %, by hand "
          f"{', '.join(f'{share:.0f}' for share in right)} %")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
