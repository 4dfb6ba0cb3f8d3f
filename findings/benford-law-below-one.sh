#!/usr/bin/env bash
# benford-law leaves amounts below 1 out.
#
# Packages: benford-law 0.1.2, numpy 2.2.6, pandas 2.3.3, matplotlib 3.10.7, pillow 12.0.0.
# Behaviour: benford_analysis counts the first digits of numbers. It cuts the logarithm of a number
#   towards zero, so that the first digit of 0.25 is that of 0, and digits of 0 are not counted. Of
#   ten amounts the five below 1 are missing, without a message, and the shares of the others are
#   those of all. The same amounts in cents have other shares.
# Expected: the digits 2, 3, 4, 5 and 9 for 0.25, 0.31, 0.47, 0.5 and 0.99.
# Instead: multiply the amounts by a power of ten first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'benford-law==0.1.2' 'numpy==2.2.6' 'pandas==2.3.3' 'matplotlib==3.10.7' 'pillow==12.0.0'
cat > expected.txt <<'EXPECTED'
in euros: 5 of 10 counted, digits 1 to 9 [2, 2, 1, 0, 0, 0, 0, 0, 0] in per cent [40, 40, 20, 0, 0, 0, 0, 0, 0]
in cents: 10 of 10 counted, digits 1 to 9 [2, 3, 2, 1, 1, 0, 0, 0, 1] in per cent [20, 30, 20, 10, 10, 0, 0, 0, 10]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from benford_law import Benford

amounts = np.array([0.25, 0.31, 0.47, 0.5, 0.99, 1.2, 2.5, 3.1, 12.0, 250.0])
for name, values in (('in euros', amounts), ('in cents', np.round(amounts * 100))):
    counts = Benford(values.copy(), normalized=False)
    counts.benford_analysis()
    shares = Benford(values.copy())
    shares.benford_analysis()
    print(f'{name}: {counts.digits_count.sum():.0f} of {len(values)} counted, digits 1 to 9',
          counts.digits_count.astype(int).tolist(), 'in per cent', shares.digits_count.astype(int).tolist())
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
