#!/usr/bin/env bash
# Where low values mean illness, roc-utils looks for every second cut-off in the curve of a test that is
# worse than chance: two objectives that are the same give -0.08 and infinity.
#
# Packages: roc-utils 0.2.2, numpy 1.24.4, scipy 1.9.3, pandas 1.5.3, matplotlib 3.7.5.
# Behaviour: with auto_flip=True compute_roc exchanges the two rates of an inverted predictor. It exchanges
#   them again after each objective in a list, for the point that it reports, so the second one is
#   computed from the curve that was not turned round. The curve that is returned then depends on
#   whether the number of objectives is odd.
# Expected: the cut-off that the objective has by itself; "cost" with a ratio of 1 is documented to be
#   Youden's index.
# Instead: one objective a call, or change the sign of the values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'roc-utils==0.2.2' 'numpy==1.24.4' 'scipy==1.9.3' \
  'pandas==1.5.3' 'matplotlib==3.7.5'
cat > expected.txt <<'EXPECTED'
objectives youden: AUC 0.92, of the returned curve 0.08; cut-offs youden -0.08 (index 0.69)
objectives cost: AUC 0.92, of the returned curve 0.08; cut-offs cost -0.08 (index 0.69)
objectives youden cost: AUC 0.92, of the returned curve 0.92; cut-offs youden -0.08 (index 0.69), cost inf (index 0.00)
objectives cost youden: AUC 0.92, of the returned curve 0.92; cut-offs cost -0.08 (index 0.69), youden inf (index 0.00)
objectives youden cost concordance: AUC 0.92, of the returned curve 0.08; cut-offs youden -0.08 (index 0.69), cost inf (index 0.00), concordance 0.00 (index 0.71)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from roc_utils import compute_roc
from scipy.stats import norm

spread = norm.ppf((numpy.arange(200) + 0.5) / 200)
values, ill = numpy.r_[spread + 1, spread - 1], numpy.arange(400) >= 200  # the ill are lower
for objectives in (['youden'], ['cost'], ['youden', 'cost'], ['cost', 'youden'], ['youden', 'cost', 'concordance']):
    roc = compute_roc(values, ill, objective=objectives, auto_flip=True)
    points = ', '.join(f'{name} {roc.opd[name].opt:.2f} (index {roc.opd[name].opo:.2f})' for name in objectives)
    area = numpy.trapz(x=roc.fpr, y=roc.tpr)
    print(f'objectives {" ".join(objectives)}: AUC {roc.auc:.2f}, of the returned curve {area:.2f}; cut-offs {points}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
