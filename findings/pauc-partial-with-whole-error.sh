#!/usr/bin/env bash
# The default interval and test of pauc for a partial area have the standard error of the whole area: two
# models that differ by 4.7 standard errors at high specificity have a p-value of 0.51.
#
# Packages: pauc 0.2.2, numpy 2.4.6, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: ci_auc and compare take the partial area of a ROC and, with their default method 'delong', the
#   variance of its whole area. A partial area of at most 0.1 has a standard error below 0.01; the one
#   of the whole area is 0.02.
# Expected: an error, as in pROC, whose DeLong method is for whole areas, or the variance of the part.
# Instead: method='bootstrap' in compare.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pauc==0.2.2' 'numpy==2.4.6' 'scipy==1.17.1' \
  'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
model A: partial area 0.0202 with an interval of -0.0314 to 0.0719; standard errors: used 0.0264, of the whole area 0.0264, of the partial area by bootstrap 0.0039
model B: partial area 0.0455 with an interval of -0.0068 to 0.0978; standard errors: used 0.0267, of the whole area 0.0267, of the partial area by bootstrap 0.0034
comparison of the partial areas by delong: z -0.7, p-value 0.510
comparison of the partial areas by bootstrap: z -4.7, p-value 0.000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from pauc import ROC, ci_auc, compare, var

generator = numpy.random.default_rng(1)
ill = (numpy.arange(400) >= 200).astype(int)
scores = [generator.normal(size=400) + shift * ill for shift in (0.9, 4.0 * (generator.random(400) < 0.4))]
part = [ROC(ill, score, direction='<', partial_auc=(0.9, 1.0)) for score in scores]
whole = [ROC(ill, score, direction='<') for score in scores]
numpy.random.seed(0)
for name, partial, complete in zip('AB', part, whole):
    low, high = ci_auc(partial)
    print(f'model {name}: partial area {partial.auc:.4f} with an interval of {low:.4f} to {high:.4f}; standard errors: '
          f'used {(high - low) / 3.92:.4f}, of the whole area {var(complete)**0.5:.4f}, of the partial area by '
          f'bootstrap {var(partial, method="bootstrap", n_boot=500)**0.5:.4f}')
numpy.random.seed(0)
for method in ('delong', 'bootstrap'):
    result = compare(*part, method=method, n_boot=500)
    print(f'comparison of the partial areas by {method}: z {result.stat:.1f}, p-value {result.p_value:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
