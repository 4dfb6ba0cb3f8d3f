#!/usr/bin/env bash
# The calibration bias of fair-scoring, weighted by scores, depends on where the scale of the
# scores begins.
#
# Packages: fair-scoring 0.2.1, scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6.
# Behaviour: with weighting='scores' the weight of a bin is its width, less the mean score of the
#   first bin for the first one. From 300 points on the first weight is negative, and so is the sum
#   of the weights from some scale on: the mean is no mean any more, and a bias that is positive by
#   definition becomes negative.
# Expected: the integral over the scores that is documented. It does not change where the same
#   number of points is added to all scores.
# Why it matters here: credit scores begin at 300, and the documented example uses scores as they
#   are.
# Instead: score_transform='rescale', or weighting='quantiles'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.9.1' 'scipy==1.17.1' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'fair-scoring==0.2.1'
cat > expected.txt <<'EXPECTED'
mean difference of the rates of two groups over the bins, by hand: 0.087
scores from 0 to 550: by scores 0.087, by quantiles 0.087
scores from 300 to 850: by scores 0.176, by quantiles 0.087
scores from 1000 to 1550: by scores -0.072, by quantiles 0.087
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from fairscoring.metrics import CalibrationMetric

random = np.random.default_rng(0)
group = random.choice(['a', 'b'], 20000)
points = random.uniform(0, 550, 20000)
chance = np.clip(points / 550 - np.where(group == 'b', 0.1, 0.0), 0, 1)
paid = (random.random(20000) < chance).astype(int)
bins = np.linspace(points.min(), points.max(), 51)
place = np.searchsorted(bins[1:-1], points)
rates = [[paid[(place == number) & (group == name)].mean() for number in range(50)] for name in 'ab']
print(f'mean difference of the rates of two groups over the bins, by hand: {np.abs(np.subtract(*rates)).mean():.3f}')
for start in (0, 300, 1000):
    seen = {}
    for weighting in ('scores', 'quantiles'):
        seen[weighting] = CalibrationMetric(weighting=weighting)(points + start, paid, group, ['a', 'b'], 1)
    print(f'scores from {start} to {start + 550}: by scores {seen["scores"]:.3f}, by quantiles {seen["quantiles"]:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
