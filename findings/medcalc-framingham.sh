#!/usr/bin/env bash
# medcalc-bench's Framingham risk is 0 or 60 % for men at 9 or 15 %.
#
# Packages: medcalc-bench 1.7.0, Python 3.11.
# Behaviour: framingham_risk_score_explanation converts both cholesterols from mg/dL to mmol/L,
#   which divides them by 38.7, and puts them into the equation of the Adult Treatment Panel III,
#   whose coefficients are for mg/dL. It rounds the risk to one digit before it makes per cent of
#   it, so that 0, 10, 20, … are the only answers.
# Expected: the risk of the equation: 1 - 0.9402^exp(score) for men and 1 - 0.98767^exp(score) for
#   women, with cholesterol in mg/dL.
# Why it matters here: the answers are a benchmark for language models, and a wrong key rewards the
#   models that repeat it.
# Instead: the equation by hand, or another calculator.
# Source: Third Report of the National Cholesterol Education Program, 2002.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'medcalc-bench==1.7.0'
cat > expected.txt <<'EXPECTED'
Male, 50 years: 0 %, published 4.8 %
Male, 60 years: 0 %, published 9.5 %
Male, 65 years: 20 %, published 12.1 %
Male, 70 years: 60 %, published 14.5 %
Female, 50 years: 0 %, published 0.9 %
Female, 60 years: 0 %, published 2.2 %
Female, 65 years: 0 %, published 3.1 %
Female, 70 years: 10 %, published 4.4 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import exp, log

from medcalc.framingham_risk_score import framingham_risk_score_explanation


def risk(age, male, total, hdl, pressure):
    """Return the published risk, in per cent, of a person who does not smoke and takes no medicine."""
    if male:
        score = (52.00961 * log(age) + 20.014077 * log(total) - 0.905964 * log(hdl) + 1.305784 * log(pressure)
                 - 4.605038 * log(age) * log(total) - 2.93323 * log(age) ** 2 - 172.300168)
        return 100 * (1 - 0.9402 ** exp(score))
    score = (31.764001 * log(age) + 22.465206 * log(total) - 1.187731 * log(hdl) + 2.552905 * log(pressure)
             - 5.060998 * log(age) * log(total) - 146.5933061)
    return 100 * (1 - 0.98767 ** exp(score))


for sex in ('Male', 'Female'):
    for age in (50, 60, 65, 70):
        given = {'sex': sex, 'age': (age, 'years'), 'sys_bp': (130, 'mmHg'), 'smoker': False, 'bp_medicine': False,
                 'total_cholestrol': (210.0, 'mg/dL'), 'hdl_cholestrol': (50.0, 'mg/dL')}
        print(f"{sex}, {age} years: {framingham_risk_score_explanation(given)['Answer']:.0f} %, "
              f"published {risk(age, sex == 'Male', 210.0, 50.0, 130):.1f} %")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
