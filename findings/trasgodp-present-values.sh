#!/usr/bin/env bash
# The randomized response of trasgodp answers only with values that occur in the column, so ε bounds
# nothing.
#
# Packages: trasgodp 2.1.0, numpy 2.0.2, pandas 2.3.3.
# Behaviour: with k answers, each person tells the truth or draws one of the k. trasgodp takes the k
#   from the column itself. Where one of 100 patients has kuru, kuru is among the answers of all
#   others; where the same patient has gout, kuru is never an answer. A single report of kuru thus
#   shows that the patient is in the table, with certainty, and k changes the probabilities of
#   everybody. The local model also asks each person alone, who does not know the others' values.
# Expected: a list of answers that does not depend on the data, as an argument; each report is then
#   at most exp(ε) times as likely for one value as for another.
# Instead: append one row of each possible answer, and remove these rows afterwards; or opendp's
#   randomized response with its categories.
# Source: Kairouz, Bonawitz and Ramage, Discrete distribution estimation under local privacy (2016).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.0.2' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'trasgodp==2.1.0'
cat > expected.txt <<'EXPECTED'
one of 100 has kuru, ε = 0.1, 20000 reports: {'asthma': 6759, 'flu': 6744, 'gout': 0, 'kuru': 6497}
one of 100 has gout, ε = 0.1, 20000 reports: {'asthma': 6716, 'flu': 6868, 'gout': 6416, 'kuru': 0}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from trasgodp.categorical import dp_randomized_response_kary_array

np.random.seed(0)
for rare in ('kuru', 'gout'):
    patients = np.array(['asthma'] * 50 + ['flu'] * 49 + [rare])
    reports = np.concatenate([dp_randomized_response_kary_array(patients, 0.1) for _ in range(200)])
    counts = {str(value): int((reports == value).sum()) for value in ('asthma', 'flu', 'gout', 'kuru')}
    print(f'one of 100 has {rare}, ε = 0.1, 20000 reports: {counts}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
