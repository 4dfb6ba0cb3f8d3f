#!/usr/bin/env bash
# pygrowthstandards gives boys and girls the same z-scores: its Patient does not use the sex, and its
# functions take each sex that is not a capital M for a girl.
#
# Packages: pygrowthstandards 0.1.3, pandas 2.3.3, numpy 2.4.6, scipy 1.17.1.
# Behaviour: calculate_all filters the reference by measurement and age, and takes the first row that
#   remains, whatever the sex and the table. The functions zscore and percentile read 'm' and the
#   default, 'U' for unknown, as a girl, without a message.
# Expected: the standards of the World Health Organization, which are one table for boys and one for
#   girls: 11 kg at one year are 1.2 for a boy and 1.7 for a girl. An unknown sex gets no score.
# Why it matters here: underweight is a score below -2; a boy and a girl do not reach it at one weight.
# Instead: zscore with 'M' or 'F', after a check of the column. (Patient looks for its data in the
#   working folder; the script runs it where they are.)
# Source: WHO Child Growth Standards, weight-for-age, boys and girls, 12 months: L, M and S.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pygrowthstandards==0.1.3' 'pandas==2.3.3' 'numpy==2.4.6' 'scipy==1.17.1' 'pyarrow==21.0.0' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
boy of one year, 7.2 kg: WHO -2.65, Patient -2.65, zscore -2.65
girl of one year, 7.2 kg: WHO -1.81, Patient -2.65, zscore -1.81
boy of one year, 11.0 kg: WHO 1.21, Patient 1.21, zscore 1.21
girl of one year, 11.0 kg: WHO 1.65, Patient 1.21, zscore 1.65
zscore of 7.2 kg for 'm': -1.81
zscore of 7.2 kg for 'U': -1.81
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import datetime
import os
from pathlib import Path

import pygrowthstandards
from pygrowthstandards import functional
from pygrowthstandards.oop.measurement import MeasurementGroup
from pygrowthstandards.oop.patient import Patient

# WHO, weight for age, 12 months: L, M, S
tables = {'boy': (0.0644, 9.6479, 0.10925), 'girl': (-0.2024, 8.9481, 0.12268)}
os.chdir(Path(pygrowthstandards.__file__).parent)
birth, visit = datetime.date(2022, 1, 1), datetime.date(2023, 1, 1)
for weight in (7.2, 11.0):
    for child, sex in (('boy', 'M'), ('girl', 'F')):
        skew, median, spread = tables[child]
        patient = Patient(sex=sex, birthday_date=birth)
        patient.add_measurements(MeasurementGroup(date=visit, weight=weight))
        patient.calculate_all()
        print(f'{child} of one year, {weight} kg:',
              f'WHO {((weight / median) ** skew - 1) / (skew * spread):.2f},',
              f'Patient {patient.z_scores[0].weight:.2f},',
              f'zscore {functional.zscore("weight", weight, sex, age_days=365):.2f}')
for sex in ('m', 'U'):
    print(f'zscore of 7.2 kg for {sex!r}: {functional.zscore("weight", 7.2, sex, age_days=365):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
