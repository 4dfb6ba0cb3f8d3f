#!/usr/bin/env bash
# The adjusted Xie-Beni index of pyivm is its adjusted I index, to the last digit, for whatever groups.
#
# Packages: pyivm 0.1.0, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: xie_beni(..., adjusted=True) calls the adjustment of i_index. The two indices without it differ:
#   the one measures by the nearest two centres, small for good groups, and the other by the farthest two,
#   large for good groups, so that good groups have a small plain index and a large adjusted one.
# Expected: an adjustment of the Xie-Beni index, which is what it is called.
# Instead: the plain index, adjusted=False.
# Source: Xie and Beni, A validity measure for fuzzy clustering, IEEE PAMI 13, 1991; Maulik and
#   Bandyopadhyay, Performance evaluation of some clustering algorithms, IEEE PAMI 24, 2002, for the I index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'pyivm==0.1.0'
cat > expected.txt <<'EXPECTED'
apart: Xie-Beni 0.05 (by hand 0.05), I index 217; adjusted Xie-Beni 0.9998, adjusted I index 0.9998
two near each other: Xie-Beni 0.45 (by hand 0.45), I index 274; adjusted Xie-Beni 0.8513, adjusted I index 0.8513
two nearly one: Xie-Beni 20.11 (by hand 20.11), I index 315; adjusted Xie-Beni 0.6918, adjusted I index 0.6918
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pyivm import i_index, xie_beni

random = np.random.default_rng(0)
blob = random.normal(0, 1, (60, 2))
labels = np.repeat([0, 1, 2], 60)


def by_hand(people):
    centres = np.array([people[labels == label].mean(axis=0) for label in range(3)])
    inside = ((people - centres[labels]) ** 2).sum()
    nearest = min(((centres[a] - centres[b]) ** 2).sum() for a, b in ((0, 1), (0, 2), (1, 2)))
    return inside / (len(people) * nearest)


for name, centres in (('apart', (0, 6, 12)), ('two near each other', (0, 2, 12)), ('two nearly one', (0, 0.3, 12))):
    people = np.concatenate([blob + [centre, 0] for centre in centres])
    adjusted = xie_beni(people, labels, adjusted=True), i_index(people, labels, adjusted=True)
    print(f'{name}: Xie-Beni {xie_beni(people, labels):.2f} (by hand {by_hand(people):.2f}), I index {i_index(people, labels):.0f}; '
          f'adjusted Xie-Beni {adjusted[0]:.4f}, adjusted I index {adjusted[1]:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
