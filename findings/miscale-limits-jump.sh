#!/usr/bin/env bash
# The scale reader miscale replaces values above a limit by numbers far beyond it: one kilogram more adds 2,700 kcal to what
# a man burns at rest, and the muscle and fat of a tall man weigh 21 kg more than he does.
#
# Packages: miscale 0.1.1.
# Behaviour: a basal metabolic rate above 2322 kcal becomes 5000, a muscle mass from 93.5 kg on 120 kg, a share of fat above
#   63 % becomes 75 %, a bone mass above 5.2 kg 8 kg. The check that keeps values within a range comes afterwards, and its
#   ranges end at these larger numbers.
# Expected: the value, the limit itself, or no value.
# Why it matters here: the values are the ones of strong and of heavy people, and nothing marks them as not measured.
# Instead: take a rate of 5000, a muscle mass of 120, fat of 75 % and bone of 8 kg for missing values.
# Source: the formula of the rate, continued by hand; the parts of a body do not weigh more than the body.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'miscale==0.1.1'
cat > expected.txt <<'EXPECTED'
man of 200 cm and 115 kg: at rest 2224 kcal, by its formula 2224
man of 200 cm and 121 kg: at rest 2313 kcal, by its formula 2313
man of 200 cm and 122 kg: at rest 5000 kcal, by its formula 2328
man of 200 cm and 130 kg: at rest 5000 kcal, by its formula 2447
man of 215 cm and 145 kg: muscle 90.7 kg, fat 49.4 kg, bone 4.9 kg, together 145 kg
man of 215 cm and 150 kg: muscle 92.2 kg, fat 52.8 kg, bone 5.0 kg, together 150 kg
man of 215 cm and 155 kg: muscle 120.0 kg, fat 56.2 kg, bone 5.1 kg, together 181 kg
man of 215 cm and 160 kg: muscle 120.0 kg, fat 59.6 kg, bone 5.1 kg, together 185 kg
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from miscale.body_composition import BodyComposition

for weight in (115, 121, 122, 130):
    person = BodyComposition(weight, 200, 25, 'male', 400)
    print(f'man of 200 cm and {weight} kg: at rest {person.get_BMR():.0f} kcal, by its formula {877.8 + weight * 14.916 - 200 * 0.726 - 25 * 8.976:.0f}')
for weight in (145, 150, 155, 160):
    person = BodyComposition(weight, 215, 25, 'male', 400)
    fat = person.get_fat_percentage() / 100 * weight
    print(f'man of 215 cm and {weight} kg: muscle {person.get_muscle_mass():.1f} kg, fat {fat:.1f} kg, bone {person.get_bone_mass():.1f} kg,',
          f'together {person.get_muscle_mass() + fat + person.get_bone_mass():.0f} kg')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
