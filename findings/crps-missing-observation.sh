#!/usr/bin/env bash
# The package CRPS gives a missing observation a score, the one of an observation at the lowest
# member of the ensemble, as soon as the missing value comes from an array.
#
# Packages: CRPS 2.0.4, numpy 2.4.6.
# Behaviour: compute returns NaN where the observation "is" np.nan, by identity and not by value. A
#   missing value that was read from a file or an array is another object; no comparison with it is
#   true, and the branch that is left counts it as lower than each member.
# Expected: NaN for each missing observation, as for the constant np.nan and for a missing member.
# Why it matters here: a column of observations with gaps is an array, so each gap has a score, and
#   the mean of all days is a plausible number.
# Instead: leave out the days without an observation first, with numpy.isnan.
# Source: Hersbach, Decomposition of the Continuous Ranked Probability Score for Ensemble
#   Prediction Systems, Weather and Forecasting 2000.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'CRPS==2.0.4' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
np.nan: nan, by definition nan
np.nan from an array: 1.171, by definition nan
the lowest member, 1.2: 1.171, by definition 1.171
three days, the second without an observation: 0.511 1.171 0.591 mean 0.758
mean of the two days with one, by definition: 0.551
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import CRPS.CRPS as pscore

members = np.array([2.1, 3.5, 4.7, 1.2, 1.3, 5.2, 5.3, 4.2, 3.1, 1.7])
observed = np.array([3.0, np.nan, 4.0])


def energy(value):
    """Return the score by its definition with mean distances."""
    return np.abs(members - value).mean() - np.abs(members[:, None] - members).mean() / 2


for label, value in (('np.nan', np.nan), ('np.nan from an array', observed[1]), ('the lowest member, 1.2', 1.2)):
    print(f'{label}: {pscore(members, value).compute()[0]:.3f}, by definition {energy(value):.3f}')
seen = [pscore(members, value).compute()[0] for value in observed]
print('three days, the second without an observation:', ' '.join(f'{score:.3f}' for score in seen), f'mean {np.nanmean(seen):.3f}')
print(f'mean of the two days with one, by definition: {np.nanmean([energy(value) for value in observed]):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
