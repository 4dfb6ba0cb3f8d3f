#!/usr/bin/env bash
# akiFlagger takes men for women where the column of the sex is male, and inverts the column in the table
# of its caller.
#
# Packages: akiFlagger 1.0.10, pandas 1.5.3, numpy 1.26.4.
# Behaviour: sex='male' names a column that is true for men. The flagger turns it round once, in the
#   table that it was given, and a second time before it estimates a creatinine from the age and sex.
#   The baseline of men is thus the one of women, and women with a kidney injury have none. The
#   caller's table keeps the inverted column, so a second call is right.
# Expected: the result of sex='female' with the opposite column, which is right, and an unchanged table.
# Why it matters here: the stage is a label of models in intensive care, and it is wrong by sex.
# Instead: a column that is true for women, with sex='female'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'akiFlagger==1.0.10' 'pandas==1.5.3' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
column female, first call: man baseline 1.09, stage 0; woman baseline 0.86, stage 1 ; column male afterwards [True, True, False, False]
column male, first call: man baseline 0.86, stage 1; woman baseline 1.09, stage 0 ; column male afterwards [False, False, True, True]
column male, second call: man baseline 1.09, stage 0; woman baseline 0.86, stage 1 ; column male afterwards [True, True, False, False]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from akiFlagger import AKIFlagger

days = pd.to_datetime(['2020-01-01', '2020-01-02'] * 2)
table = pd.DataFrame({
    'patient_id': ['man', 'man', 'woman', 'woman'], 'time': days, 'inpatient': True, 'age': 65.0,
    'creatinine': 1.3, 'male': [True, True, False, False], 'female': [False, False, True, True],
})
for call, sex in (('first', 'female'), ('first', 'male'), ('second', 'male')):
    flagger = AKIFlagger(
        patient_id='patient_id', time='time', inpatient='inpatient', creatinine='creatinine',
        age='age', sex=sex, HB_trumping=True, eGFR_impute=True, add_baseline_creat=True,
    )
    result = flagger.returnAKIpatients(table).groupby('patient_id').last()
    print(f'column {sex}, {call} call:', '; '.join(
        f'{who} baseline {row.baseline_creat:.2f}, stage {row.aki}' for who, row in result.iterrows()
    ), '; column male afterwards', table['male'].tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
