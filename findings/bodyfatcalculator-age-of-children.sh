#!/usr/bin/env bash
# BodyFatCalculator adds the age of children where its own formula subtracts it: a boy of 15 with a body mass
# index of 20 has 38.5 % of fat in place of 17.5 %, and children grow fatter each year.
#
# Packages: BodyFatCalculator 0.2.
# Behaviour: body_fat documents 1.51 BMI - 0.70 age - 2.2 for boys and + 1.4 for girls, and computes + 0.70 age.
#   The error is 1.4 times the age. It uses this formula up to 20 years, where it was made up to 15, so that
#   somebody of 20 has 42 % and the same person has 12.6 % at 21.
# Expected: the formula that it documents.
# Instead: compute it by hand.
# Source: Deurenberg, Weststrate and Seidell, Body mass index as a measure of body fatness: age- and
#   sex-specific prediction formulas, British Journal of Nutrition 1991.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'BodyFatCalculator==0.2'
cat > expected.txt <<'EXPECTED'
male, 7 years, BMI 20: 32.9 %, by its documentation 23.1 %
male, 10 years, BMI 20: 35.0 %, by its documentation 21.0 %
male, 15 years, BMI 20: 38.5 %, by its documentation 17.5 %
male, 20 years, BMI 20: 42.0 %, by its documentation 14.0 %
male, 21 years, BMI 20: 12.6 %
female, 7 years, BMI 20: 36.5 %, by its documentation 26.7 %
female, 10 years, BMI 20: 38.6 %, by its documentation 24.6 %
female, 15 years, BMI 20: 42.1 %, by its documentation 21.1 %
female, 20 years, BMI 20: 45.6 %, by its documentation 17.6 %
female, 21 years, BMI 20: 23.4 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from BodyFatCalculator.bodyfat_calculator import body_fat

for sex, last in (('male', -2.2), ('female', 1.4)):
    for age in (7, 10, 15, 20):
        print(f'{sex}, {age} years, BMI 20: {body_fat(age, sex, 20):.1f} %, by its documentation {1.51 * 20 - 0.70 * age + last:.1f} %')
    print(f'{sex}, 21 years, BMI 20: {body_fat(21, sex, 20):.1f} %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
