#!/usr/bin/env bash
# distancefyi rounds a length to whole kilometres or miles before it converts it: 2.5 miles are 3 km, 0.5 miles none, and
# places that are 620 m apart are one kilometre and one mile apart.
#
# Packages: distancefyi 0.1.3, typer 0.15.4, rich 13.9.4, click 8.1.8.
# Behaviour: the command convert takes a number with decimals, documented as "value to convert", and rounds it before and
#   after; compute_distance computes miles from the rounded kilometres.
# Expected: one rounding, at the end: 4 km, 1 km and 0.39 miles.
# Why it matters here: the nearest hospital is at 0 km for everybody within 500 m.
# Instead: multiply by 1.609344.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'distancefyi==0.1.3' 'typer==0.15.4' 'rich==13.9.4' 'click==8.1.8'
cat > expected.txt <<'EXPECTED'
2.5 mi = 3 km; 4.02
0.5 mi = 0 km; 0.80
4.5 mi = 6 km; 7.24
0.5 km = 0 mi; 0.31
2.5 km = 1 mi; 1.55
100.0 mi = 161 km; 160.93
400 m: 0 km, 0 miles; 0.25 miles
620 m: 1 km, 1 miles; 0.39 miles
1450 m: 1 km, 1 miles; 0.90 miles
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import subprocess
import sys

from distancefyi import compute_distance

for value, unit, target, factor in ((2.5, 'mi', 'km', 1.609344), (0.5, 'mi', 'km', 1.609344), (4.5, 'mi', 'km', 1.609344),
                                    (0.5, 'km', 'mi', 0.621371), (2.5, 'km', 'mi', 0.621371), (100, 'mi', 'km', 1.609344)):
    run = subprocess.run([sys.executable, '-c', 'from distancefyi.cli import app; app()', 'convert', str(value), unit, target],
                         capture_output=True, text=True)
    print(f'{run.stdout.strip()}; {value * factor:.2f}')
for metres in (400, 620, 1450):
    result = compute_distance(0, 0, 0, metres / 111_195)
    print(f'{metres} m: {result.distance_km} km, {result.distance_miles} miles; {metres / 1609.344:.2f} miles')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
