#!/usr/bin/env bash
# cgmpy counts a glucose of 70 or 180 mg/dL as in range for its time in range, and as low or high for
# its glycaemia risk index.
#
# Packages: cgmpy 0.6.0, pandas 3.1.1, numpy 2.4.6.
# Behaviour: tir takes both bounds into its range, and gri asks it for 54-70 and 180-250. The
#   international consensus puts 70 and 180 in range. Sensors report whole numbers, so these readings
#   are common; and the "TIR" that gri returns differs from tir's. The index reaches 300 on its scale
#   of 0 to 100.
# Expected: low is 54-69, high is 181-250, one time in range, and an index of at most 100.
# Instead: count the readings by hand: min(100, 3 * very low + 2.4 * low + 1.6 * very high + 0.8 *
#   high), each in percent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cgmpy==0.6.0' 'pandas==3.1.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
71 to 179: time in range 100 %, risk index 0 with TIR 100 %
70 to 180: time in range 100 %, risk index 80 with TIR 50 %
always 180: time in range 100 %, risk index 80 with TIR 0 %
always 50: time in range 0 %, risk index 300 with TIR 0 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from cgmpy.metrics.variability.risk import gri, tir

for name, values in (
    ('71 to 179', [71, 100, 140, 179] * 72),
    ('70 to 180', [70, 100, 140, 180] * 72),
    ('always 180', [180] * 288),
    ('always 50', [50] * 288),
):
    glucose = pd.Series(values, dtype=float)
    index = gri(glucose)
    print(
        f'{name}: time in range {tir(glucose):.0f} %,',
        f'risk index {index["GRI"]:.0f} with TIR {index["derived_metrics"]["TIR"]:.0f} %',
    )
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
