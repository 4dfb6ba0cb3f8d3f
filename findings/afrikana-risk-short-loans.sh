#!/usr/bin/env bash
# afrikana-risk provides for defaults after a loan has ended.
#
# Packages: afrikana-risk 1.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, scikit-learn 1.9.1.
# Behaviour: ECLEngine has the remaining months of each loan and uses them for the lifetime loss
#   only. The 12-month loss, the measure of performing loans (stage 1), runs over twelve months for
#   all: a loan of 10000 that ends in three months has a 12-month loss of 100 and a lifetime loss of
#   25. A customer with three times the probability of default moves to stage 2 and has a smaller
#   provision than before. IFRS 9 defines the 12-month loss as a part of the lifetime loss.
# Expected: min(12, remaining months), so that ecl_12m is at most ecl_lifetime.
# Instead: take the smaller of ecl_12m and ecl_lifetime for stage 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'scikit-learn==1.9.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'afrikana-risk==1.0.0'
cat > expected.txt <<'EXPECTED'
2%, 1 months left: stage 1, 12 months 100.0, lifetime 8.4, provision 100.0; 12 months by hand 8.4
2%, 3 months left: stage 1, 12 months 100.0, lifetime 25.2, provision 100.0; 12 months by hand 25.2
6%, 3 months left: stage 2, 12 months 300.0, lifetime 76.7, provision 76.7; 12 months by hand 76.7
2%, 12 months left: stage 1, 12 months 100.0, lifetime 100.0, provision 100.0; 12 months by hand 100.0
2%, 36 months left: stage 1, 12 months 100.0, lifetime 294.0, provision 100.0; 12 months by hand 100.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from afrikana_risk.risk.ecl import ECLEngine

loans = pd.DataFrame([(0.02, 1), (0.02, 3), (0.06, 3), (0.02, 12), (0.02, 36)], columns=['pd', 'remaining_months'])
loans['lgd'], loans['ead'] = 0.5, 10000.0
result = ECLEngine(eir=0.0).compute(loans)
for row in result.itertuples():
    by_hand = 0.5 * 10000 * (1 - (1 - row.pd) ** (min(12, row.remaining_months) / 12))
    print(f'{row.pd:.0%}, {row.remaining_months} months left: stage {row.ifrs9_stage}, 12 months {row.ecl_12m:.1f},',
          f'lifetime {row.ecl_lifetime:.1f}, provision {row.provision:.1f}; 12 months by hand {by_hand:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
