#!/usr/bin/env bash
# The accident-year split of insurance-cv tests on claims that have not developed.
#
# Packages: insurance-cv 0.3.0, pandas 2.3.3, polars 1.33.1, scikit-learn 1.7.2, numpy 2.3.3.
# Behaviour: accident_year_split takes a year into the test where the median of its months of
#   development is large enough, and then all of its rows. Nearly half of the test can have less
#   development than was asked for; their claims are only partly known.
# Expected: "Rows where this is below min_development_months are excluded from test sets."
# Why it matters here: in the last year the known part of a claim is small, and a model that
#   predicts the final claims looks too high there.
# Instead: remove the rows with too little development from the test indices.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pandas==2.3.3' 'numpy==2.3.3' 'polars==1.33.1' 'scikit-learn==1.7.2' 'insurance-cv==0.3.0'
cat > expected.txt <<'EXPECTED'
fold-01 AY2021-2021 -> AY2022 (min dev: 12m): 365 claims in the test, 0 with less, the least 30, known of 1000: 1000, without them 1000
fold-02 AY2021-2022 -> AY2023 (min dev: 12m): 365 claims in the test, 0 with less, the least 18, known of 1000: 937, without them 937
fold-03 AY2021-2023 -> AY2024 (min dev: 12m): 366 claims in the test, 169 with less, the least 6, known of 1000: 498, without them 615
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from insurance_cv import InsuranceCV
from insurance_cv.splits import accident_year_split

days = pd.date_range('2021-01-01', '2024-12-31', freq='D')
valuation = pd.Timestamp('2025-07-15')
claims = pd.DataFrame({'day': days, 'months': (valuation - days).days // 30.4})
claims['final'] = 1000.0
claims['known'] = claims['final'] * np.minimum(claims['months'] / 24, 1)
for split in accident_year_split(claims, 'day', 'months', min_development_months=12):
    part = claims.iloc[split.get_indices(claims)[1]]
    few = part['months'] < 12
    print(f"{split.label}: {len(part)} claims in the test, {few.sum()} with less, the least {part['months'].min():.0f}, "
          f"known of 1000: {part['known'].mean():.0f}, without them {part['known'][~few].mean():.0f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
