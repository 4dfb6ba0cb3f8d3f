#!/usr/bin/env bash
# lifexp counts deaths after the end of a study as deaths in it.
#
# Packages: lifexp 0.1.0, pandas 2.3.3, numpy 2.2.6, scipy 1.15.3, matplotlib 3.10.7, seaborn 0.13.2,
#   openpyxl 3.1.5, click 8.5.1, pyyaml 6.0.4.
# Behaviour: initial_etr computes deaths and initial exposures in a study period. The last part of a
#   record with the status DEATH counts as a death, also where the person died after the end of the
#   study and the record ends there by the calendar. Of ten people who live through 2024 and die in
#   2025, all ten are dead in the study of 2024, with an exposure of 1 each: a mortality of 100 %.
# Expected: deaths whose date is in the study period.
# Instead: set the status of records with a later exit to IF.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lifexp==0.1.0' 'pandas==2.3.3' 'numpy==2.2.6' 'scipy==1.15.3' 'matplotlib==3.10.7' 'seaborn==0.13.2' 'openpyxl==3.1.5' 'click==8.5.1' 'pyyaml==6.0.4'
cat > expected.txt <<'EXPECTED'
ten people who die in 2025: deaths in the study of 2024 10, by their dates 0; initial exposure 10.00, central exposure 10.02
ten people who die in 2024: deaths in the study of 2024 10, by their dates 10; initial exposure 10.00, central exposure 4.19
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from datetime import date

from lifexp.core.data_model import PolicyDataset, PolicyRecord
from lifexp.core.exposure import central_etr, initial_etr
from lifexp.core.study_period import StudyPeriod

study = StudyPeriod(date(2024, 1, 1), date(2024, 12, 31))
for name, deaths in (('die in 2025', 10), ('die in 2024', 0)):
    exits = [date(2025, 6, 1) if i < deaths else date(2024, 6, 1) for i in range(10)]
    people = PolicyDataset([
        PolicyRecord(str(i), date(1980, 1, 1), date(2010, 1, 1), 'F', 'NS', 1e5, 100.0, 'T', 'D', 'DEATH', day, None)
        for i, day in enumerate(exits)])
    seen = initial_etr(people, study)
    print(f'ten people who {name}: deaths in the study of 2024 {seen.deaths.sum()}, by their dates',
          f'{sum(day <= study.end_date for day in exits)}; initial exposure {seen.initial_etr.sum():.2f},',
          f'central exposure {central_etr(people, study).central_etr.sum():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
