#!/usr/bin/env bash
# pobm counts a saturation of 90 % as below 90 %: somebody who never falls below it spends the whole night there.
#
# Packages: pobm 1.2.0, numpy 1.26.4.
# Behaviour: CT, "percentage of the time spent below the xx% oxygen saturation level", with 90 % by default, counts the
#   samples that are at most 90. Oximeters give whole per cents, so this is the time below 91 %. CA beside it, the area
#   below the same kind of line, does not contain these samples.
# Expected: the samples that are less than 90, as the words say and as the time below 90 %, T90, is defined.
# Why it matters here: 90 % of a saturation that is steady at 90 is the difference between no and the longest time below.
# Instead: CT_Threshold=89.5.
# Source: the docstring; T90 is the share of the night with a saturation of less than 90 %.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pobm==1.2.0'
cat > expected.txt <<'EXPECTED'
steady at 90: pobm 100 % of the time below 90, true 0 %; area 0.00
steady at 91: pobm 0 % of the time below 90, true 0 %; area 0.00
half at 90, half at 94: pobm 50 % of the time below 90, true 0 %; area 0.00
10 % at 89, 30 % at 90, else 95: pobm 40 % of the time below 90, true 10 %; area 0.10
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from pobm.obm.burden import HypoxicBurdenMeasures

nights = {
    'steady at 90': np.full(3600, 90), 'steady at 91': np.full(3600, 91),
    'half at 90, half at 94': np.repeat([90, 94], 1800), '10 % at 89, 30 % at 90, else 95': np.repeat([89, 90, 95], [360, 1080, 2160]),
}
none = np.array([], dtype=int)
for name, signal in nights.items():
    result = HypoxicBurdenMeasures(none, none, CT_Threshold=90, CA_Baseline=90).compute(signal)
    print(f'{name}: pobm {result.CT:.0f} % of the time below 90, true {100 * np.mean(signal < 90):.0f} %; area {result.CA:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
