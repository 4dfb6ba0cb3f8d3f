#!/usr/bin/env bash
# imputeCGM loses the identifier of a patient that is not a number, and with it the readings before a gap.
#
# Packages: imputeCGM 0.1.2, xgboost-cpu 3.2.0, scikit-learn 1.6.1, statsmodels 0.14.4, scipy
#   1.15.3, pandas 2.2.3, numpy 2.2.6.
# Behaviour: impute_cgm converts the column of the patients to numbers, with errors as missing. 2B
#   becomes NaN, in the result too. The groups by patient, for the readings before a gap and for the
#   ARIMA model, then leave that patient out. Where no identifier is a number, an error speaks of
#   arrays.
# Expected: the identifiers as they were given, and the same glucose whatever the patients are called.
# Why it matters here: no row of the result can be joined to a patient.
# Instead: number the patients before the call, and map the numbers back after it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.2.3' 'scipy==1.15.3' 'scikit-learn==1.6.1' 'statsmodels==0.14.4' 'xgboost-cpu==3.2.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'imputeCGM==0.1.2'
cat > expected.txt <<'EXPECTED'
patients (1, 2): identifiers of the result [1, 2], readings before 393 of 400, mean error 0 mg/dL
patients ('1', '2B'): identifiers of the result [1.0, nan], readings before 196 of 400, mean error 33 mg/dL
patients ('P01', 'P02'): need at least one array to concatenate
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from imputeCGM import impute_cgm

time = pd.date_range('2026-03-01', periods=200, freq='5min')
curve = 120 + 40 * np.sin(np.arange(200) / 12)
for names in ((1, 2), ('1', '2B'), ('P01', 'P02')):
    rows = [pd.DataFrame({'subjectid': name, 'timestamp': time, 'glucose_value': curve + shift,
                          'AGE': 50, 'SEX': 'F', 'HBA1C': 6.5}) for name, shift in zip(names, (0, 100))]
    table = pd.concat(rows, ignore_index=True)
    truth = table['glucose_value'].copy()
    table.loc[[100, 101, 102, 300, 301], 'glucose_value'] = np.nan
    try:
        result = impute_cgm(table)
    except ValueError as error:
        print(f'patients {names}:', error)
        continue
    wrong = (result['imputed_glucose_value'] - truth).abs()[table['glucose_value'].isna()].mean()
    print(f'patients {names}: identifiers of the result {result["subjectid"].unique().tolist()},',
          f'readings before {result["lag1"].notna().sum()} of 400, mean error {wrong:.0f} mg/dL')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
