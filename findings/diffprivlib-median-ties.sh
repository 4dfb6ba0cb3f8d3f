#!/usr/bin/env bash
# The private median of diffprivlib misses a value that repeats, and fails if it repeats often.
#
# Packages: diffprivlib 0.6.6, scikit-learn 1.5.2, scipy 1.15.3, numpy 2.2.6.
# Behaviour: median draws from the gaps between sorted values, by their widths. Equal values have
#   gaps of width 0. So days in hospital give a number anywhere between two whole ones, however
#   large ε is; and where one value has enough rows, all probabilities vanish and the call raises an
#   error. That error depends on the private data.
# Expected: a number near the median, nearer with more rows, and no error.
# Instead: add a random number within half a unit to each value first, and round the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'diffprivlib==0.6.6' 'scikit-learn==1.5.2' 'scipy==1.15.3' 'numpy==2.2.6'
cat > expected.txt <<'EXPECTED'
stay, median 4.00: 3.72 3.03 3.71 3.55
stay, spread, median 3.81: 3.81
800 of 1000 equal, median 5.00: Can't find a candidate to return
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from diffprivlib.tools import median

random = np.random.default_rng(0)
stay = random.poisson(4, 1000).astype(float)
spread = stay + random.uniform(-0.5, 0.5, 1000)
often = np.repeat([4.0, 5.0, 6.0], [100, 800, 100])
for name, values in (('stay', stay), ('stay, spread', spread), ('800 of 1000 equal', often)):
    seen = []
    for seed in range(5):
        try:
            seen.append(f'{median(values, epsilon=10.0, bounds=(0, 100), random_state=seed):.2f}')
        except RuntimeError as error:
            seen.append(str(error).split('.')[0])
    print(f'{name}, median {np.median(values):.2f}:', *dict.fromkeys(seen))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
