#!/usr/bin/env bash
# DiffPriv randomizes two answers of a list and leaves all others as they were, and adds the noise of
# a mean to the records themselves.
#
# Packages: DiffPriv 1.0.3, numpy 2.4.6.
# Behaviour: randresponse uses the answers, 0 and 1, as positions: only the first and the second answer
#   of the list are changed, which an answer of the person does not influence. lapmech writes a copy of
#   the table, each value with noise for the sensitivity of the function that it is given: the mean of
#   1000 values has a sensitivity of 0.01 at the least, and each person's age is published with a
#   noise of 0.02 at an ε of 1.
# Expected: randomized response of each person. The noise for a mean belongs to the mean; a published
#   value of a person needs noise for the range of that value.
# Why it matters here: the package is for "privatized data"; rounding restores every record of it.
# Instead: a library whose noise is tested, such as OpenDP. (The import asks an index for the newest
#   version; the script answers in its place.)
# Source: Warner (1965); Dwork and Roth, The algorithmic foundations of differential privacy, 3.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'DiffPriv==1.0.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
answers that changed in 50 runs over 1000 people, by place: [0, 1]
mean noise of an age: 0.020 years; ages that rounding restores: 100.0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io
import random
from urllib import request

request.urlopen = lambda url: io.BytesIO(b'{"info": {"version": "1.0.3"}}')

import numpy as np
from DiffPriv import diff

random.seed(0)
np.random.seed(0)
answers = [1, 0, 1, 1, 0, 1, 0, 0, 1, 1] * 100
given = list(answers)
changed = set()
for seed in range(50):
    np.random.seed(seed)
    given = list(answers)
    diff.randresponse(given)
    changed |= {place for place in range(1000) if given[place] != answers[place]}
print('answers that changed in 50 runs over 1000 people, by place:', sorted(changed))
ages = np.random.randint(18, 95, 1000)
table = io.StringIO('\n'.join(str(age) for age in ages))
diff.lapmech(table, 'private.csv', 1.0, np.mean).close()
with open('private.csv') as written:
    private = [float(line.split(',')[0]) for line in written if line.strip()]
print(f'mean noise of an age: {np.abs(private - ages).mean():.3f} years;',
      f'ages that rounding restores: {(np.round(private) == ages).mean():.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
