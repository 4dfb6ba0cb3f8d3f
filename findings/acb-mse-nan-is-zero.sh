#!/usr/bin/env bash
# The loss of acb-mse is 0 for a model that returns NaN: the worst output has the best loss.
#
# Packages: acb-mse 1.0.6, torch 2.13.0, numpy 2.4.6.
# Behaviour: ACBLoss adds the mean squared errors of the pixels that are 0 in the target and of the others.
#   A mean of no pixels is NaN, so NaN is replaced by 0. A NaN of the model makes a mean NaN, too, and the
#   loss of all pixels of this kind becomes 0. If both kinds have one, the loss is the whole number 0.
# Expected: NaN, as torch.nn.MSELoss returns it; a mean of no pixels can be told by the mask.
# Why it matters here: the epoch in which a training diverges is kept as the best one.
# Instead: check torch.isfinite(output).all() before the loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'acb-mse==1.0.6' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
right: mean squared error 0.0, ACBLoss 0.0
wrong by 1: mean squared error 1.0, ACBLoss 2.0
wrong by 1, one NaN: mean squared error nan, ACBLoss 1.0
only NaN: mean squared error nan, ACBLoss 0.0
diverged model: output nan, ACBLoss 0.0
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from acb_mse import ACBLoss

loss = ACBLoss()
target = torch.tensor([0.0, 0.0, 1.0, 2.0])
for name, values in (('right', [0, 0, 1, 2]), ('wrong by 1', [1, 1, 2, 3]),
                     ('wrong by 1, one NaN', [1, 1, 2, float('nan')]), ('only NaN', 4 * [float('nan')])):
    output = torch.tensor(values, dtype=torch.float32)
    print(f'{name}: mean squared error {torch.nn.functional.mse_loss(output, target).item():.1f}, '
          f'ACBLoss {float(loss(output, target)):.1f}')
diverged = torch.nn.Linear(4, 4)
torch.nn.init.constant_(diverged.weight, 1e30)
output = diverged(torch.tensor([1e30, -1e30, 1e30, -1e30]))
print(f'diverged model: output {output[0].item()}, ACBLoss {float(loss(output, target)):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
