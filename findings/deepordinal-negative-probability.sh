#!/usr/bin/env bash
# The probabilities of deepordinal for a rare grade become negative in training.
#
# Packages: deepordinal 0.2.1.post1, torch 2.13.0, numpy 2.4.6.
# Behaviour: OrdinalOutput documents class probabilities "via learned, sorted thresholds". The thresholds
#   are sorted where they are first drawn and are free afterwards. The immediate-threshold loss of the
#   package pushes the lower threshold up for each example of the grade below it and the upper one down
#   for each one of the grade above, so that they cross where the grade between them is rare. The
#   probability of that grade, a difference of two sigmoids, is then below 0 and the others add up to more
#   than 1.
# Expected: probabilities between 0 and 1.
# Instead: learn the first threshold and the logarithms of the differences, or use construction='all',
#   whose thresholds stay in order here.
# Source: Rennie and Srebro, Loss functions for preference levels, IJCAI 2005: thresholds in increasing
#   order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps \
  'deepordinal==0.2.1.post1'
cat > expected.txt <<'EXPECTED'
people with the grades 0, 1, 2: [482, 19, 499]
all, logistic: thresholds in order; people of grade 1 have 31 %, 25 %, 44 %
all, hinge: thresholds in order; people of grade 1 have 39 %, 11 %, 51 %
immediate, logistic: thresholds crossed; people of grade 1 have 47 %, -5 %, 58 %
immediate, hinge: thresholds crossed; people of grade 1 have 63 %, -30 %, 67 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from deepordinal.torch import OrdinalOutput, ordinal_loss

torch.manual_seed(0)
torch.set_num_threads(1)
severity = torch.rand(1000, 1) * 10
grade = torch.where(severity[:, 0] < 5, 0, 2)
grade[(severity[:, 0] - 5).abs() < 0.1] = 1
print('people with the grades 0, 1, 2:', torch.bincount(grade).tolist())
for construction in ('all', 'immediate'):
    for penalty in ('logistic', 'hinge'):
        torch.manual_seed(0)
        layer = OrdinalOutput(1, 3)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        for _ in range(2000):
            optimizer.zero_grad()
            ordinal_loss(layer.linear(severity), grade, layer.interior_thresholds, construction, penalty).backward()
            optimizer.step()
        low, high = layer.interior_thresholds.tolist()
        found = layer(severity)[grade == 1].mean(dim=0).tolist()
        print(f"{construction}, {penalty}: thresholds {'in order' if low < high else 'crossed'}; people of grade 1 have",
              ', '.join(f'{round(100 * value)} %' for value in found))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
