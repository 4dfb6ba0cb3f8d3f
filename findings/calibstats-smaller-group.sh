#!/usr/bin/env bash
# The test of calibstats for a difference in calibration finds that the smaller of two groups is
# calibrated worse, where both are calibrated perfectly.
#
# Packages: calibstats 0.1.0, scipy 1.15.3, numpy 2.2.6.
# Behaviour: the expected calibration error of a perfect model is not 0 but about the noise of its bins,
#   which is larger for fewer people. ece_difference_test resamples each group and counts how often the
#   difference has the other sign, so it tests this difference of noise. With 200 people against 20000
#   it always rejects, with a p-value of 0; with groups of one size it never does.
# Expected: a rejection in 5 % of the comparisons at a level of 0.05.
# Why it matters here: minorities are the smaller groups of a table, and a model that is trained with
#   privacy is audited for them.
# Instead: permute the groups, or compare the difference with the one of outcomes that are drawn from the
#   predictions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'scipy==1.15.3' 'calibstats==0.1.0'
cat > expected.txt <<'EXPECTED'
2000 and 2000 people with true risks: calibration errors of 0.028 and 0.026, a difference at 0.05 in 0 of 40
1000 and 4000 people with true risks: calibration errors of 0.039 and 0.019, a difference at 0.05 in 36 of 40
200 and 20000 people with true risks: calibration errors of 0.085 and 0.009, a difference at 0.05 in 40 of 40
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from calibstats import ece_difference_test

random = np.random.default_rng(0)


def perfect(people):
    risks = random.uniform(size=people)
    return risks, (random.uniform(size=people) < risks).astype(int)


for small, large in ((2000, 2000), (1000, 4000), (200, 20000)):
    tests = [ece_difference_test(*perfect(small), *perfect(large), n_boot=200) for _ in range(40)]
    rejected = sum(test.p_value < 0.05 for test in tests)
    errors = np.mean([(test.ece_a, test.ece_b) for test in tests], axis=0)
    print(f'{small} and {large} people with true risks: calibration errors of {errors[0]:.3f} and',
          f'{errors[1]:.3f}, a difference at 0.05 in {rejected} of {len(tests)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
