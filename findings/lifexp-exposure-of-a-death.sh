#!/usr/bin/env bash
# A death has an exposure of one and a half years in lifexp where the policy year begins in between.
#
# Packages: lifexp 0.1.0, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3, matplotlib 3.10.7, seaborn 0.13.2,
#   openpyxl 3.1.5, click 8.5.1, pyyaml 6.0.4.
# Behaviour: initial_etr is documented to let each death contribute "exactly 1.0 to the age cell it
#   occurs in". The year of age is cut at the anniversary of the policy, and only the last part is set
#   to 1: a policy of 1 July has half a year before and 1 after it, 1.5 for one death at age 44. A
#   policy of 1 January has 1. Where nobody survives, the mortality by age is 67 % and not 100 %.
# Expected: 1 for each death at its age, in etr_comparison as well.
# Instead: use central exposures, or start the policy years at the birthdays.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lifexp==0.1.0' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3' 'matplotlib==3.10.7' 'seaborn==0.13.2' 'openpyxl==3.1.5' 'click==8.5.1' 'pyyaml==6.0.4'
cat > expected.txt <<'EXPECTED'
policies of the first day of month 1: age 44, 10 of 10 die, initial exposure 10.00 in place of 10, mortality 100%
policies of the first day of month 4: age 44, 10 of 10 die, initial exposure 12.49 in place of 10, mortality 80%
policies of the first day of month 7: age 44, 10 of 10 die, initial exposure 14.98 in place of 10, mortality 67%
policies of the first day of month 10: age 44, 10 of 10 die, initial exposure 17.50 in place of 10, mortality 57%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from lifexp.core.data_model import PolicyDataset, PolicyRecord
from lifexp.core.exposure import central_etr, etr_comparison, initial_etr
from lifexp.core.study_period import StudyPeriod

study = StudyPeriod(date(2024, 1, 1), date(2024, 12, 31))
for month in (1, 4, 7, 10):
    people = PolicyDataset([
        PolicyRecord(str(i), date(1980, 1, 1), date(2010, month, 1), 'F', 'NS', 1e5, 100.0, 'T', 'D', 'DEATH',
                     date(2024, 12, 1), None) for i in range(10)])
    row = etr_comparison(central_etr(people, study), initial_etr(people, study)).iloc[0]
    print(f'policies of the first day of month {month}: age {row.age:.0f}, {row.deaths:.0f} of 10 die,',
          f'initial exposure {row.initial_etr:.2f} in place of 10, mortality {row.deaths / row.initial_etr:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
