#!/usr/bin/env bash
# isotope-pattern-lib drops parentheses and the number behind them from a formula: acetone as (CH3)2CO has a mass of
# 43.02 in place of 58.04.
#
# Packages: isotope-pattern-lib 1.0.0, scipy 1.17.1, numpy 2.4.6, pyyaml 6.0.3.
# Behaviour: compute_isotope_pattern looks for elements with a number in the text and skips everything between them.
#   A group in parentheses is counted once, a charge or a misspelled part is not seen, and no error is raised.
# Expected: the group as often as its number says, or an error as for an unknown element.
# Why it matters here: the mass and the pattern decide which peaks are taken for the substance.
# Instead: write each element once, such as C3H6O.
# Source: IUPAC, Nomenclature of Organic Chemistry (2013), P-16.5, on enclosing marks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'isotope-pattern-lib==1.0.0' 'scipy==1.17.1' 'numpy==2.4.6' 'pyyaml==6.0.3'
cat > expected.txt <<'EXPECTED'
C3H6O: mass 58.042, by hand 58.042
(CH3)2CO: mass 43.018, by hand 58.042
CO(NH2)2: mass 44.014, by hand 60.032
C6H5(CH2)4OH: mass 108.058, by hand 150.104
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from isotope_pattern_lib import api

masses = {'C': 12.0, 'H': 1.007825, 'O': 15.9949146, 'N': 14.003074}
known = {
    'C3H6O': {'C': 3, 'H': 6, 'O': 1}, '(CH3)2CO': {'C': 3, 'H': 6, 'O': 1},
    'CO(NH2)2': {'C': 1, 'O': 1, 'N': 2, 'H': 4},
    'C6H5(CH2)4OH': {'C': 10, 'H': 14, 'O': 1},
}
for formula, counts in known.items():
    highest = max(api.compute_isotope_pattern(formula), key=lambda peak: peak.probability)
    right = sum(masses[element] * count for element, count in counts.items())
    print(f'{formula}: mass {highest.mass:.3f}, by hand {right:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
