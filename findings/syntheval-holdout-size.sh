#!/usr/bin/env bash
# SynthEval finds a privacy loss of 0.4 in a table that depends on nobody, where the hold-out is
# small.
#
# Packages: syntheval 1.7.3, pandas 2.3.3, numpy 2.2.6, scikit-learn 1.9.1.
# Behaviour: priv_loss_eps is the share of real people who are nearer to a synthetic row than to
#   another real one, less the share of people of a hold-out. The number of the hold-out's people is
#   divided by the number of the real table's, not by its own. With a tenth of the people in the
#   hold-out the second share is a tenth of what it is.
# Expected: about 0 for all sizes of the hold-out, as for one that is as large as the real table.
# Why it matters here: hold-outs are smaller than training tables, so a harmless generator looks
#   like a leak, and two projects with other splits cannot be compared.
# Instead: cut the real table to the size of the hold-out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'syntheval==1.7.3' 'pandas==2.3.3' 'numpy==2.2.6' 'scikit-learn==1.9.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
hold-out of 1000 people: eps_identif_risk 0.49, priv_loss_eps -0.01
hold-out of 250 people: eps_identif_risk 0.49, priv_loss_eps 0.29
hold-out of 100 people: eps_identif_risk 0.49, priv_loss_eps 0.40
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging

import numpy as np
import pandas as pd
from syntheval import SynthEval

logging.disable(logging.CRITICAL)
random = np.random.default_rng(0)


def people(number):
    return pd.DataFrame({'age': random.normal(50, 15, number), 'weight': random.normal(75, 12, number),
                         'creatinine': random.normal(80, 20, number)})


real, made = people(1000), people(1000)  # independent: no row of made depends on a row of real
for number in (1000, 250, 100):
    judge = SynthEval(real.copy(), people(number), cat_cols=[], verbose=False, console='off', enable_plots=False)
    scores = judge.evaluate(made.copy(), eps_risk={}).set_index('metric')['val']
    print(f'hold-out of {number} people:', ', '.join(f'{key} {value:.2f}' for key, value in scores.items()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
