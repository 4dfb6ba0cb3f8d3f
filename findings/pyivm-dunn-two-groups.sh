#!/usr/bin/env bash
# The Dunn index of pyivm looks at the distance of the first two groups and no other: two groups that touch
# leave it as it is, and another numbering of the same groups gives another index.
#
# Packages: pyivm 0.1.0, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: the separation is the smallest distance of a person with label 0 to one with label 1, for any
#   number of groups. The diameters are of all groups.
# Expected: the smallest distance of any two groups, divided by the largest diameter.
# Instead: the loop over pairs below.
# Source: Dunn, A fuzzy relative of the ISODATA process, J. Cybernetics 3, 1973.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'pyivm==0.1.0'
cat > expected.txt <<'EXPECTED'
three groups apart, numbered (0, 1, 2): pyivm 3.01, by hand 3.01
three groups apart, numbered (2, 1, 0): pyivm 3.01, by hand 3.01
three groups apart, numbered (1, 2, 0): pyivm 6.68, by hand 3.01
the last two touch, numbered (0, 1, 2): pyivm 3.01, by hand 0.12
the last two touch, numbered (2, 1, 0): pyivm 0.12, by hand 0.12
the last two touch, numbered (1, 2, 0): pyivm 3.75, by hand 0.12
the last two are one, numbered (0, 1, 2): pyivm 3.01, by hand 0.01
the last two are one, numbered (2, 1, 0): pyivm 0.01, by hand 0.01
the last two are one, numbered (1, 2, 0): pyivm 3.20, by hand 0.01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import combinations

import numpy as np
from pyivm import dunn

random = np.random.default_rng(0)
blob = random.uniform(-1, 1, (40, 2))


def by_hand(people, labels):
    groups = [people[labels == label] for label in np.unique(labels)]

    def distances(a, b):
        return np.linalg.norm(a[:, None] - b[None], axis=2)

    return (min(distances(a, b).min() for a, b in combinations(groups, 2)) / max(distances(a, a).max() for a in groups))


for name, centres in (('three groups apart', (0.0, 10.0, 20.0)), ('the last two touch', (0.0, 10.0, 12.0)),
                      ('the last two are one', (0.0, 10.0, 10.5))):
    people = np.concatenate([blob + [centre, 0.0] for centre in centres])
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        labels = np.repeat(order, 40)
        print(f'{name}, numbered {order}: pyivm {dunn(people, labels):.2f}, by hand {by_hand(people, labels):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
