#!/usr/bin/env bash
# delfuzz takes Gloria for Geoffrey and Dorothy for Donato: its list pairs names that do not belong together.
#
# Packages: delfuzz 1.0.0, pandas 2.2.3, numpy 2.2.6.
# Behaviour: its list of equivalent names has pairs that are not: the Spanish name of one line beside
#   the English name of another. Such a pair has a score of 85 of 100, as Juan and John have. Names
#   that nobody takes for each other have less than 50. Three surnames that one of two people lacks
#   cost as much as one.
# Expected: a low score for two different names, one of a woman and one of a man.
# Why it matters here: two patients of one surname are linked.
# Instead: remove the pairs from its TokenCosts before scoring.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.2.3' 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'delfuzz==1.0.0'
cat > expected.txt <<'EXPECTED'
Juan and John: 85 of 100
Gloria and Geoffrey: 85 of 100
Dorothy and Donato: 85 of 100
Gloria and Manuel: 0 of 100
Gloria García and Geoffrey García: 92 of 100
Ana and Ana Pérez López Ruiz: 88 of 100
Gloria and Glorya: 92 of 100
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from delfuzz import score

for one, other in (('Juan', 'John'), ('Gloria', 'Geoffrey'), ('Dorothy', 'Donato'), ('Gloria', 'Manuel'),
                   ('Gloria García', 'Geoffrey García'), ('Ana', 'Ana Pérez López Ruiz'), ('Gloria', 'Glorya')):
    print(f'{one} and {other}: {score(one, other):.0f} of 100')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
