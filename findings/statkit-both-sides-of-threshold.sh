#!/usr/bin/env bash
# statkit counts a patient whose score is the threshold as positive for the sensitivity and as negative
# for the specificity.
#
# Packages: statkit 1.1.0, scikit-learn 1.9.1, pandas 2.3.3, numpy 2.4.6, scipy 1.17.1.
# Behaviour: sensitivity compares a score with >= threshold, specificity with > threshold. A patient at
#   the threshold is right in both, whatever their disease: a score of 0.5 for everybody has a
#   sensitivity of 100 % and a specificity of 100 %. Scores of whole points, as in a clinic, have many
#   ties, and the threshold that youden_j_threshold returns is always the score of some patients.
# Expected: one decision for each patient, so both from one table of four counts.
# Instead: make the decisions first, sensitivity(disease, (score >= threshold).astype(int)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'statkit==1.1.0' 'scikit-learn==1.9.1' 'pandas==2.3.3' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
0.5 for everybody: Youden's index 1.00
11 scores, threshold 0.5, 20% of the patients at it
statkit: sensitivity 61%, specificity 80%
counted: sensitivity 61%, specificity 61%
statkit, of decisions: sensitivity 61%, specificity 61%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from statkit.metrics import sensitivity, specificity, youden_j, youden_j_threshold

half = np.repeat([0, 1], 50)
print(f"0.5 for everybody: Youden's index {youden_j(half, np.full(100, 0.5)):.2f}")
random = np.random.default_rng(0)
disease = (random.random(2000) < 0.3).astype(int)
points = np.clip(np.round(random.normal(4 + disease, 1.8)), 0, 10) / 10
threshold = youden_j_threshold(disease, points)
positive = points >= threshold
ill, well = disease == 1, disease == 0
print(f'11 scores, threshold {threshold:.1f}, {np.mean(points == threshold):.0%} of the patients at it')
print(f'statkit: sensitivity {sensitivity(disease, points, threshold):.0%},',
      f'specificity {specificity(disease, points, threshold):.0%}')
print(f'counted: sensitivity {positive[ill].mean():.0%}, specificity {(~positive)[well].mean():.0%}')
print(f'statkit, of decisions: sensitivity {sensitivity(disease, positive.astype(int)):.0%},',
      f'specificity {specificity(disease, positive.astype(int)):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
