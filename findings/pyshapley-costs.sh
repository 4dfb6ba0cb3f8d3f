#!/usr/bin/env bash
# The Shapley values of pyshapley are 0 for everybody in a game of costs, since each negative payoff is taken
# for 0: three clinics that share a laboratory for 90 pay nothing.
#
# Packages: pyshapley 0.1.0, numpy 1.26.4 and its other requirements.
# Behaviour: marginal contributions are max(0, payoff with) - max(0, payoff without). Where some payoffs are
#   negative, as for a member who loses money alone, each value is another one. Nothing says so.
# Expected: payoff with - payoff without, for any sign: the values add up to the payoff of all.
# Instead: add a constant for each member to the payoffs and subtract it from the values.
# Source: Shapley, A value for n-person games, 1953.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyshapley==0.1.0' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
costs of a laboratory: pyshapley a 0.0, b 0.0, c 0.0 ; by hand a -39.2, b -29.2, c -21.7 ; sums 0.0 and -90.0, all together -90
a loses alone, gains with b: pyshapley a 16.7, b 29.2, c 4.2 ; by hand a 3.3, b 40.8, c 5.8 ; sums 50.0 and 50.0, all together 50
gains: pyshapley a 39.2, b 29.2, c 21.7 ; by hand a 39.2, b 29.2, c 21.7 ; sums 90.0 and 90.0, all together 90
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import permutations

from pyshapley.game import ManualDictGame
from pyshapley.solution import Shapley

GAMES = {
    'costs of a laboratory': {'': 0, 'a': -60, 'b': -50, 'c': -40, 'ab': -80, 'ac': -75, 'bc': -65, 'abc': -90},
    'a loses alone, gains with b': {'': 0, 'a': -30, 'b': 10, 'c': 0, 'ab': 40, 'ac': -20, 'bc': 15, 'abc': 50},
    'gains': {'': 0, 'a': 60, 'b': 50, 'c': 40, 'ab': 80, 'ac': 75, 'bc': 65, 'abc': 90},
}
for name, payoff in GAMES.items():
    seen = {p: Shapley(ManualDictGame({'a', 'b', 'c'}, payoff)).shapley(p) for p in 'abc'}
    right = {p: sum(payoff[''.join(sorted(o[:o.index(p) + 1]))] - payoff[''.join(sorted(o[:o.index(p)]))]
                    for o in permutations('abc')) / 6 for p in 'abc'}
    print(f'{name}: pyshapley', ', '.join(f'{p} {seen[p]:.1f}' for p in 'abc'), '; by hand',
          ', '.join(f'{p} {right[p]:.1f}' for p in 'abc'),
          f'; sums {sum(seen.values()):.1f} and {sum(right.values()):.1f}, all together {payoff["abc"]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
