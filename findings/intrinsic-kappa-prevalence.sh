#!/usr/bin/env bash
# The kappa of intrinsic-kappa, described as independent of the prevalence, is a linear function of it.
#
# Packages: intrinsic-kappa 0.1.2, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3.
# Behaviour: The package says that its kappa is "strictly independent of class prevalence (sample
#   composition)" and 0 for performance at the level of chance. It is (accuracy - 1/classes) / (1 -
#   1/classes). The accuracy is a mean of sensitivity and specificity that is weighted by the prevalence,
#   and so is the kappa. Whoever calls everybody healthy has 0.98 where 1 % are ill.
# Expected: one value for one sensitivity and specificity, and 0 for a test that does not look at the
#   patient, as with sensitivity + specificity - 1.
# Instead: that difference (Youden's index), or balanced_accuracy_score(adjusted=True) of scikit-learn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1' \
  'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps \
  'intrinsic-kappa==0.1.2'
cat > expected.txt <<'EXPECTED'
a test: sensitivity 90%, specificity 70%
  50% ill: intrinsic kappa 0.60, sensitivity + specificity - 1 0.60
  10% ill: intrinsic kappa 0.44, sensitivity + specificity - 1 0.60
  1% ill: intrinsic kappa 0.40, sensitivity + specificity - 1 0.60
everybody is called healthy: sensitivity 0%, specificity 100%
  50% ill: intrinsic kappa 0.00, sensitivity + specificity - 1 0.00
  10% ill: intrinsic kappa 0.80, sensitivity + specificity - 1 0.00
  1% ill: intrinsic kappa 0.98, sensitivity + specificity - 1 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from intrinsic_kappa import intrinsic_kappa_point_estimate


def show(name, sensitivity, specificity):
    print(f'{name}: sensitivity {sensitivity:.0%}, specificity {specificity:.0%}')
    for share in (0.5, 0.1, 0.01):
        ill, healthy = 100000 * share, 100000 * (1 - share)
        table = np.array([[sensitivity * ill, (1 - specificity) * healthy],
                          [(1 - sensitivity) * ill, specificity * healthy]])
        print(f'  {share:.0%} ill: intrinsic kappa {intrinsic_kappa_point_estimate(table):.2f}, '
              f'sensitivity + specificity - 1 {sensitivity + specificity - 1:.2f}')


show('a test', 0.9, 0.7)
show('everybody is called healthy', 0.0, 1.0)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
