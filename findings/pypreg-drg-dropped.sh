#!/usr/bin/env bash
# pypreg drops each row whose kind of code is DRG, diagnosis or procedure, words that it documents: it writes the words of
# the table in small letters and compares them with a list in capital ones.
#
# Packages: pypreg 0.1.0, pandas 2.2.3, numpy 1.26.4.
# Behaviour: process_outcomes accepts dx or diagnosis, px or procedure and DRG for the kind of a code. The column is turned
#   into small letters. The list has DIAGNOSIS, PROCEDURE and DRG, so that only dx, px, diagnostic and diagnostic related
#   group are found. All other rows leave the table, with a warning that they may be "valid codes from other systems".
# Expected: the rows with a standard word, whatever their letters.
# Why it matters here: deliveries that only a group or a procedure shows do not exist, and so the pregnancy neither.
# Instead: write dx, px and "diagnostic related group".
# Source: the docstring: "Column containing if the CODE describes a PROCEDURE, DIAGNOSIS, or DRG".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pypreg==0.1.0'
cat > expected.txt <<'EXPECTED'
dx: kept
DX: kept
diagnosis: dropped
DIAGNOSIS: dropped
px: kept
PROCEDURE: dropped
DRG: dropped
diagnostic related group: kept
births of two women, both dx: 2, one of them diagnosis: 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pypreg.pregnancy_outcome.process_outcome import process_outcomes, standardize_type_and_version

for word, version in (('dx', 'ICD10'), ('DX', 'ICD10'), ('diagnosis', 'ICD10'), ('DIAGNOSIS', 'ICD10'), ('px', 'ICD10'),
                      ('PROCEDURE', 'ICD10'), ('DRG', 'MS-DRG'), ('diagnostic related group', 'MS-DRG')):
    table = pd.DataFrame({'code_type': [word], 'version': [version], 'code': ['O80']})
    kept = standardize_type_and_version(table, 'code_type', 'version')
    print(f'{word}: {"kept" if len(kept) else "dropped"}')

def pregnancies(word):
    table = pd.DataFrame({
        'person': [1, 2], 'visit': [11, 12], 'day': pd.to_datetime(['2026-01-10', '2026-02-20']), 'version': 'ICD10',
        'kind': ['dx', word], 'code': ['Z37.0', 'Z37.0'],
    })
    return len(process_outcomes(table, 'person', 'visit', 'day', 'version', 'kind', 'code'))

print(f"births of two women, both dx: {pregnancies('dx')}, one of them diagnosis: {pregnancies('diagnosis')}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
