#!/usr/bin/env bash
# fhiry empties the display texts of references.
#
# Packages: fhiry 5.2.2, pandas 2.3.3, numpy 2.4.6, requests 2.34.2, prodict 0.8.23, timeago 1.0.16,
#   tqdm 4.70.1.
# Behaviour: fhiry flattens bundles into a table, and documents that for columns with "coding" or
#   "display" in their names it extracts the codes or display texts into new columns. The texts of
#   codings lie in lists, for which this works. The display of a reference, such as the name of a
#   hospital, a doctor or a drug, is a text itself, which the function takes for an empty list. The
#   new column is empty for all rows, and the column with the text is dropped, also with
#   delete_col_raw_coding = False.
# Expected: the text.
# Instead: pandas.json_normalize of the entries, or rename display in the bundle before.
# Source: FHIR R4, Reference.display: "Plain text narrative that identifies the resource in addition
#   to the resource reference".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.4.6' 'requests==2.34.2' 'prodict==0.8.23' 'timeago==1.0.16' 'tqdm==4.70.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fhiry==5.2.2'
cat > expected.txt <<'EXPECTED'
delete_col_raw_coding=True, medicationReference.display.display: ['']
delete_col_raw_coding=True, requester.display.display: ['']
  the texts anywhere in the table: []
delete_col_raw_coding=False, medicationReference.display.display: ['']
delete_col_raw_coding=False, requester.display.display: ['']
  the texts anywhere in the table: []
json_normalize, resource.requester.display: ['City hospital', 'Lake clinic', 'University']
json_normalize, resource.medicationReference.display: ['Digoxin 0.25 mg']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from fhiry.base_fhiry import BaseFhiry

hospitals = ['City hospital', 'Lake clinic', 'University']
entries = [{'resource': {
    'resourceType': 'MedicationRequest', 'id': f'm{number}', 'status': 'active', 'intent': 'order',
    'subject': {'reference': f'Patient/{number}'},
    'medicationReference': {'reference': 'Medication/7', 'display': 'Digoxin 0.25 mg'},
    'requester': {'reference': f'Organization/{number % 3}', 'display': hospitals[number % 3]},
}} for number in range(30)]
for delete in (True, False):
    reader = BaseFhiry()
    reader.delete_col_raw_coding = delete
    table = reader.process_bundle_dict({'resourceType': 'Bundle', 'type': 'searchset', 'entry': entries})
    for column in [column for column in table if 'display' in column]:
        print(f'delete_col_raw_coding={delete}, {column}: {sorted(set(table[column]))}')
    kept = [text for text in (*hospitals, 'Digoxin 0.25 mg') if table.astype(str).eq(text).any(axis=None)]
    print('  the texts anywhere in the table:', kept)
plain = pd.json_normalize(entries)
for column in ('resource.requester.display', 'resource.medicationReference.display'):
    print(f'json_normalize, {column}: {sorted(set(plain[column]))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
