#!/usr/bin/env bash
# The Shapley values of svfl count a harmful contribution as none: a client whose model makes the others
# worse has a value above 0, and the values do not add up to what all clients reach together.
#
# Packages: svfl 0.1.0.
# Behaviour: calculate_sv replaces each negative marginal contribution by 0 and then subtracts the sum of the
#   contributions so far, which is no longer the value of the clients before. A client that comes after a
#   harmful one is thus given less than it adds, and the harmful one something for each order in which it is
#   first. The value of no client is taken to be 0, whatever the evaluation of a start model is.
# Expected: the mean of v(S with i) - v(S) over all orders, as its description, the average marginal
#   contribution, says: it may be negative, and the values add up to v of all clients.
# Why it matters here: a hospital with wrong labels is the one to be found.
# Instead: the loop over itertools.permutations below.
# Source: Shapley, A value for n-person games, 1953.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'svfl==0.1.0'
cat > expected.txt <<'EXPECTED'
A: svfl 0.300, by hand 0.333
B: svfl 0.217, by hand 0.233
harmful: svfl 0.100, by hand -0.067
sum: svfl 0.617, by hand 0.500, score of all 0.500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import permutations
from svfl.svfl import calculate_sv

SCORES = {'A': 0.6, 'B': 0.5, 'harmful': 0.3, 'AB': 0.8, 'Aharmful': 0.4, 'Bharmful': 0.3, 'ABharmful': 0.5}
models = {'A': 'A', 'B': 'B', 'harmful': 'harmful'}


def score(clients):
    return SCORES.get(''.join(sorted(clients)), 0.0)


seen = calculate_sv(models, score, lambda local: list(local))
orders = list(permutations(models))
right = {client: sum(score(order[:order.index(client) + 1]) - score(order[:order.index(client)]) for order in orders)
         / len(orders) for client in models}
for client in models:
    print(f'{client}: svfl {seen[client]:.3f}, by hand {right[client]:.3f}')
print(f'sum: svfl {sum(seen.values()):.3f}, by hand {sum(right.values()):.3f}, score of all {score(models):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
