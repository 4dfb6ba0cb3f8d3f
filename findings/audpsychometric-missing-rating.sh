#!/usr/bin/env bash
# audpsychometric drops the doctor who has not seen a patient, where it says that it drops the
# patient, and gives the agreement of each doctor to the one before.
#
# Packages: audpsychometric 0.1.1, numpy 2.0.2, pandas 2.3.3, pingouin 0.5.5.
# Behaviour: rater_agreement removes "stimuli (rows), which miss ratings for one rater or more", by its
#   comment, and removes columns, which are raters. Of four doctors, of whom the first has not rated
#   one of 30 patients, it returns three agreements: the first place holds the second doctor, who
#   answers by chance, and the agreement of the others is computed without the best one.
# Expected: four agreements, from the 29 patients whom all have rated.
# Instead: drop the rows first, ratings[~numpy.isnan(ratings).any(axis=1)].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.0.2' 'pandas==2.3.3' 'audpsychometric==0.1.1' 'pingouin==0.5.5'
cat > expected.txt <<'EXPECTED'
four doctors, all patients: [ 0.83 -0.09  0.83  0.58]
the first one has not seen one patient: [-0.11  0.59  0.4 ]
without this patient, as documented: [ 0.82 -0.13  0.82  0.54]
nor the third one another: [-0.15 -0.15]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import audpsychometric
import numpy as np

random = np.random.default_rng(0)
truth = random.integers(1, 6, 30).astype(float)
ratings = np.column_stack([truth, random.integers(1, 6, 30), truth, truth + random.normal(0, 1.5, 30)])
print('four doctors, all patients:', np.round(audpsychometric.rater_agreement(ratings), 2))
ratings[7, 0] = np.nan
seen = audpsychometric.rater_agreement(ratings)
complete = ratings[~np.isnan(ratings).any(axis=1)]
print('the first one has not seen one patient:', np.round(seen, 2))
print('without this patient, as documented:', np.round(audpsychometric.rater_agreement(complete), 2))
ratings[3, 2] = np.nan
print('nor the third one another:', np.round(audpsychometric.rater_agreement(ratings), 2))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
