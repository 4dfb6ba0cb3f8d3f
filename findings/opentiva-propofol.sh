#!/usr/bin/env bash
# opentiva reads the minus signs of a propofol model as the digit 2, so that a patient of 60 years has a
# central volume of 13 million litres, and gives adolescents of 14 to 16 the model of 13.
#
# Packages: opentiva 1.1.2, numpy 1.26.4, scipy 1.13.1. The script uses the source, since its compiled part,
#   which is not part of this and an empty module stands in for, does not build on Python 3.11.
# Behaviour: the exponent of age in Schuttler is 20.39 in place of -0.39, and two other effects are 20.40
#   and 20.48 in place of -0.40 and -0.48. At 30 years the first has no effect. In Paedfusor each of the
#   cases from 14 on follows the case "13 and above" and is never used.
# Expected: 7 litres at 60 years for 70 kg; 0.229 L/kg and an elimination of 0.119 a minute at 16 years.
# Why it matters here: the simulated infusion reaches no concentration, or a wrong one in adolescents.
# Instead: the published parameters, as below; the Marsh and Minto models of the package are right.
# Source: Schüttler and Ihmsen, Anesthesiology 92 (2000) 727; Absalom and Kenny, Br J Anaesth 95
#   (2005) 110, for Paedfusor: 400, 342, 284 and 228.57 mL/kg at 13, 14, 15 and 16 years.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'scipy==1.13.1'
env/bin/python -m pip download -q -q --no-deps --no-binary :all: 'opentiva==1.1.2'
tar xzf opentiva-1.1.2.tar.gz
export PYTHONPATH="$folder/opentiva-1.1.2"
cat > expected.txt <<'EXPECTED'
25 years, 70 kg: Schuttler v1 0.226 L, published 9.99 L
30 years, 70 kg: Schuttler v1 9.3 L, published 9.3 L
40 years, 70 kg: Schuttler v1 3.28e+03 L, published 8.31 L
60 years, 70 kg: Schuttler v1 1.28e+07 L, published 7.1 L
80 years, 70 kg: Schuttler v1 4.51e+09 L, published 6.34 L
venous over arterial clearance 2: 21.40, published 0.60
13 years: Paedfusor 400 mL/kg, 0.068 a minute, published 400 mL/kg, 0.068 a minute
14 years: Paedfusor 400 mL/kg, 0.068 a minute, published 342 mL/kg, 0.079 a minute
15 years: Paedfusor 400 mL/kg, 0.068 a minute, published 284 mL/kg, 0.095 a minute
16 years: Paedfusor 400 mL/kg, 0.068 a minute, published 229 mL/kg, 0.119 a minute
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
from unittest.mock import MagicMock

sys.modules['opentiva.pkpd'] = MagicMock()
from opentiva.propofol import Paedfusor, Schuttler

for age in (25, 30, 40, 60, 80):
    seen, published = Schuttler(0, age, 70, 170).v1, 9.3 * (age / 30) ** -0.39
    print(f'{age} years, 70 kg: Schuttler v1 {seen:.3g} L, published {published:.3g} L')
venous, arterial = Schuttler(0, 40, 70, 170, venous_data=True), Schuttler(0, 40, 70, 170)
print(f'venous over arterial clearance 2: {venous.cl2 / arterial.cl2:.2f}, published 0.60')
for age, volume, elimination in (
    (13, 400, 0.0678), (14, 342, 0.0792), (15, 284, 0.0954), (16, 228.57, 0.119),
):
    seen = Paedfusor(0, age, 50, 165)
    print(f'{age} years: Paedfusor {1000 * seen.v1 / 50:.0f} mL/kg, {seen.k10:.3f} a minute,',
          f'published {volume:.0f} mL/kg, {elimination:.3f} a minute')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
