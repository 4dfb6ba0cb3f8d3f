#!/usr/bin/env bash
# diametrics gives each patient of a table the area under the curve of all of them.
#
# Packages: diametrics 0.4.3, pandas 2.3.3, numpy 1.26.4.
# Behaviour: with a column ID, auc and all_standard_metrics return one row a patient. Mean,
#   deviation and times in range belong to the patient; the area is computed from the table that was
#   passed in, so all patients have one value, and the steps from one patient to the next are in it.
# Expected: the area of the patient's own readings, as where the table is passed patient by patient.
# Why it matters here: the column is a constant that depends on who else is in the table.
# Instead: call auc for each patient without the column ID.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==1.26.4' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'diametrics==0.4.3'
cat > expected.txt <<'EXPECTED'
low: constant 80 mg/dL, mean 80, area alone 80.0, in a table of three patients 148.9
middle: constant 120 mg/dL, mean 120, area alone 120.0, in a table of three patients 148.9
high: constant 250 mg/dL, mean 250, area alone 250.0, in a table of three patients 148.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from diametrics.metrics import auc, average_glc

times = pd.date_range('2026-03-15', periods=5, freq='5min')
patients = {'low': 80.0, 'middle': 120.0, 'high': 250.0}
table = pd.concat([pd.DataFrame({'ID': name, 'time': times, 'glc': value})
                   for name, value in patients.items()], ignore_index=True)
means, together = average_glc(table).set_index('ID'), auc(table).set_index('ID')
for name, value in patients.items():
    alone = auc(table[table['ID'] == name].drop(columns='ID'))['auc'].iloc[0]
    print(f'{name}: constant {value:.0f} mg/dL, mean {means.loc[name, "avg_glc"]:.0f}, '
          f'area alone {alone:.1f}, in a table of three patients {together.loc[name, "auc"]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
