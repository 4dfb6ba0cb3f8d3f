#!/usr/bin/env bash
# prob-target-encoder encodes each category as 0 where the categories are numbers.
#
# Packages: prob-target-encoder 0.1.2, pandas 2.3.3, numpy 2.4.6.
# Behaviour: fit keeps the categories as texts, and "Unknown" for a missing one. transform looks up the values themselves: the
#   number 10115 is not the text "10115" and a missing value not "Unknown", so each is taken for a category that was
#   never seen and encoded as 0, without a message. fit also counts the targets above the mean under the number and
#   reads them under the text, so that they are 0 for the texts of the numbers too.
# Expected: the same encodings for numbers as for their texts; "Supports missing values".
# Instead: column.astype(object).where(column.notna(), "Unknown").astype(str) for both calls.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'prob-target-encoder==0.1.2' \
  'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
texts: 8 of 10 ill 0.143, 2 of 10 ill -0.036
whole numbers: 8 of 10 ill 0.000, 2 of 10 ill 0.000
first one missing: 8 of 10 ill 0.000, 2 of 10 ill -0.036
first one "Unknown": 8 of 10 ill 0.143, 2 of 10 ill -0.036
fitted to numbers, asked for their texts: ['0.000', '-0.000']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from prob_target_encoder import ProbTargetEncoder

ill = pd.Series([1] * 8 + [0] * 2 + [1] * 2 + [0] * 8)
areas = {
    'texts': pd.Series(['10115'] * 10 + ['80331'] * 10),
    'whole numbers': pd.Series([10115] * 10 + [80331] * 10),
    'first one missing': pd.Series([None] * 10 + ['80331'] * 10, dtype=object),
    'first one "Unknown"': pd.Series(['Unknown'] * 10 + ['80331'] * 10),
}
for name, column in areas.items():
    encoded = ProbTargetEncoder().fit_transform(column, ill)
    print(f'{name}: 8 of 10 ill {encoded[0]:.3f}, 2 of 10 ill {encoded[-1]:.3f}')
encoder = ProbTargetEncoder()
encoder.fit(areas['whole numbers'], ill)
print('fitted to numbers, asked for their texts:', [f'{value:.3f}' for value in encoder.transform(['10115', '80331'])])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
