#!/usr/bin/env bash
# medcalc-bench's liver score of a patient on dialysis is the score of one without where creatinine
# is low.
#
# Packages: medcalc-bench 1.7.0, Python 3.11.
# Behaviour: compute_meldna_explanation raises a creatinine below 1.0 mg/dL to 1.0 first, and looks
#   for dialysis only in the other cases. Its explanation mentions the dialysis and then goes on
#   with 1.0.
# Expected: 4.0 mg/dL for each patient who had dialysis twice in the last week, or a day of
#   haemodialysis, whatever was measured: dialysis is what made it low.
# Why it matters here: the score orders the waiting list for a liver, and the package's answers are
#   a benchmark for language models.
# Instead: set the creatinine to 4.0 mg/dL before the call where there was dialysis.
# Source: the allocation policy of the Organ Procurement and Transplantation Network, 2016.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'medcalc-bench==1.7.0'
cat > expected.txt <<'EXPECTED'
none, creatinine 0.8 mg/dL: 17 points, by the policy 17
none, creatinine 1.2 mg/dL: 19 points, by the policy 19
none, creatinine 5.0 mg/dL: 30 points, by the policy 30
dialysis, creatinine 0.8 mg/dL: 17 points, by the policy 30
dialysis, creatinine 1.2 mg/dL: 30 points, by the policy 30
dialysis, creatinine 5.0 mg/dL: 30 points, by the policy 30
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import log

from medcalc.meldna import compute_meldna_explanation


def points(creatinine, dialysis, bilirubin, inr):
    """Return the points of the policy for a sodium of at least 137 mmol/L."""
    creatinine = 4.0 if dialysis else min(max(creatinine, 1.0), 4.0)
    return 10 * round(0.957 * log(creatinine) + 0.378 * log(bilirubin) + 1.12 * log(inr) + 0.643, 1)


for dialysis in (False, True):
    for creatinine in (0.8, 1.2, 5.0):
        given = {'creatinine': (creatinine, 'mg/dL'), 'dialysis_twice': dialysis, 'bilirubin': (3.0, 'mg/dL'),
                 'inr': 1.8, 'sodium': (140, 'mEq/L')}
        print(f"{'dialysis' if dialysis else 'none'}, creatinine {creatinine} mg/dL: "
              f"{compute_meldna_explanation(given)['Answer']} points, by the policy "
              f'{points(creatinine, dialysis, 3.0, 1.8):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
