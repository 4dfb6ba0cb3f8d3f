#!/usr/bin/env bash
# The class probabilities of handy-nn are negative for all grades but the first and the last, and
# exchanged for these.
#
# Packages: handy-nn 0.0.6, torch 2.13.0, numpy 2.4.6.
# Behaviour: OrdinalRegressionLoss trains sigmoid(logit - threshold) as the probability to be above a
#   threshold, which falls from one threshold to the next. predict_probas puts 0 before these values and 1
#   behind them, as for probabilities to be below, and takes the differences. The first grade gets the
#   probability to be above it, the last grade the one to be below, and the others values below 0. They
#   add up to 1.
# Expected: 1 before and 0 behind, and the differences the other way round.
# Instead: the values below, or one minus the sigmoid in predict_probas.
# Source: McCullagh, Regression models for ordinal data, Journal of the Royal Statistical Society B 42
#   (1980).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'handy-nn==0.0.6'
cat > expected.txt <<'EXPECTED'
handy-nn: right grade has the highest probability for 0%
  people of grade 0: 4 %, -4 %, 0 %, 100 %
  people of grade 1: 96 %, -92 %, -4 %, 100 %
  people of grade 2: 100 %, -4 %, -92 %, 96 %
  people of grade 3: 100 %, 0 %, -4 %, 4 %
by hand: right grade has the highest probability for 100%
  people of grade 0: 96 %, 4 %, 0 %, 0 %
  people of grade 1: 4 %, 92 %, 4 %, 0 %
  people of grade 2: 0 %, 4 %, 92 %, 4 %
  people of grade 3: 0 %, 0 %, 4 %, 96 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from handy_nn import OrdinalRegressionLoss

torch.manual_seed(0)
torch.set_num_threads(1)
severity = torch.linspace(0, 10, 1000)[:, None]
grade = (severity[:, 0] / 2.5).long().clamp(max=3)
model, loss = torch.nn.Linear(1, 1), OrdinalRegressionLoss(4)
optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)
for _ in range(3000):
    optimizer.zero_grad()
    loss(model(severity), grade).backward()
    optimizer.step()
with torch.no_grad():
    found = loss.predict_probas(model(severity))
    above = torch.sigmoid(model(severity) - loss.thresholds)
    ends = torch.ones(1000, 1)
    right = torch.cat([ends, above], dim=1) - torch.cat([above, 0 * ends], dim=1)
for name, values in (('handy-nn', found), ('by hand', right)):
    print(f'{name}: right grade has the highest probability for {(values.argmax(dim=1) == grade).float().mean():.0%}')
    for k in range(4):
        mean = values[grade == k].mean(dim=0)
        print(f'  people of grade {k}:', ', '.join(f'{round(100 * value)} %' for value in mean.tolist()))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
