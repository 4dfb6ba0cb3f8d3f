#!/usr/bin/env bash
# datadriftx sees no drift in numbers whose mean is the same, and a high one where the mean is near zero.
#
# Packages: datadriftx 0.2.1, numpy 2.4.6, pandas 2.3.3, openpyxl 3.1.5, pyarrow 26.0.1.
# Behaviour: The method of a numeric column is called "mean_shift + psi". The status is computed from the
#   first of them: the difference of the means divided by the mean of the reference. The population
#   stability index is shown and not used, even where it is far above each limit. The quotient depends on
#   where the scale has its zero, and on nothing else but the means.
# Expected: a drift where the index is above 0.25, and one status for a temperature in both units.
# Instead: compare the index in the metrics of each result, or use scipy.stats.ks_2samp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' \
  'openpyxl==3.1.5' 'pyarrow==26.0.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'datadriftx==0.2.1'
cat > expected.txt <<'EXPECTED'
the same spread: mean 119.5 and 120.5, index 0.09, NO DRIFT
a spread of 40: mean 119.5 and 120.0, index 6.79, NO DRIFT
two groups at 100 and 140: mean 119.5 and 120.0, index 22.90, NO DRIFT
one degree warmer, Celsius: mean 1.4 and 2.4, index 0.02, HIGH
one degree warmer, kelvin: mean 274.6 and 275.6, index 0.02, NO DRIFT
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from datadriftx.detectors.numeric import NumericDriftDetector

random = np.random.default_rng(0)
pressure = random.normal(120, 10, 1000)
degrees = random.normal(1.5, 8, 1000)
two = np.repeat([100.0, 140.0], 500)
for name, before, after in (
    ('the same spread', pressure, 240 - pressure),
    ('a spread of 40', pressure, 120 + 4 * (pressure - pressure.mean())),
    ('two groups at 100 and 140', pressure, two),
    ('one degree warmer, Celsius', degrees, degrees + 1),
    ('one degree warmer, kelvin', degrees + 273.15, degrees + 274.15),
):
    result = NumericDriftDetector().detect('value', before.tolist(), after.tolist())
    print(f'{name}: mean {before.mean():.1f} and {after.mean():.1f}, index {result.metrics["psi"]:.2f}, {result.status}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
