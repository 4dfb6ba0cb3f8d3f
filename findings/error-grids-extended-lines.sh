#!/usr/bin/env bash
# error-grids puts high readings beyond the Parkes grid's zone A into zone A: it extends lines past their ends.
#
# Packages: error-grids 0.1.0, numpy 2.2.6.
# Behaviour: the border of a zone is a line of several pieces. The function asks whether a point is
#   beyond all pieces, each extended to both sides. Where the border bends back, the extension of one
#   piece lies beyond the next one: above 280 mg/dL a prediction that is too high has to be tens of
#   mg/dL further off to leave zone A, and above 385 one that is too low as well.
# Expected: the border between two points of the published list is the piece between them.
# Why it matters here: the share in zone A is the accuracy of a glucose sensor or forecast.
# Instead: numpy.interp of the published points, as below.
# Source: Pfützner et al., Technical Aspects of the Parkes Error Grid (2013), which it cites.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'error-grids==0.1.0'
cat > expected.txt <<'EXPECTED'
true 200, predicted 265 mg/dL: zone B; zone A is from 167 to 260: B
true 350, predicted 470 mg/dL: zone A; zone A is from 275 to 459: B
true 400, predicted 530 mg/dL: zone A; zone A is from 314 to 516: B
true 300, predicted 245 mg/dL: zone A; zone A is from 239 to 403: A
true 480, predicted 375 mg/dL: zone A; zone A is from 386 to 550: B
true 520, predicted 415 mg/dL: zone A; zone A is from 423 to 550: B
readings from 300 to 420: in zone A 75.1%, by the borders 70.1%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from error_grids import zone_accuracy

upper = [(30, 50), (140, 170), (280, 380), (430, 550)]  # type 1, between A and B
lower = [(50, 30), (170, 145), (385, 300), (550, 450)]
for true, predicted in ((200, 265), (350, 470), (400, 530), (300, 245), (480, 375), (520, 415)):
    seen = 'ABCDE'[int(np.argmax(zone_accuracy([true], [predicted], 'parkes', diabetes_type=1)))]
    high, low = (np.interp(true, *zip(*border)) for border in (upper, lower))
    print(f'true {true}, predicted {predicted} mg/dL: zone {seen}; zone A is from {low:.0f} to {high:.0f}:',
          'A' if low <= predicted <= high else 'B')
random = np.random.default_rng(0)
true = random.uniform(300, 420, 5000)
predicted = true * random.normal(1, 0.25, 5000)
inside = (predicted >= np.interp(true, *zip(*lower))) & (predicted <= np.interp(true, *zip(*upper)))
seen = zone_accuracy(true, predicted, 'parkes', diabetes_type=1)[0]
print(f'readings from 300 to 420: in zone A {seen:.1%}, by the borders {inside.mean():.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
