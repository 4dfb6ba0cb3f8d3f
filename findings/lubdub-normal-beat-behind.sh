#!/usr/bin/env bash
# lubdub takes the normal beat behind a wrong one for wrong too and changes it: one missed beat, 1600 among 800, is smoothed
# to 1200 and 1200, and the first interval of each series is lost.
#
# Packages: lubdub 0.0.2.6.1.
# Behaviour: normalize_rr compares each interval with the one before as it was, not as it was corrected, and so a normal one
#   behind a long one is "too short". The following value, which it documents for the mean, is the value itself: the index
#   lacks a 1. The loop starts with the second interval and does not write the first.
# Expected: "it is replaced by the average of the previous (n) and the following (n+2) value": 800 for the missed beat, and
#   the normal beats as they are.
# Why it matters here: this is what makes normal intervals out of raw ones. Each correction leaves two jumps of 400 ms in
#   the list, which the variability of the heart rate is computed from.
# Instead: compare with the median of the neighbours, and interpolate between accepted beats.
# Source: the docstring and the series that were put in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'lubdub==0.0.2.6.1'
cat > expected.txt <<'EXPECTED'
ten normal beats: [800, 800, 800, 800, 800, 800, 800, 800, 800, 800]
  dropped: 9 intervals left, 10 of them were normal
  smoothed: [800, 800, 800, 800, 800, 800, 800, 800, 800]
one missed beat: [800, 800, 800, 800, 800, 1600, 800, 800, 800, 800]
  dropped: 7 intervals left, 9 of them were normal
  smoothed: [800, 800, 800, 800, 1200, 1200, 800, 800, 800]
one extra beat: [800, 800, 800, 800, 800, 400, 800, 800, 800, 800]
  dropped: 7 intervals left, 9 of them were normal
  smoothed: [800, 800, 800, 800, 600, 600, 800, 800, 800]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lubdub.calc import normalize_rr

for name, beats in (('ten normal beats', [800] * 10), ('one missed beat', [800] * 5 + [1600] + [800] * 4),
                    ('one extra beat', [800] * 5 + [400, 800] + [800] * 3)):
    dropped = normalize_rr(beats, drop_values=True)
    smoothed = normalize_rr(beats, drop_values=False)
    print(f'{name}: {beats}')
    print(f'  dropped: {len(dropped)} intervals left, {sum(abs(beat - 800) < 1 for beat in beats)} of them were normal')
    print(f'  smoothed: {smoothed}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
