#!/usr/bin/env bash
# The paired effect size of CLES is 80 % where all of five patients improve, and 100 % where all of them
# get worse; where nothing changes it is 60 %.
#
# Packages: CLES 0.1.3, numpy 2.4.6.
# Behaviour: CLES_2paired(before, after) compares each of n differences with n - 1 zeros and divides by n *
#   n. The share of those who improve lacks a part in n, and a share below one half is then turned over.
#   The result depends on which measurement is named first.
# Expected: the share of the pairs that are greater, ties half, between 50 and 100 after it is turned over:
#   100, 100 and 50, as CLES_1samp(after - before) gives.
# Why it matters here: an effect in one direction looks smaller than the same one in the other.
# Instead: CLES_1samp(after - before).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'CLES==0.1.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
3 pairs, all better: counted 100 %, CLES_1samp 100 %, CLES_2paired 67 %
3 pairs, all worse: counted 100 %, CLES_1samp 100 %, CLES_2paired 100 %
3 pairs, no change: counted 50 %, CLES_1samp 50 %, CLES_2paired 67 %
5 pairs, all better: counted 100 %, CLES_1samp 100 %, CLES_2paired 80 %
5 pairs, all worse: counted 100 %, CLES_1samp 100 %, CLES_2paired 100 %
5 pairs, no change: counted 50 %, CLES_1samp 50 %, CLES_2paired 60 %
10 pairs, all better: counted 100 %, CLES_1samp 100 %, CLES_2paired 90 %
10 pairs, all worse: counted 100 %, CLES_1samp 100 %, CLES_2paired 100 %
10 pairs, no change: counted 50 %, CLES_1samp 50 %, CLES_2paired 55 %
50 pairs, all better: counted 100 %, CLES_1samp 100 %, CLES_2paired 98 %
50 pairs, all worse: counted 100 %, CLES_1samp 100 %, CLES_2paired 100 %
50 pairs, no change: counted 50 %, CLES_1samp 50 %, CLES_2paired 51 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from CLES.CLES import CLES_1samp, CLES_2paired

for number in (3, 5, 10, 50):
    before = np.arange(number, dtype=float)
    for name, after in (('all better', before + 1), ('all worse', before - 1), ('no change', before)):
        difference = after - before
        share = np.mean(difference > 0) + np.mean(difference == 0) / 2
        print(f'{number} pairs, {name}: counted {100 * max(share, 1 - share):.0f} %, CLES_1samp '
              f'{CLES_1samp(difference):.0f} %, CLES_2paired {CLES_2paired(before, after):.0f} %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
