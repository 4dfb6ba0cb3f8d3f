#!/usr/bin/env bash
# The power of the members of a council in pyshapley is right for the Security Council of the United Nations
# and no other: in a council of 5 it gives 0 to a permanent member whose power is 0.6.
#
# Packages: pyshapley 0.1.0, numpy 1.26.4 and its other requirements.
# Behaviour: GeneralCouncilGame takes the number of members, of permanent ones and of votes. Its formula for the
#   others counts the coalitions as s! / ((s - p - 1)! (n - s)!) for s votes, p permanent ones and n members,
#   which is right where n - p - 1 happens to be s, and its formula for the permanent ones has 10 others built
#   in: both hold for 15 members, 5 permanent ones and 9 votes.
# Expected: (n - p - 1)! in place of s!, and n - p in place of 10; the values of all add up to 1.
# Instead: Shapley(game).shapley(member), which goes through all orders and is right, for small councils.
# Source: Shapley and Shubik, A method for evaluating the distribution of power, Am. Polit. Sci. Rev. 48, 1954.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyshapley==0.1.0' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
15 members, 5 permanent, 9 votes: permanent 0.1963 (by hand 0.1963), other 0.0019 (by hand 0.0019), sum of all 1.000
15 members, 5 permanent, 10 votes: permanent 0.1161 (by hand 0.1916), other 0.0420 (by hand 0.0042), sum of all 1.000
20 members, 5 permanent, 12 votes: permanent 0.2000 (by hand 0.1940), other 0.0000 (by hand 0.0020), sum of all 1.000
5 members, 1 permanent, 3 votes: permanent 0.0000 (by hand 0.6000), other 0.1000 (by hand 0.1000), sum of all 0.400
   through all orders: permanent 0.6000, other 0.1000
7 members, 2 permanent, 4 votes: permanent 0.3571 (by hand 0.4286), other 0.0286 (by hand 0.0286), sum of all 0.857
   through all orders: permanent 0.4286, other 0.0286
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from math import comb, factorial

from pyshapley import game as games
from pyshapley.solution import Shapley


def by_hand(members, permanent, votes):
    others = comb(members - permanent - 1, votes - permanent - 1) * factorial(votes - 1) * factorial(
        members - votes) / factorial(members)
    return (1 - (members - permanent) * others) / permanent, others


for members, permanent, votes in ((15, 5, 9), (15, 5, 10), (20, 5, 12), (5, 1, 3), (7, 2, 4)):
    game = games.GeneralCouncilGame([f'm{i}' for i in range(members)], permanent, votes)
    first, other = game.shapley('m0'), game.shapley(f'm{members - 1}')
    right = by_hand(members, permanent, votes)
    print(f'{members} members, {permanent} permanent, {votes} votes: permanent {first:.4f} (by hand {right[0]:.4f}), '
          f'other {other:.4f} (by hand {right[1]:.4f}), sum of all {permanent * first + (members - permanent) * other:.3f}')
    if members < 8:
        orders = Shapley(game)
        print(f'   through all orders: permanent {orders.shapley("m0"):.4f}, other {orders.shapley(f"m{members - 1}"):.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
