#!/usr/bin/env bash
# pyisopach starts to count again where an element comes a second time without a number: acetic acid as CH3COOH has a
# weight of 29.02 in place of 60.05.
#
# Packages: pyisopach 0.1.2 (without its pinned numpy 1.16.0, which has no build for Python 3.11), numpy 1.26.4.
# Behaviour: numbers behind an element are added up. An element without a number is set to one atom and not increased
#   by one, whatever was counted before: CH3COOH has one carbon, one hydrogen and one oxygen.
# Expected: the same molecule as C2H4O2.
# Why it matters here: condensed formulas are how substances are written, and the weight and the pattern decide which
#   peak is taken for them.
# Instead: write each element once.
# Source: IUPAC, Nomenclature of Organic Chemistry (2013), which writes condensed formulas so: CH3-COOH is C2H4O2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pyisopach==0.1.2' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
C2H4O2: 8 atoms with a weight of 60.05, by hand 8 with 60.05
CH3COOH: 3 atoms with a weight of 29.02, by hand 8 with 60.05
C2H5OH: 4 atoms with a weight of 41.03, by hand 9 with 46.07
NH2CH2COOH: 4 atoms with a weight of 43.02, by hand 10 with 75.07
CH3CH2CH3: 9 atoms with a weight of 20.07, by hand 11 with 44.10
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pyisopach

weights = {'C': 12.0107, 'H': 1.0079, 'O': 15.9994, 'N': 14.0067}
known = {
    'C2H4O2': {'C': 2, 'H': 4, 'O': 2}, 'CH3COOH': {'C': 2, 'H': 4, 'O': 2}, 'C2H5OH': {'C': 2, 'H': 6, 'O': 1},
    'NH2CH2COOH': {'N': 1, 'H': 5, 'C': 2, 'O': 2}, 'CH3CH2CH3': {'C': 3, 'H': 8},
}
for formula, counts in known.items():
    molecule = pyisopach.Molecule(formula)
    right = sum(weights[element] * count for element, count in counts.items())
    print(f'{formula}: {molecule.num_atoms} atoms with a weight of {molecule.molecular_weight:.2f}, by hand '
          f'{sum(counts.values())} with {right:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
