#!/usr/bin/env bash
# The temperature scaling of incerto stops a quarter or less of the way: for a model whose logits are five times
# too large it finds a temperature of 1.3, and for one whose logits are half the right ones 0.9.
#
# Packages: incerto 0.1.1, torch 2.13.0, numpy 2.4.6, scikit-learn 1.9.1, scipy 1.17.1.
# Behaviour: TemperatureScaling is "fit by minimizing NLL" with L-BFGS, whose rate is 0.01 by default: each of
#   its 50 iterations goes a hundredth of the way that it has computed, and the fit ends where they end. The
#   vector, matrix and Dirichlet scaling beside it have the same rate. No message says that it did not converge.
# Expected: the temperature with the smallest loss, one number.
# Why it matters here: scores are calibrated so that a 90 % means 90 %.
# Instead: fit(logits, labels, lr=1.0), which finds it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'incerto==0.1.1' 'torch==2.13.0' 'numpy==2.4.6' 'scikit-learn==1.9.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
logits times 0.5: best temperature 0.5; incerto 0.9, with lr=1 0.5; calibration error before 0.15, after 0.13, with the best 0.01
logits times 2: best temperature 2.0; incerto 1.2, with lr=1 2.0; calibration error before 0.17, after 0.14, with the best 0.01
logits times 5: best temperature 5.1; incerto 1.3, with lr=1 5.1; calibration error before 0.30, after 0.28, with the best 0.01
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from incerto.calibration import TemperatureScaling, ece_score
from scipy.optimize import minimize_scalar

random = torch.Generator().manual_seed(0)
logits = 1.5 * torch.randn(5000, 4, generator=random)
labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
for factor in (0.5, 2, 5):
    model = factor * logits
    best = minimize_scalar(lambda t: torch.nn.functional.cross_entropy(model / t, labels).item(),
                           bounds=(0.1, 20), method='bounded').x
    found = TemperatureScaling().fit(model, labels)
    other = TemperatureScaling().fit(model, labels, lr=1.0)
    print(f'logits times {factor}: best temperature {best:.1f}; incerto {found.temperature.item():.1f}, with '
          f'lr=1 {other.temperature.item():.1f}; calibration error before {ece_score(model, labels):.2f}, '
          f'after {ece_score(found(model), labels):.2f}, with the best {ece_score(model / best, labels):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
