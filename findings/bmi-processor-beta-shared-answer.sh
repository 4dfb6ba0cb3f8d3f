#!/usr/bin/env bash
# bmi-processor-beta gives people the body mass index of somebody else: who has the same one as an earlier person gets the
# last one of the category.
#
# Packages: bmi-processor-beta 1.0.2.
# Behaviour: get_bmi_details has one dictionary for each category, writes the index into it, returns it and remembers the
#   answer for each index. The remembered answer is the same dictionary, whose index the next person of the category has
#   changed. process_data copies it into the record.
# Expected: the weight divided by the square of the height, for each record.
# Why it matters here: it is the only function of the package, made for large files, in which each index occurs many times.
# Instead: caluclate_bmi, and the category by hand.
# Source: the index by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'bmi-processor-beta==1.0.2'
cat > expected.txt <<'EXPECTED'
80 kg, 200 cm: index 20.0, by hand 20.0, normal weight
92 kg, 200 cm: index 23.0, by hand 23.0, normal weight
80 kg, 200 cm: index 23.0, by hand 20.0, normal weight
96 kg, 200 cm: index 24.0, by hand 24.0, normal weight
92 kg, 200 cm: index 24.0, by hand 23.0, normal weight
80 kg, 200 cm: index 24.0, by hand 20.0, normal weight
answer for 26.0 after somebody with 29.0: 29.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from contextlib import redirect_stdout
from io import StringIO
from bmi_processor.bmi_processor import get_bmi_details, process_data

people = [{'HeightCm': 200, 'WeightKg': weight} for weight in (80, 92, 80, 96, 92, 80)]
with redirect_stdout(StringIO()):
    process_data(people)
for person in people:
    print(f'{person["WeightKg"]} kg, {person["HeightCm"]} cm: index {person["bmi"]}, by hand {person["WeightKg"] / 4:.1f}, '
          f'{person["bmi_category"]}')
first = get_bmi_details(26.0)
get_bmi_details(29.0)
print('answer for 26.0 after somebody with 29.0:', first['bmi'])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
