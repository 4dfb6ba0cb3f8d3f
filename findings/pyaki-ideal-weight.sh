#!/usr/bin/env bash
# pyAKI estimates the usual creatinine of a patient from an ideal weight of 150 kg.
#
# Packages: pyAKI 0.0.2, pandas 2.2.0, numpy 1.26.4 (pyAKI 1.0.13, for Python 3.12, has the same line).
# Behaviour: the method CALCULATED of the creatinine baseline takes the ideal weight, 50 kg and 2.3 kg for
#   each inch above 60, as 50 + 2.3 * height / 2.54 - 60: the 60 are subtracted after the
#   multiplication. A man of 180 cm has an ideal weight of 153 kg in place of 75 kg, and a baseline of
#   2.0 mg/dL in place of 1.2; a woman whose creatinine is twice her usual one, stage 2, has no injury.
# Expected: 50 + 2.3 * (height / 2.54 - 60), as Devine published it.
# Instead: compute the baseline yourself and use the method CONSTANT.
# Source: KDIGO 2012 guideline for acute kidney injury, stages by the ratio to the baseline.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyAKI==0.0.2' 'pandas==2.2.0' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
M, 180 cm, 80 kg: baseline 1.97, from an ideal weight of 75 kg 1.19 mg/dL
  creatinine 1.1, 1.7, 2.2: stages [0, 0, 0] in place of [0, 0, 1]
F, 165 cm, 65 kg: baseline 1.44, from an ideal weight of 57 kg 0.79 mg/dL
  creatinine 1.1, 1.7, 2.2: stages [0, 0, 1] in place of [0, 2, 2]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pyAKI.probes import CreatinineBaselineMethod, Dataset, DatasetType, RelativeCreatinineProbe

method = CreatinineBaselineMethod.CALCULATED
for sex, height, weight in (('M', 180, 80), ('F', 165, 65)):
    patient = pd.Series({'weight': weight, 'age': 60, 'height': height, 'gender': sex})
    times = pd.date_range('2024-01-01', periods=3, freq='h', name='charttime')
    probe = RelativeCreatinineProbe(method=method)
    table = pd.DataFrame({'creat': [1.1, 1.7, 2.2]}, index=times)
    baseline = probe.creatinine_baseline(table, patient).iloc[0]
    ideal = (50.0 if sex == 'M' else 45.5) + 2.3 * (height / 2.54 - 60)
    adjusted = ideal + 0.4 * (weight - ideal)
    right = (140 - 60) * adjusted * (1 if sex == 'M' else 0.85) / (72 * 72)
    datasets = [Dataset(DatasetType.CREATININE, table), Dataset(DatasetType.DEMOGRAPHICS, patient)]
    stages = probe.probe(datasets)[0][1]['rel_creatinine_stage']
    expected = [sum(value / right >= limit for limit in (1.5, 2, 3)) for value in (1.1, 1.7, 2.2)]
    print(f'{sex}, {height} cm, {weight} kg: baseline {baseline:.2f},',
          f'from an ideal weight of {ideal:.0f} kg {right:.2f} mg/dL')
    print('  creatinine 1.1, 1.7, 2.2: stages', [int(stage) for stage in stages], 'in place of', expected)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
