#!/usr/bin/env bash
# prob-target-encoder encodes a category in which nobody is ill as 0, the same as a category that it does not know.
#
# Packages: prob-target-encoder 0.1.2, pandas 2.3.3, numpy 2.4.6.
# Behaviour: the encoding is the difference of the category's mean from the mean of all, times the share of its people above
#   the mean of all. Below the mean the share falls as the difference grows, so that the encoding falls and rises again: it is
#   0 at the mean of all and 0 where nobody is ill, and the lowest in between. Two very different regions have the
#   same value. A comment in the source promises "a small default for categories with no values above the
#   global mean", which is used for categories without people alone.
# Expected: an encoding that grows with the mean of the target, and 0 for unknown categories alone, "fallback".
# Instead: sklearn.preprocessing.TargetEncoder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'prob-target-encoder==0.1.2' \
  'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
mean of all: 25.7%
A: 0 % ill, encoded as 0.0000
B: 5 % ill, encoded as -0.0083
C: 10 % ill, encoded as -0.0107
D: 20 % ill, encoded as -0.0062
E: 30 % ill, encoded as 0.0061
F: 40 % ill, encoded as 0.0252
G: 75 % ill, encoded as 0.1857
unknown: encoded as 0.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from prob_target_encoder import ProbTargetEncoder

shares = {'A': 0, 'B': 5, 'C': 10, 'D': 20, 'E': 30, 'F': 40, 'G': 75}
column = [region for region in shares for _ in range(100)]
ill = [int(person < count) for count in shares.values() for person in range(100)]
encoder = ProbTargetEncoder()
encoder.fit(column, ill)
print(f'mean of all: {sum(ill) / len(ill):.1%}')
for region, value in zip([*shares, 'unknown'], encoder.transform([*shares, 'unknown'])):
    print(f'{region}: {f"{shares[region]} % ill, " if region in shares else ""}encoded as {value + 0.0:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
