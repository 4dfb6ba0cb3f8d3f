#!/usr/bin/env bash
# labunits converts norepinephrine to a thousand times its amount, and acetylcholinesterase to a
# thousandth.
#
# Packages: labunits 0.2.1.
# Behaviour: the table of conversion factors has 5.91 for norepinephrine from pg/mL to nmol/L, which
#   is the factor to pmol/L, and 1 for acetylcholinesterase from U/mL to U/L. Epinephrine, in the
#   next lines, is right.
# Expected: what molar mass and litre give; 0.00591 and 1000.
# Why it matters here: laboratories of a pooled data set report in both systems, and one of them
#   becomes an outlier of a thousand times the others, which bounds then clamp.
# Instead: check each factor that is used by the molar mass, and compare the medians of the two
#   groups.
# Source: PubChem, norepinephrine, C8H11NO3, 169.18 g/mol; epinephrine, C9H13NO3, 183.20 g/mol.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'labunits==0.2.1'
cat > expected.txt <<'EXPECTED'
norepinephrine, 300 pg/mL: 1773 nmol/L, by its molar mass of 169.18 1.773 nmol/L
epinephrine, 300 pg/mL: 1638 pmol/L, by its molar mass of 183.2 1638 pmol/L
acetylcholinesterase, 5 U/mL: 5 U/L, by a litre of 1000 mL 5000 U/L
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from labunits.converters import analytes, conversion_factor, si_unit, to_si_unit, traditional_unit

PREFIX = {'pg/mL': 1e-9, 'pmol/L': 1e-12, 'nmol/L': 1e-9}  # in g/L and mol/L
for name, code, mass in (('norepinephrine', '2666-6', 169.18), ('epinephrine', '1465-4', 183.20)):
    value = 300
    right = value * PREFIX[traditional_unit(code)] / mass / PREFIX[si_unit(code)]
    print(f'{name}, {value} {traditional_unit(code)}: {to_si_unit(value, code):.4g} {si_unit(code)}, '
          f'by its molar mass of {mass} {right:.4g} {si_unit(code)}')
code = next(entry.loinc_num for entry in analytes() if entry.name == 'Acetylcholinesterase')
print(f'acetylcholinesterase, 5 {traditional_unit(code)}: {to_si_unit(5, code):g} {si_unit(code)}, '
      f'by a litre of 1000 mL {5 * 1000} {si_unit(code)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
