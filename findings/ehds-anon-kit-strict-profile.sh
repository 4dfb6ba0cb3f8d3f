#!/usr/bin/env bash
# The strict profile of ehds-anon-kit keeps the birth year of a person of 104 and groups with one diagnosis.
#
# Packages: ehds-anon-kit 0.1.0, pydantic 2.13.4, PyYAML 6.0.3, pandas 2.3.3, numpy 2.2.6.
# Behaviour: the profile ehds-research-strict is described as removing the year of birth of people of
#   90 and older, and has an l-diversity of 3 that tables must have. Nothing reads either: each year
#   of birth is kept, and a group of ten people of one area and age who all have the same diagnosis
#   stays in the table. The result reports that its l-diversity is 1.
# Expected: no year of birth from 90 on, and groups with fewer than 3 diagnoses suppressed as groups
#   smaller than k are.
# Why it matters here: the evidence file that the package writes cites the rules as kept.
# Instead: remove the dates of birth of old people before, and check l_achieved of the result.
# Source: the description of the profile in the package.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pydantic==2.13.4' 'PyYAML==6.0.3' 'pandas==2.3.3' 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'ehds-anon-kit==0.1.0'
cat > expected.txt <<'EXPECTED'
years of birth: ['1922', '1985']
diagnoses of each area: {'north': 1, 'south': 3}
k 10 of 10, l 1 of 3, 4 rows suppressed
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from dataclasses import replace
from pathlib import Path

import pandas as pd
from ehds_anon.fhir_anon import anonymize_bundle
from ehds_anon.profiles import load_profile
from ehds_anon.pseudonymisation import PseudonymGenerator
from ehds_anon.tabular_anon import anonymize_tabular

strict = load_profile('ehds-research-strict')
people = [{'resourceType': 'Patient', 'id': day, 'birthDate': day} for day in ('1922-05-02', '1985-01-07')]
bundle = {'resourceType': 'Bundle', 'entry': [{'resource': one} for one in people]}
result = anonymize_bundle(bundle, strict, PseudonymGenerator('a key')).bundle
print('years of birth:', [entry['resource'].get('birthDate') for entry in result['entry']])

pd.DataFrame({'area': ['north'] * 10 + ['south'] * 12 + ['west'] * 4,
              'diagnosis': ['HIV'] * 10 + ['flu', 'asthma', 'gout'] * 4 + ['flu', 'gout'] * 2}).to_csv('in.csv', index=False)
tabular = replace(strict.tabular, quasi_id_columns=['area'], sensitive_columns=['diagnosis'])
stats = anonymize_tabular(Path('in.csv'), Path('out.csv'), replace(strict, tabular=tabular))
print('diagnoses of each area:', pd.read_csv('out.csv').groupby('area')['diagnosis'].nunique().to_dict())
print(f'k {stats.k_achieved} of {tabular.k_anonymity_min}, l {stats.l_achieved} of {tabular.l_diversity_min},',
      f'{stats.rows_suppressed} rows suppressed')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
