#!/usr/bin/env bash
# The disentanglement error leaves out whether the epistemic uncertainty is right: it is the same for a model whose
# epistemic uncertainty falls with more data and for one where it rises.
#
# Packages: disentanglement-error 0.1.6, torch 2.13.0, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1, pandas 3.1.1.
# Behaviour: the error is documented as the mean of |rho(ua, Ua) - 1|, |rho(ue, Ue) - 1|, |rho(ua, Ue)| and |rho(ue, Ua)|.
#   The code has |rho(ua, Ua) - 1| twice, and computes rho(ue, Ue) for the correlations beside it only. A model with
#   a correlation of -1 has the error of one with 1, and the weight for that term weighs the aleatoric one.
# Expected: 0.5 more for the model that is wrong about it, a fourth of the distance between -1 and 1.
# Why it matters here: the number ranks methods of uncertainty.
# Instead: the formula from the correlations, which are returned.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'disentanglement-error==0.1.6' 'torch==2.13.0' 'numpy==2.4.6' 'scipy==1.17.1' 'scikit-learn==1.9.1' 'pandas==3.1.1'
cat > expected.txt <<'EXPECTED'
epistemic uncertainty rises with fewer people: correlation with its truth 1.0; error 0.36, by the documented formula 0.3
epistemic uncertainty falls with fewer people: correlation with its truth -1.0; error 0.36, by the documented formula 0.8
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from disentanglement_error.disentangling_model import DisentanglingModel
from disentanglement_error.error_metric import calculate_disentanglement_error


class Means(DisentanglingModel):
    """Predict by the nearest mean; epistemic uncertainty by the number of people."""

    def __init__(self, sign):
        self.sign, self.random = sign, np.random.default_rng(1)

    def fit(self, x_train, y_train):
        self.people = len(y_train)
        self.means = np.array([x_train[y_train == label].mean(axis=0) for label in (0, 1)])
        self.errors = np.mean(self.choose(x_train) != y_train)

    def choose(self, x):
        return np.linalg.norm(x[:, None] - self.means, axis=2).argmin(axis=1)

    def predict_disentangling(self, x_test):
        epistemic = self.sign / np.sqrt(self.people) + self.random.normal(0, 1e-4)
        return self.choose(x_test), np.full(len(x_test), self.errors), np.full(len(x_test), epistemic)


random = np.random.default_rng(0)
labels = np.repeat([0, 1], 400)
people = random.normal(0, 1, (800, 30)) + 0.35 * labels[:, None]
for name, sign in (('rises with fewer people', 1), ('falls with fewer people', -1)):
    np.random.seed(0)
    error, found, *_ = calculate_disentanglement_error(people[::2], labels[::2], Means(sign), people[1::2], labels[1::2],
                                                       kw_config={'n_runs': 3})
    right = (abs(found['ua_Ua_corr'] - 1) + abs(found['ue_Ue_corr'] - 1) + abs(found['ua_Ue_corr'])
             + abs(found['ue_Ua_corr'])) / 4
    print(f'epistemic uncertainty {name}: correlation with its truth {found["ue_Ue_corr"]:.1f}; error {error:.2f}, by the '
          f'documented formula {right:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
