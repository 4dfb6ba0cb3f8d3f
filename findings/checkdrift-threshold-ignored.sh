#!/usr/bin/env bash
# The psi_threshold of checkdrift, "PSI threshold for drift alert", has no effect.
#
# Packages: checkdrift 1.0.0, numpy 2.4.6, scipy 1.17.1.
# Behaviour: check_drift and DriftMonitor take psi_threshold and ks_pvalue_threshold. The second one is
#   used. The severity compares the population stability index with the constants 0.1 and 0.2 of the class
#   in place of the first one, so that small windows, whose index is large by chance, cannot be given a
#   higher limit, and no lower one is possible.
# Expected: an alarm where the index is above psi_threshold.
# Instead: set PSI_ALARM and PSI_WARNING in a class of one's own, or compare the index of each result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'checkdrift==1.0.0'
cat > expected.txt <<'EXPECTED'
the same people: index 0.03, threshold 0.01: ok
the same people: index 0.03, threshold 0.2: ok
the same people: index 0.03, threshold 5: ok
the same people: index 0.03, threshold 1000: ok
six years older: index 0.41, threshold 0.01: alarm
six years older: index 0.41, threshold 0.2: alarm
six years older: index 0.41, threshold 5: alarm
six years older: index 0.41, threshold 1000: alarm
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import json
import logging
from pathlib import Path

import numpy as np
from checkdrift import DriftMonitor

logging.disable(logging.CRITICAL)
random = np.random.default_rng(0)
Path('baseline.json').write_text(json.dumps({'distributions': {'age': random.normal(50, 10, 1000).tolist()}}))
same, other = random.normal(50, 10, 200), random.normal(56, 10, 200)
for name, ages in (('the same people', same), ('six years older', other)):
    for threshold in (0.01, 0.2, 5, 1000):
        monitor = DriftMonitor('baseline.json', window_size=200, check_interval=200,
                               psi_threshold=threshold, ks_pvalue_threshold=0.0)
        for age in ages:
            monitor.push({'age': age})
        result = monitor.last_check_results.features['age']
        print(f'{name}: index {result.psi:.2f}, threshold {threshold}: {result.severity.value}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
