#!/usr/bin/env bash
# The age nearest birthday of lifexp is the age last birthday.
#
# Packages: lifexp 0.1.0, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3, matplotlib 3.10.7, seaborn 0.13.2,
#   openpyxl 3.1.5, click 8.5.1, pyyaml 6.0.4.
# Behaviour: age_at and the exposures offer AgeBasis.NEAREST_BIRTHDAY, the age at the birthday that is
#   nearest to a date. Its description says that the age changes at the birthday, and it does: a person
#   born on 15 June 1980 is 44 on 1 June 2025, fourteen days before the 45th birthday. Rates are then
#   compared with a table for ages that are half a year higher on average.
# Expected: ages that change six months after each birthday, 45 from mid-December 2024 on.
# Instead: give AgeBasis.LAST_BIRTHDAY and dates that are six months later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lifexp==0.1.0' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3' 'matplotlib==3.10.7' 'seaborn==0.13.2' 'openpyxl==3.1.5' 'click==8.5.1' 'pyyaml==6.0.4'
cat > expected.txt <<'EXPECTED'
2024-06-15: nearest 44, last 44; the nearest birthday is 0 days away and the 44th
2024-11-15: nearest 44, last 44; the nearest birthday is 153 days away and the 44th
2025-01-15: nearest 44, last 44; the nearest birthday is 151 days away and the 45th
2025-06-01: nearest 44, last 44; the nearest birthday is 14 days away and the 45th
2025-06-15: nearest 45, last 45; the nearest birthday is 0 days away and the 45th
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from lifexp.core.date_utils import age_at
from lifexp.core.study_period import AgeBasis

born = date(1980, 6, 15)
for day in (date(2024, 6, 15), date(2024, 11, 15), date(2025, 1, 15), date(2025, 6, 1), date(2025, 6, 15)):
    birthdays = [(abs((date(born.year + age, born.month, born.day) - day).days), age) for age in range(40, 50)]
    print(f'{day}: nearest {age_at(born, day, AgeBasis.NEAREST_BIRTHDAY)}, last {age_at(born, day, AgeBasis.LAST_BIRTHDAY)};',
          f'the nearest birthday is {min(birthdays)[0]} days away and the {min(birthdays)[1]}th')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
