#!/usr/bin/env bash
# kalkulator-bmi calls a body mass index between two of its limits its worst one: 22.95, between normal weight and overweight,
# is "Obesity Class II".
#
# Packages: kalkulator-bmi 1.0.0.
# Behaviour: get_bmi_category has closed ranges with one decimal place, such as 18.5 to 22.9 and 23.0 to 24.9. What lies
#   between two of them passes all tests and reaches the last branch.
# Expected: each index up to 30 in one of the two categories beside it, as for a rounded one.
# Why it matters here: calculate_bmi of the package rounds. An index from a table or a quotient does not, and the category of
#   a slim person changes to the worst one by a rounding error.
# Instead: round the index to one decimal place before.
# Source: the categories of the package for the values beside it; Asian limits of the WHO, 23 and 25.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'kalkulator-bmi==1.0.0'
cat > expected.txt <<'EXPECTED'
index 22.9: Normal weight
index 22.95: Obesity Class II
index 23.0: Overweight
index 24.9: Overweight
index 24.95: Obesity Class II
index 25.0: Obesity Class I
index 29.9: Obesity Class I
index 29.95: Obesity Class II
index 30.0: Obesity Class II
66.3 kg, 170 cm: index 22.941, Obesity Class II; rounded first Normal weight
72.0 kg, 170 cm: index 24.913, Obesity Class II; rounded first Overweight
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from types import ModuleType

sys.modules['tkinter'] = ModuleType('tkinter')
sys.modules['tkinter'].messagebox = None
from bmi_calculator.core import calculate_bmi, get_bmi_category

for bmi in (22.9, 22.95, 23.0, 24.9, 24.95, 25.0, 29.9, 29.95, 30.0):
    print(f'index {bmi}: {get_bmi_category(bmi)}')
for weight, height in ((66.3, 170), (72.0, 170)):
    bmi = weight / (height / 100) ** 2
    print(f'{weight} kg, {height} cm: index {bmi:.3f}, {get_bmi_category(bmi)}; rounded first {get_bmi_category(calculate_bmi(weight, height))}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
