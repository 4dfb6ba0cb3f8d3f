#!/usr/bin/env bash
# The Gaussian noise of PyImbalReg makes its new people from the columns of different people.
#
# Packages: PyImbalReg 0.0.3, scipy 1.17.1, pandas 2.3.3, numpy 2.4.6.
# Behaviour: GaussianNoise draws values with numpy.random.choice for each column by itself, the target as
#   one of them, and adds noise to them. In the rows that are added no column depends on another one: a
#   model that is trained on them learns that nothing explains a rare outcome.
# Expected: "add gaussian noise to the rare samples": a copy of a rare person with noise, as in the paper
#   that it cites.
# Instead: rows.sample(n, replace=True) plus noise.
# Source: Branco, Torgo and Ribeiro, Pre-processing approaches for imbalanced distributions in regression,
#   Neurocomputing 343, 2019, section 4.3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'PyImbalReg==0.0.3' 'scipy==1.17.1' \
  'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
rare people: height and weight 0.90, weight and dose 0.97
added by PyImbalReg: height and weight 0.00, weight and dose 0.02
copies with the same noise: height and weight 0.90, weight and dose 0.97
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import pandas as pd
from PyImbalReg import GaussianNoise

random = np.random.default_rng(0)
np.random.seed(0)
height = random.normal(170, 10, 5000)
people = pd.DataFrame({'height': height, 'weight': height - 100 + random.normal(0, 2, 5000)})
people['dose'] = 2 * people.weight + random.normal(0, 2, 5000)
sampler = GaussianNoise(df=people.copy(), y_col='dose', rel_func=lambda dose: float(dose > 165), threshold=0.5,
                        o_percentage=5, perm_amp=0.05, categorical_columns=[])
result = sampler.get()
added = result[[str(label).startswith('GN') for label in result.index]]
rare = people[people.dose > 165]
copies = rare.sample(len(added), replace=True, random_state=0)
copies = copies + random.normal(0, 1, copies.shape) * 0.05 * rare.std().to_numpy()
for name, rows in (('rare people', rare), ('added by PyImbalReg', added), ('copies with the same noise', copies)):
    print(f'{name}: height and weight {rows.height.corr(rows.weight):.2f}, weight and dose {rows.weight.corr(rows.dose):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
