#!/usr/bin/env bash
# The bootstrap interval of pauc for an AUC of 0.18 goes from 0.74 to 0.89: it forgets the direction of the
# curve, and the partial area that it was asked for.
#
# Packages: pauc 0.2.2, numpy 2.4.6, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: ci_auc with method='bootstrap' makes a curve of each sample with direction='auto', which turns
#   a curve round whose cases have the lower median, and without partial_auc_focus and standardize_pauc.
#   A test that is worse than chance in the direction that was given is better than chance in each sample.
#   The bootstrap of var() keeps them.
# Expected: an interval of the area that ROC has computed.
# Why it matters here: a membership attack that does worse than chance must not look like a leak.
# Instead: ci_auc with method='delong', or the root of var(roc, method='bootstrap').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pauc==0.2.2' 'numpy==2.4.6' 'scipy==1.17.1' \
  'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
worse than chance: area 0.18, bootstrap interval 0.74 to 0.89; by its standard error 0.10 to 0.26
better than chance: area 0.78, bootstrap interval 0.68 to 0.86; by its standard error 0.69 to 0.87
partial area, standardised: area 0.60, bootstrap interval 0.03 to 0.10; by its standard error 0.50 to 0.70
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
from pauc import ROC, ci_auc, var

generator = numpy.random.default_rng(0)
ill = numpy.arange(100) >= 50
for name, shift, options in (('worse than chance', -1.2, {'direction': '<'}),
                             ('better than chance', 1.2, {'direction': '<'}),
                             ('partial area, standardised', 1.2, {'partial_auc': (0.8, 1.0), 'standardize_pauc': True})):
    score = generator.normal(size=100) + shift * ill
    roc = ROC(ill.astype(int), score, **options)
    numpy.random.seed(0)
    low, high = ci_auc(roc, method='bootstrap', n_boot=1000)
    spread = 1.96 * var(roc, method='bootstrap', n_boot=1000) ** 0.5
    print(f'{name}: area {roc.auc:.2f}, bootstrap interval {low:.2f} to {high:.2f}; by its standard error '
          f'{roc.auc - spread:.2f} to {roc.auc + spread:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
