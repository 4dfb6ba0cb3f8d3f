#!/usr/bin/env bash
# stroke-lifetime takes odds for a percentage: 94 of 284 old patients with a bad outcome are in a care home, and it computes
# with 49 % of them in place of 33 %.
#
# Packages: stroke-lifetime 3.0.2, numpy 2.2.6.
# Behaviour: perc_care_home_over70 and perc_care_home_not_over70 divide the patients in a care home by those not in one. For
#   all ages together, which is used for the scores 0 to 2, the same file divides by their sum.
# Expected: the share of all patients, "percentage of patients aged over 70 who are discharged to a care home".
# Why it matters here: the care home is the largest cost after a bad stroke, and the cost of a treatment is weighed against
#   what it saves of it. With a score of 5 a home is counted for 71 of 100, where 41 live in one.
# Instead: replace the last three values of both arrays by n / (n + other).
# Source: the counts of the package itself, and its percentage for all ages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'stroke-lifetime==3.0.2'
cat > expected.txt <<'EXPECTED'
mRS 3, over 70: 28 of 273 in a care home, share 0.103, stroke-lifetime 0.114
mRS 4, over 70: 94 of 284 in a care home, share 0.331, stroke-lifetime 0.495
mRS 5, over 70: 24 of 58 in a care home, share 0.414, stroke-lifetime 0.706
woman of 80, mRS 2: cost of care homes 1,434, with the share 1,434
woman of 80, mRS 3: cost of care homes 10,347, with the share 9,286
woman of 80, mRS 4: cost of care homes 23,284, with the share 15,577
woman of 80, mRS 5: cost of care homes 16,304, with the share 9,557
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from stroke_lifetime.fixed_params import get_fixed_params
from stroke_lifetime.main_calculations import main_calculations

parameters = get_fixed_params('mRS')
home, other = parameters['n_patients_care_home_over70'], parameters['n_patients_not_care_home_over70']
for score, cared, rest in zip((3, 4, 5), home, other):
    seen = parameters['perc_care_home_over70'][score]
    print(f'mRS {score}, over 70: {cared} of {cared + rest} in a care home, share {cared / (cared + rest):.3f}, '
          f'stroke-lifetime {seen:.3f}')
for score in (2, 3, 4, 5):
    older = main_calculations(80, 0, 'Female', score, parameters, 'mRS')
    right = dict(parameters)
    right['perc_care_home_over70'] = [*parameters['perc_care_home_over70'][:3], *(home / (home + other))]
    right['perc_care_home_over70'] = parameters['perc_care_home_over70'] * 0 + right['perc_care_home_over70']
    expected = main_calculations(80, 0, 'Female', score, right, 'mRS')
    print(f'woman of 80, mRS {score}: cost of care homes {older["care_years_discounted_cost"]:,.0f}, with the share '
          f'{expected["care_years_discounted_cost"]:,.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
