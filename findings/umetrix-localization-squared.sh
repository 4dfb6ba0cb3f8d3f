#!/usr/bin/env bash
# The localization error of umetrix is a squared distance: objects that are found 1, 2, 4 and 8 pixels from
# their place have errors of 1, 4, 16 and 64, and a mean of 21.25 in place of 3.75.
#
# Packages: umetrix 0.2.0, numpy 2.2.6, scipy 1.15.3, scikit-image 0.25.2, scikit-learn 1.7.2,
#   pandas 2.3.3, matplotlib 3.10.7.
# Behaviour: per_object_localization_error is the sum of the squared differences of two centroids, without
#   a root. localization_error is its mean. The readme offers it for the MOTP of tracking, which is a mean
#   distance.
# Expected: distances in pixels. One object that is 8 pixels away counts for 64 that are one pixel away.
# Instead: numpy.sqrt of per_object_localization_error, then its mean.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'umetrix==0.2.0' 'numpy==2.2.6' 'scipy==1.15.3' \
  'scikit-image==0.25.2' 'scikit-learn==1.7.2' 'pandas==2.3.3' 'matplotlib==3.10.7'
cat > expected.txt <<'EXPECTED'
distances of the centroids: [1, 2, 4, 8] mean 3.75
localization errors: [1.0, 4.0, 16.0, 64.0] mean 21.25
their roots: [1.0, 2.0, 4.0, 8.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy
import umetrix

shifts = {1: (5, 5), 2: (5, 30), 4: (35, 5), 8: (35, 30)}
truth, found = numpy.zeros((2, 60, 60), int)
for shift, (row, column) in shifts.items():
    truth[row:row + 12, column:column + 12] = 1
    found[row:row + 12, column + shift:column + shift + 12] = 1
metrics = umetrix.calculate(truth, found)
errors = sorted(float(error) for error in metrics.per_object_localization_error)
print('distances of the centroids:', list(shifts), 'mean', sum(shifts) / 4)
print('localization errors:', errors, 'mean', float(metrics.results.localization_error))
print('their roots:', [error ** 0.5 for error in errors])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
