#!/usr/bin/env bash
# The Lomb method of hrv-analysis gives a power that depends on the heart rate, not on the variation
# alone.
#
# Packages: hrv-analysis 1.0.6, astropy 8.0.2, nolds 0.6.1 (newer ones do not import in Python
#   3.11), pandas 3.1.1, scipy 1.17.1, numpy 2.4.6.
# Behaviour: lf, hf and total_power are described as variances. method='lomb' integrates a periodogram
#   that counts samples, not seconds, so that the power is the variance times half of the mean heart
#   rate in Hz: a swing of 40 ms at 0.1 Hz, whose variance is 800 ms², has 330 at 50 beats a minute and
#   800 at 120. The other method, Welch's, does not depend on the rate in this way.
# Expected: about 800 ms² for all, from both methods.
# Why it matters here: the power is a feature in ms², and by this method it is a second heart rate.
# Instead: method='welch', or the power of 'lomb' times twice the mean interval in seconds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'astropy==8.0.2' 'nolds==0.6.1' 'pandas==3.1.1' 'scipy==1.17.1' 'matplotlib==3.11.2' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'hrv-analysis==1.0.6'
cat > expected.txt <<'EXPECTED'
50 beats a minute: variance 799 ms²; low frequency welch 727, lomb 332 ; lomb times twice the interval 797
75 beats a minute: variance 799 ms²; low frequency welch 767, lomb 499 ; lomb times twice the interval 798
120 beats a minute: variance 799 ms²; low frequency welch 787, lomb 799 ; lomb times twice the interval 799
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from hrvanalysis import get_frequency_domain_features

for mean in (1200, 800, 500):
    beats, time = [], 0.0
    while time < 600:  # ten minutes; 0.1 Hz, 40 ms
        beats.append(mean + 40 * np.sin(2 * np.pi * 0.1 * time))
        time += beats[-1] / 1000
    powers = {
        method: get_frequency_domain_features(beats, method=method)['lf']
        for method in ('welch', 'lomb')
    }
    print(f'{60000 / mean:.0f} beats a minute: variance {np.var(beats):.0f} ms²; low frequency',
          ', '.join(f'{name} {power:.0f}' for name, power in powers.items()),
          f'; lomb times twice the interval {powers["lomb"] * 2 * mean / 1000:.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
