#!/usr/bin/env bash
# meliora's cumulative LGD accuracy ratio does not depend on whose prediction is whose.
#
# Packages: meliora 0.1.2, numpy 2.2.6, pandas 2.3.3, scipy 1.15.3, scikit-learn 1.7.2.
# Behaviour: cumulative_lgd_accuracy_ratio is a measure of ranking ability. It sorts the loans by
#   their realised loss and counts how many of the first ones are really in the first band, which
#   they are by the sorting. The predictions are used for the sizes of the bands alone. The shares
#   of the bands are added without a weight, and from the third band on the wrong rows are looked
#   at, so the ratio of a perfect model is 2 for two bands and 2.7 for three.
# Expected: 1 for a perfect model of any number of bands, and less for a model that predicts at
#   random.
# Instead: Somers' D or Kendall's tau of the predicted and realised losses.
# Source: Ozdemir and Miu, Basel II Implementation, 2009.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'pandas==2.3.3' 'scipy==1.15.3' 'scikit-learn==1.7.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'meliora==0.1.2'
cat > expected.txt <<'EXPECTED'
2 bands, perfect: ratio 2.00, tau 1.00
2 bands, shuffled: ratio 2.00, tau -0.06
2 bands, inverted: ratio 2.00, tau -1.00
3 bands, perfect: ratio 2.66, tau 1.00
3 bands, shuffled: ratio 2.66, tau -0.04
3 bands, inverted: ratio 2.66, tau -1.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from meliora.core import cumulative_lgd_accuracy_ratio
from scipy.stats import kendalltau

for bands in (2, 3):
    realised = np.repeat(np.arange(bands), 100)
    shuffled = np.random.RandomState(0).permutation(realised)
    models = {'perfect': realised, 'shuffled': shuffled, 'inverted': bands - 1 - realised}
    for name, predicted in models.items():
        table = pd.DataFrame({'predicted': predicted, 'realised': realised})
        ratio = cumulative_lgd_accuracy_ratio(table, 'predicted', 'realised')
        print(f'{bands} bands, {name}: ratio {ratio:.2f}, tau {kendalltau(predicted, realised).statistic:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
