#!/usr/bin/env bash
# The stratified folds of polars-splitters leave people out of every evaluation set.
#
# Packages: polars-splitters 0.4.5, polars 1.39.3, loguru 0.7.3.
# Behaviour: split_into_k_folds(k=..., stratify_by=...) gives each fold the rounded number of n / k people of each stratum.
#   Where it is rounded down, the last people of the stratum are in no evaluation set, and always in the
#   training data; where it is rounded up, the last folds have fewer, or nobody, of the stratum. The check at the end
#   compares the size of each fold with 1 / k of the table, with a tolerance of 0.1, and so passes.
# Expected: "Split a DataFrame into k non-overlapping folds": each person is in the evaluation set of exactly one of them,
#   as with StratifiedKFold.
# Instead: sklearn.model_selection.StratifiedKFold.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'polars-splitters==0.4.5' 'polars==1.39.3' \
  'loguru==0.7.3'
cat > expected.txt <<'EXPECTED'
20 wards of 10, 10 folds: 200 people, evaluated 200; of the last stratum by fold [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
20 wards of 14, 10 folds: 280 people, evaluated 200; of the last stratum by fold [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
20 wards of 16, 10 folds: 320 people, evaluated 320; of the last stratum by fold [2, 2, 2, 2, 2, 2, 2, 2, 0, 0]
86 healthy, 14 ill, 10 folds: 100 people, evaluated 96; of the last stratum by fold [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
985 healthy, 15 ill, 10 folds: 1000 people, evaluated 995; of the last stratum by fold [2, 2, 2, 2, 2, 2, 2, 1, 0, 0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import polars
from polars_splitters import split_into_k_folds


def describe(name, strata, k):
    table = polars.DataFrame({'person': range(len(strata)), 'stratum': strata})
    folds = [fold['eval'] for fold in split_into_k_folds(table, k=k, stratify_by='stratum')]
    seen = polars.concat(folds)
    print(f'{name}, {k} folds: {len(strata)} people, evaluated {seen.n_unique("person")};',
          f'of the last stratum by fold {[int((fold["stratum"] == strata[-1]).sum()) for fold in folds]}')


describe('20 wards of 10', [ward for ward in range(20) for _ in range(10)], 10)
describe('20 wards of 14', [ward for ward in range(20) for _ in range(14)], 10)
describe('20 wards of 16', [ward for ward in range(20) for _ in range(16)], 10)
describe('86 healthy, 14 ill', [0] * 86 + [1] * 14, 10)
describe('985 healthy, 15 ill', [0] * 985 + [1] * 15, 10)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
