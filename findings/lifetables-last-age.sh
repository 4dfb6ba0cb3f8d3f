#!/usr/bin/env bash
# The life tables of lifetables let everybody who reaches the last age die within a year of it: rates that
# end with "85 and older" cost two and a half years of life expectancy at 65.
#
# Packages: lifetables 0.0.11, polars 2.1.0.
# Behaviour: the last age is taken for one year of life with a probability of death of 1, of which half a
#   year is lived, whatever its mortality rate is. Published rates end with an open age, whose people live
#   1 / rate years on. The example in its source ends at 84.
# Expected: person-years of l / m in the last age, as in the methods that the package cites.
# Why it matters here: life expectancy is an outcome of insurers and hospitals, and the error is larger
#   than most effects.
# Instead: rates by single years up to 110, or add l / m - l / 2 of the last age to T.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polars==2.1.0' 'lifetables==0.0.11'
cat > expected.txt <<'EXPECTED'
rates to 110 and older: 79.4 years to live at birth, 17.9 at 65 (exactly 17.9), 0.5 at 110 (exactly 0.8)
rates to 95 and older: 79.3 years to live at birth, 17.7 at 65 (exactly 17.9), 0.5 at 95 (exactly 2.9)
rates to 85 and older: 77.3 years to live at birth, 15.6 at 65 (exactly 17.9), 0.5 at 85 (exactly 6.0)
rates to 75 and older: 72.1 years to live at birth, 9.5 at 65 (exactly 17.9), 0.5 at 75 (exactly 11.1)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import polars as pl
from lifetables import create_life_table


def rate(age):
    return 0.00002 * math.exp(0.1 * age)


def remaining(age):  # exact, for the open age
    years, alive, step = 0.0, 1.0, 0.01
    for count in range(6000):
        later = alive * math.exp(-rate(age + (count + 0.5) * step) * step)
        years += (alive + later) / 2 * step
        alive = later
    return years


for last in (110, 95, 85, 75):
    rates = [rate(age + 0.5) for age in range(last)] + [1 / remaining(last)]
    frame = pl.DataFrame(dict(age=range(last + 1), mortality=rates)).lazy()
    table = create_life_table(frame, infant_separation_factor=0.5).collect()
    at = dict(zip(table['age'], table['e']))
    print(f'rates to {last} and older: {at[0]:.1f} years to live at birth, {at[65]:.1f} at 65 (exactly',
          f'{remaining(65):.1f}), {at[last]:.1f} at {last} (exactly {remaining(last):.1f})')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
