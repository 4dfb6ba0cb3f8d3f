#!/usr/bin/env bash
# elixhauser-ahrq drops heart failure and kidney disease where present-on-admission indicators are not
# given, as in its documented example, and dialysis where they are.
#
# Packages: elixhauser-ahrq 2026.1.3, pandas 2.3.3, numpy 2.4.6, openpyxl 3.1.5.
# Behaviour: map_patient_diagnoses returns False for the 18 conditions that need the indicator unless
#   it is Y, W or 1. Its argument is optional and the documentation does not pass it: of the four
#   conditions of the example that count, heart failure and kidney disease are absent, and the risk
#   is low. The indicator E, for codes that are exempt, is treated as absent too; a patient on
#   dialysis (Z99.2, an exempt code) has no kidney failure.
# Expected: the documented result, or missing values: False says that there is none. Exempt codes count
#   as present.
# Why it matters here: the score adjusts for risk; without the conditions, a hospital of sick patients
#   has many deaths among healthy ones.
# Instead: pass 'Y' for all diagnoses if all are known to be present, and 'Y' for exempt codes.
# Source: the package's documentation; AHRQ, Elixhauser Comorbidity Software Refined for ICD-10-CM,
#   v2026.1, user guide, on the use of present-on-admission indicators and exempt codes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'elixhauser-ahrq==2026.1.3' 'pandas==2.3.3' 'numpy==2.4.6' 'openpyxl==3.1.5'
cat > expected.txt <<'EXPECTED'
documented: patient_dx = ["I509", "E119", "I10", "N183", "E6601"]
documented: Flagged comorbidities: ['CHF', 'DiabetesUncomplicated', 'Hypertension', 'RenalFailure', 'Obesity']
seen: ['DIAB_UNCX', 'HTN_UNCX', 'OBESE'], score -7, Low
heart failure and kidney failure, no indicators: [], score 0, Low
the same, present on admission: ['HF', 'RENLFL_SEV'], score 21, High
dialysis, exempt (E): [], score 0, Low
dialysis, indicated Y: ['RENLFL_SEV'], score 7, Moderate
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from importlib.metadata import metadata

from elixhauser_ahrq import ElixhauserMapper, ElixhauserScorer

mapper, scorer = ElixhauserMapper(), ElixhauserScorer(index_type='mortality')


def report(name, codes, indicators=None):
    flags = mapper.map_patient_diagnoses(codes, indicators)
    score = scorer.calculate_score(flags)
    print(f'{name}: {[key for key, flag in flags.items() if flag]},',
          f'score {score}, {scorer.stratify_risk(score).value}')


text = metadata('elixhauser-ahrq').get_payload() or metadata('elixhauser-ahrq')['Description']
start = text.index('patient_dx = [')
print('documented:', text[start:text.index('\n', start)])
print('documented:', next(line for line in text.splitlines() if line.startswith('Flagged')))
report('seen', ['I509', 'E119', 'I10', 'N183', 'E6601'])
fracture = 'S72001A'
codes = [fracture, 'I509', 'N186']
report('heart failure and kidney failure, no indicators', codes)
report('the same, present on admission', codes, ['Y', 'Y', 'Y'])
report('dialysis, exempt (E)', [fracture, 'Z992'], ['Y', 'E'])
report('dialysis, indicated Y', [fracture, 'Z992'], ['Y', 'Y'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
