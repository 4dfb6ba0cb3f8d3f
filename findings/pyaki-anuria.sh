#!/usr/bin/env bash
# pyAKI fills hours without urine with urine of a later hour, so that a kidney that stopped is not seen.
#
# Packages: pyAKI 0.0.2, pandas 2.2.0, numpy 1.26.4 (pyAKI 1.0.13, for Python 3.12, has the same line).
# Behaviour: UrineOutputPreProcessor turns each hour whose sum is 0 mL into a missing one, whether nothing
#   was recorded or 0 mL were, and spreads the next volume over the gap. A patient of 80 kg whose hourly
#   chart says 0 mL for six hours and then 420 mL, after a blocked catheter was changed, has 60 mL in
#   each of these hours; one whose chart ends with 0 mL has missing hours at its end.
# Expected: a recorded 0 stays 0, as the stage 3 of anuria needs it; only hours without a record are
#   filled.
# Instead: interpolate the hours without a record yourself, and leave the preprocessor out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyAKI==0.0.2' 'pandas==2.2.0' 'numpy==1.26.4'
cat > expected.txt <<'EXPECTED'
recorded:     [70, 70, 0, 0, 0, 0, 0, 0, 420, 70]
preprocessed: [70, 70, 60, 60, 60, 60, 60, 60, 60, 70]
not recorded: [70, 70, 60, 60, 60, 60, 60, 60, 60, 70]
0 mL to the end: [70, 70, 70, None, None, None, None, None, None, None, None, None, None, None, None]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from pyAKI.preprocessors import UrineOutputPreProcessor
from pyAKI.utils import Dataset, DatasetType

def preprocess(volumes):
    times = pd.date_range('2024-01-01', periods=len(volumes), freq='h', name='charttime')
    table = pd.DataFrame({'stay_id': 1, 'urineoutput': [float(volume) for volume in volumes]}, index=times)
    table = table.dropna()
    done = UrineOutputPreProcessor().process([Dataset(DatasetType.URINEOUTPUT, table)])[0][1]
    return [None if pd.isna(value) else round(value) for value in done['urineoutput']]

nan = float('nan')
recorded = [70, 70, 0, 0, 0, 0, 0, 0, 420, 70]
print('recorded:    ', recorded)
print('preprocessed:', preprocess(recorded))
print('not recorded:', preprocess([70, 70, nan, nan, nan, nan, nan, nan, 420, 70]))
end = [70] * 3 + [0] * 12
print('0 mL to the end:', preprocess(end))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
