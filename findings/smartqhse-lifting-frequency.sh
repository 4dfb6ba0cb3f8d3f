#!/usr/bin/env bash
# The lifting equation of smartqhse-hse-calculators has the limits of one hour for two hours of work,
# and forbids nine lifts a minute however short.
#
# Packages: smartqhse-hse-calculators 0.1.0.
# Behaviour: the frequency multiplier of the NIOSH equation has three columns, up to one hour, one to
#   two hours and two to eight. calculate_niosh_lift has the first and the last, and takes the first up
#   to two hours: 8 lifts a minute for two hours have a limit of 13.8 kg in place of 8.0, and a load of
#   10 kg is acceptable. Above 8 lifts a minute the multiplier is 0 and the index 999, where the table
#   has 0.52 for 9 lifts and less than an hour. A frequency between two rows has the next one.
# Expected: the table of the publication that it names, for hands at 75 cm or above.
# Instead: look the multiplier up in table 5 of the publication.
# Source: NIOSH, Applications Manual for the Revised NIOSH Lifting Equation, publication 94-110, table 5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'smartqhse-hse-calculators==0.1.0'
cat > expected.txt <<'EXPECTED'
1 lifts a minute for 1.5 h: limit 21.6 kg, index 0.46, acceptable; by the table 20.2 kg, index 0.49
4 lifts a minute for 1.5 h: limit 19.3 kg, index 0.52, acceptable; by the table 16.6 kg, index 0.60
6 lifts a minute for 2 h: limit 17.2 kg, index 0.58, acceptable; by the table 11.5 kg, index 0.87
8 lifts a minute for 2 h: limit 13.8 kg, index 0.72, acceptable; by the table 8.0 kg, index 1.24
8 lifts a minute for 1 h: limit 13.8 kg, index 0.72, acceptable; by the table 13.8 kg, index 0.72
9 lifts a minute for 1 h: limit 0.0 kg, index 999, high; by the table 12.0 kg, index 0.84
9 lifts a minute for 0.2 h: limit 0.0 kg, index 999, high; by the table 12.0 kg, index 0.84
10 lifts a minute for 4 h: limit 0.0 kg, index 999, high; by the table 3.0 kg, index 3.34
3 lifts a minute for 1 h: limit 19.3 kg, index 0.52, acceptable; by the table 20.2 kg, index 0.49
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from smartqhse_hse_calculators import calculate_niosh_lift

table = {1: (0.94, 0.88, 0.75), 4: (0.84, 0.72, 0.45), 6: (0.75, 0.50, 0.27), 8: (0.60, 0.35, 0.18),
         9: (0.52, 0.30, 0.15), 10: (0.45, 0.26, 0.13)}
for frequency, hours in ((1, 1.5), (4, 1.5), (6, 2), (8, 2), (8, 1), (9, 1), (9, 0.2), (10, 4), (3, 1)):
    seen = calculate_niosh_lift(horizontal_cm=25, vertical_cm=75, vertical_travel_cm=25, angle_degrees=0,
                                frequency_per_min=frequency, duration_hours=hours, coupling_quality='good', load_kg=10)
    place = 0 if hours <= 1 else 1 if hours <= 2 else 2
    factor = table.get(frequency, (0.88, 0.79, 0.55))[place]
    print(f"{frequency} lifts a minute for {hours} h: limit {seen['rwl']} kg, index {seen['li']}, {seen['risk']};",
          f'by the table {23 * factor:.1f} kg, index {10 / (23 * factor):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
