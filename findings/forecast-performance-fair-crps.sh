#!/usr/bin/env bash
# The fair CRPS of forecast-performance takes away a fraction of the bias that it says it removes: of two
# ensembles from the same perfect forecast, the one with 5 members is 14 % worse than the one with 50.
#
# Packages: forecast-performance 1.0.0, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib 3.11.2.
# Behaviour: the correction for the spread squares F (1 - F), which is 1/4 at most, where the formula has it
#   as it is: it is between a fourth and nothing of the right one. crps itself is right.
# Expected: CRPS - ∫ F (1 - F) dy / (m - 1) for m members, whose expectation is the same for each m.
# Why it matters here: the score is there to compare ensembles of different sizes.
# Instead: the formula with mean absolute differences below.
# Source: Ferro, Fair scores for ensemble forecasts, Q. J. R. Meteorol. Soc. 140, 2014.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'forecast-performance==1.0.0'
cat > expected.txt <<'EXPECTED'
2 members: CRPS 0.846 (by hand 0.846), fair CRPS 0.775 (by hand 0.563)
5 members: CRPS 0.676 (by hand 0.676), fair CRPS 0.654 (by hand 0.563)
10 members: CRPS 0.620 (by hand 0.620), fair CRPS 0.609 (by hand 0.563)
50 members: CRPS 0.576 (by hand 0.576), fair CRPS 0.574 (by hand 0.565)
limit of many members: 0.564
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from forecast_performance.metrics import crps, fair_crps

random = np.random.default_rng(0)
CASES = 40_000
truth = random.normal(0, 1, (CASES, 1))
for members in (2, 5, 10, 50):
    ensemble = np.sort(random.normal(0, 1, (CASES, members)), axis=1)
    levels = np.arange(1, members + 1) / members
    distance = np.abs(ensemble - truth).mean()
    # the mean absolute difference of two members, from sorted values
    pairs = 2 * (ensemble * (2 * np.arange(members) - members + 1)).sum(axis=1).mean()
    plain, right = distance - pairs / (2 * members ** 2), distance - pairs / (2 * members * (members - 1))
    print(f'{members} members: CRPS {crps(ensemble, levels, truth, "ensemble"):.3f} (by hand {plain:.3f}), '
          f'fair CRPS {fair_crps(ensemble, levels, truth, "ensemble"):.3f} (by hand {right:.3f})')
print(f'limit of many members: {1 / np.sqrt(np.pi):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
