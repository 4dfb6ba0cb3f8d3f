#!/usr/bin/env bash
# onlinerake takes a missing answer for a yes.
#
# Packages: onlinerake 1.0.0, numpy 2.2.6, pandas 2.3.3.
# Behaviour: partial_fit reads each answer as bool(value). A missing answer of pandas, NaN, is true and
#   counts as a yes, one that is None or not in the record counts as a no. Of 100 people who all say
#   no where they answer, and of whom half do not answer, 50 % have a car, and the weights are then
#   fitted to that: a target of 40 % is met though nobody said yes.
# Expected: an error for a missing answer, or one result for all kinds of it.
# Instead: fill missing answers in before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'onlinerake==1.0.0' 'numpy==2.2.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
no or NaN by turns: 50% have a car, weighted 41%
no or None by turns: 0% have a car, weighted 0%
no or not in the record by turns: 0% have a car, weighted 0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

import pandas as pd
from onlinerake import OnlineRakingSGD, Targets

for name, missing in (('NaN', math.nan), ('None', None), ('not in the record', 'left out')):
    raker = OnlineRakingSGD(Targets(owns_car=0.4))
    table = pd.DataFrame({'owns_car': [0, missing] * 50}, dtype=object)
    for answer in table['owns_car']:
        raker.partial_fit({} if isinstance(answer, str) else {'owns_car': answer})
    print(f'no or {name} by turns: {raker.raw_margins["owns_car"]:.0%} have a car, weighted {raker.margins["owns_car"]:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
