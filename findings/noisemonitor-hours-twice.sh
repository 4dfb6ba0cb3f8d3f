#!/usr/bin/env bash
# The day-evening-night level of noisemonitor counts the hours from 7, 19 and 23 o'clock in two parts of
# the day.
#
# Packages: noisemonitor 1.0.4, numpy 1.26.4, pandas 2.3.3, matplotlib 3.9.4.
# Behaviour: the day is documented from 7 to 19, the evening to 23 and the night to 7 o'clock. The values
#   are chosen with both ends, so that with hourly levels the day has 13 hours, the evening 5 and the
#   night 9. The hour from 7 on, in which the traffic begins, is a part of the night with its penalty of
#   10 dB: a street with traffic by day has a night of 56 dB in place of 45, and one loud hour from 7
#   on makes 71 dB in place of 62.
# Expected: 12, 4 and 8 hours, each once.
# Instead: shift the index by half an hour, so that no value is at the full hour.
# Source: Directive 2002/49/EC, annex I.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.3.3' 'matplotlib==3.9.4' 'noisemonitor==1.0.4'
cat > expected.txt <<'EXPECTED'
quiet but for the hour from 7: Lden 71.2, evening 45.0, night 65.5; by its hours 61.6, 45.0, 45.0
quiet but for the hour from 23: Lden 71.8, evening 68.0, night 65.5; by its hours 71.2, 45.0, 66.0
a street with traffic by day: Lden 64.4, evening 45.0, night 55.8; by its hours 62.3, 45.0, 45.0
the same all day long: Lden 71.4, evening 65.0, night 65.0; by its hours 71.4, 65.0, 65.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from noisemonitor.util.core import lden

def level(values):
    return 10 * np.log10(np.mean(10 ** (np.asarray(values) / 10)))

streets = {
    'quiet but for the hour from 7': {7: 75},
    'quiet but for the hour from 23': {23: 75},
    'a street with traffic by day': {hour: 65 for hour in range(7, 19)},
    'the same all day long': {hour: 65 for hour in range(24)},
}
for name, loud in streets.items():
    hours = [loud.get(hour, 45) for hour in range(24)]
    day, evening, night = hours[7:19], hours[19:23], hours[23:] + hours[:7]
    right = 10 * np.log10((12 * 10 ** (level(day) / 10) + 4 * 10 ** ((level(evening) + 5) / 10) + 8 * 10 ** ((level(night) + 10) / 10)) / 24)
    index = pd.date_range('2026-06-01', periods=24 * 7, freq='h')
    seen = lden(pd.DataFrame({'LAeq': np.tile(hours, 7).astype(float)}, index=index), 0, values=True).iloc[0]
    print(f"{name}: Lden {seen['Lden']:.1f}, evening {seen['Levening']:.1f}, night {seen['Lnight']:.1f};",
          f'by its hours {right:.1f}, {level(evening):.1f}, {level(night):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
