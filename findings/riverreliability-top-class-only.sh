#!/usr/bin/env bash
# The class-wise calibration error of riverreliability looks at the predicted class alone:
# exchanging the second and the third probability of everybody leaves it as it is.
#
# Packages: riverreliability 0.1.2, scikit-learn 1.1.3, scipy 1.10.1, numpy 1.23.5, pandas 1.5.3,
#   matplotlib 3.7.5.
# Behaviour: class_wise_error documents the class-wise error that Kull et al. proposed, which bins
#   all examples by the probability of a class. It takes the examples that are predicted as the
#   class, and gives each class the same weight however often it is predicted. That is the error of
#   the most probable class, per class, which the paper proposes it against.
# Expected: the mean over the classes of the binned difference between the frequency of the class
#   and its probability, over all examples.
# Why it matters here: a probability of 30 % for a second disease that should be 10 % is not seen.
# Instead: compute the error of each class against the rest.
# Source: Kull et al., Beyond Temperature Scaling, Obtaining Well-calibrated Multiclass
#   Probabilities with Dirichlet Calibration, NeurIPS 2019, equation 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'scikit-learn==1.1.3' 'scipy==1.10.1' 'numpy==1.23.5' 'pandas==1.5.3' 'matplotlib==3.7.5'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'riverreliability==0.1.2'
cat > expected.txt <<'EXPECTED'
the chances themselves: class_wise_error 0.021, by its definition 0.011
second and third exchanged: class_wise_error 0.021, by its definition 0.100
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from riverreliability.metrics import class_wise_error, ece

random = np.random.default_rng(0)
chances = random.dirichlet([1, 1, 1], 6000)
ill = np.array([random.choice(3, p=row) for row in chances])
order, rows = np.argsort(-chances, axis=1), np.arange(6000)
exchanged = chances.copy()
exchanged[rows, order[:, 1]], exchanged[rows, order[:, 2]] = chances[rows, order[:, 2]], chances[rows, order[:, 1]]


def right(probabilities, bins=10):
    """Return the class-wise error with bins of equal width over all examples."""
    errors = []
    for name in range(3):
        place = np.clip((probabilities[:, name] * bins).astype(int), 0, bins - 1)
        errors.append(sum(abs((ill == name)[place == number].mean() - probabilities[place == number, name].mean()) * (place == number).mean()
                          for number in range(bins) if (place == number).any()))
    return np.mean(errors)


for label, probabilities in (('the chances themselves', chances), ('second and third exchanged', exchanged)):
    seen = class_wise_error(probabilities, probabilities.argmax(axis=1), ill, ece, bins=10)
    print(f'{label}: class_wise_error {seen:.3f}, by its definition {right(probabilities):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
