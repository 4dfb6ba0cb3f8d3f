#!/usr/bin/env bash
# sigmaeval leaves certain predictions out of the parts of a Brier score.
#
# Packages: sigmaeval 0.1.0, numpy 1.26.4.
# Behaviour: brier_score_components puts the probabilities into ten intervals, and 1.0 into an
#   eleventh that it does not visit. Reliability and resolution are divided by all predictions. A
#   classifier that gives 0 or 1, as decision trees and nearest neighbours do, loses half of its
#   error: reliability - resolution + uncertainty is 0.375 where the Brier score of the same package
#   is 0.5, and a perfect one has 0.125 in place of 0.
# Expected: the sum is the Brier score, as documented, since all values of an interval are equal
#   here.
# Instead: clip the probabilities to at most 1 - 1e-9.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'sigmaeval==0.1.0'
cat > expected.txt <<'EXPECTED'
wrong half of the time, says 1.0: reliability 0.125, resolution 0.000, uncertainty 0.250, sum 0.375; Brier score 0.500
wrong half of the time, says 0.999: reliability 0.249, resolution 0.000, uncertainty 0.250, sum 0.499; Brier score 0.499
perfect, says 1.0: reliability 0.000, resolution 0.125, uncertainty 0.250, sum 0.125; Brier score 0.000
perfect, says 0.999: reliability 0.000, resolution 0.250, uncertainty 0.250, sum 0.000; Brier score 0.000
always wrong, says 1.0: reliability 0.500, resolution 0.125, uncertainty 0.250, sum 0.625; Brier score 1.000
always wrong, says 0.999: reliability 0.998, resolution 0.250, uncertainty 0.250, sum 0.998; Brier score 0.998
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from sigmaeval.sigmaeval import brier_score_components, brier_score_multiclass

truth = np.array([0, 1] * 50)
cases = {'wrong half of the time': np.zeros(100, dtype=int), 'perfect': truth, 'always wrong': 1 - truth}
for name, chosen in cases.items():
    for certainty in (1.0, 0.999):
        table = np.full((100, 2), 1 - certainty)
        table[np.arange(100), chosen] = certainty
        reliability, resolution, uncertainty = brier_score_components(truth, table)
        print(f'{name}, says {certainty}: reliability {reliability:.3f}, resolution {resolution:.3f}, uncertainty',
              f'{uncertainty:.3f}, sum {reliability - resolution + uncertainty:.3f};',
              f'Brier score {brier_score_multiclass(truth, table):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
