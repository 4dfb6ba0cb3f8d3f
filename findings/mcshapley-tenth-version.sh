#!/usr/bin/env bash
# The temporal values of mcshapley sort versions as text, so that the tenth of ten models counts as older than
# the second, and gets the credit for what was there before it.
#
# Packages: mcshapley 0.0.2, numpy 2.4.6, scipy 1.17.1.
# Behaviour: read_temporal_file keeps each version as the text of the file, and toTempOrder makes texts of
#   numbers. get_vbs_shap_temp sorts these texts and temporal_marginal_contributions compares them: "10" comes
#   between "1" and "2". A model of version 10 then has the gain of the models 2 to 9, and they have nothing.
# Expected: "algorithms associated with lower values of time are assumed to have existed before those with
#   higher values of time", as its description says; with two digits for all, 01 to 10, it is so.
# Instead: versions with the same number of digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'mcshapley==0.0.2'
cat > expected.txt <<'EXPECTED'
model01, score 54: value 54, marginal contribution 54; with two digits 54 and 54; by hand 54
model02, score 58: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model03, score 62: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model04, score 66: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model05, score 70: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model06, score 74: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model07, score 78: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model08, score 82: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model09, score 86: value 0, marginal contribution 0; with two digits 4 and 4; by hand 4
model10, score 90: value 36, marginal contribution 36; with two digits 4 and 4; by hand 4
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pathlib

from mcshapley import shaps

VERSIONS = range(1, 11)
scores = {f'model{v:02}': 50 + 4 * v for v in VERSIONS}  # each version is better than the one before
pathlib.Path('scores.csv').write_text('algorithm,instance,performance\n' + ''.join(
    f'{name},scan,{score}\n' for name, score in scores.items()))
algorithms, instances, performance = shaps.read_file('scores.csv')
by_hand = {name: score - (50 + 4 * (int(name[-2:]) - 1) if name != 'model01' else 0) for name, score in scores.items()}
seen = {}
for digits in (1, 2):
    pathlib.Path('versions.csv').write_text('version,solver\n' + ''.join(
        f'{v:0{digits}},model{v:02}\n' for v in VERSIONS))
    order, by_solver = shaps.read_temporal_file('versions.csv', algorithms)
    seen[digits] = (shaps.get_vbs_shap_temp(algorithms, instances, performance, order),
                    shaps.temporal_marginal_contributions(algorithms, instances, performance, order, by_solver))
for name in scores:
    print(f'{name}, score {scores[name]}: value {seen[1][0][name]:.0f}, marginal contribution {seen[1][1][name]:.0f}; '
          f'with two digits {seen[2][0][name]:.0f} and {seen[2][1][name]:.0f}; by hand {by_hand[name]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
