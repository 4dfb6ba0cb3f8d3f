#!/usr/bin/env bash
# The mode of audpsychometric rounds marks to whole numbers, so that three doctors who give the same
# 1.5 have an agreement of 0.
#
# Packages: audpsychometric 0.1.1, numpy 2.0.2, pandas 2.3.3, pingouin 0.5.5.
# Behaviour: mode is documented to round the average of several winning categories. It rounds a single
#   winner as well: the mode of 1.5, 1.5 and 1.5 is 2. agreement_categorical counts the raters whose
#   mark equals the mode, and nobody's does. The same marks written as 1.5 or as 3 half points have
#   another agreement.
# Expected: a mode of 1.5 and an agreement of 1.
# Instead: multiply the marks so that they are whole numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.0.2' 'pandas==2.3.3' 'audpsychometric==0.1.1' 'pingouin==0.5.5'
cat > expected.txt <<'EXPECTED'
[1.5, 1.5, 1.5]: mode 2, agreement 0.00
[0.4, 0.4, 0.4]: mode 0, agreement 0.00
[2.5, 2.5, 3.0]: mode 3, agreement 0.33
[2, 2, 3]: mode 2, agreement 0.67
200 patients and three doctors, whole points: mean agreement 0.322
200 patients and three doctors, half points: mean agreement 0.253
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import audpsychometric
import numpy as np

for ratings in ([1.5, 1.5, 1.5], [0.4, 0.4, 0.4], [2.5, 2.5, 3.0], [2, 2, 3]):
    print(f'{ratings}: mode {audpsychometric.mode(ratings)},',
          f'agreement {audpsychometric.agreement_categorical(ratings):.2f}')
random = np.random.default_rng(0)
whole = random.integers(2, 11, (200, 3))
for name, marks in (('whole points', whole), ('half points', whole / 2)):
    print(f'200 patients and three doctors, {name}: mean agreement {np.mean(audpsychometric.agreement_categorical(marks)):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
