#!/usr/bin/env bash
# meliora's t-test of losses ignores the level that it documents.
#
# Packages: meliora 0.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: lgd_t_test documents level as 'portfolio' (single comparison) or 'segment' (multiple
#   comparisons). The code asks for 'pool', and takes every other text for the portfolio, without a
#   message. A segment with losses that are too low then hides one with losses that are too high.
# Expected: one row for each segment, or an error.
# Instead: level='pool'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'meliora==0.1.2'
cat > expected.txt <<'EXPECTED'
level=portfolio: None, 100 loans, error +0.005, p-value 0.34
level=segment: None, 100 loans, error +0.005, p-value 0.34
level=pool: cars, 50 loans, error +0.110, p-value 0; houses, 50 loans, error -0.100, p-value 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from meliora.core import lgd_t_test

spread = np.linspace(-0.1, 0.1, 50)
table = pd.DataFrame({'segment': ['cars'] * 50 + ['houses'] * 50, 'predicted': 0.4,
                      'realised': np.concatenate([0.51 + spread, 0.30 + spread])})
for level in ('portfolio', 'segment', 'pool'):
    result = lgd_t_test(table, 'realised', 'predicted', level=level, segment_col='segment')
    rows = [f'{row.segment}, {row.N} loans, error {row.mean_error:+.3f}, p-value {row.p_value:.2g}'
            for row in result.itertuples()]
    print(f'level={level}:', '; '.join(rows))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
