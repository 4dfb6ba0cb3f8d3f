#!/usr/bin/env bash
# ModuleValidator.fix of Opacus replaces a BatchNorm1d by a layer whose output is zero for all inputs.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: BatchNorm of C channels becomes GroupNorm(gcd(32, C), C). A table has one value a
#   channel, so for C = 2, 4, 8, 16 or 32 a group is one number less its own mean: zero. The network
#   behind it sees its biases only and learns the mean, without an error. Odd widths become one
#   group, which works. Known since 2023 (opacus issue 567) and as before in 1.6.0.
# Expected: LayerNorm, or groups of at least two values, or an error.
# Instead: replace BatchNorm1d by LayerNorm yourself before make_private.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
7 features: GroupNorm(1, 7) outputs differ True
16 features: GroupNorm(16, 16) outputs differ False
32 features: GroupNorm(32, 32) outputs differ False
48 features: GroupNorm(16, 48) outputs differ True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from opacus.validators import ModuleValidator
from torch import nn

torch.manual_seed(0)
for features in (7, 16, 32, 48):
    model = nn.Sequential(nn.Linear(4, features), nn.BatchNorm1d(features), nn.ReLU(), nn.Linear(features, 2))
    model = ModuleValidator.fix(model)
    norm = model[1]
    outputs = model(torch.randn(100, 4) * 10)
    differ = bool(outputs.std(0).max() > 1e-3)
    print(f'{features} features: GroupNorm({norm.num_groups}, {norm.num_channels}) outputs differ {differ}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
