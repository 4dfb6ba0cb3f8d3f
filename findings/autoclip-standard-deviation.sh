#!/usr/bin/env bash
# The StandardClip of autoclip turns all weights into NaN in the second step, with its default settings: it
# clips the gradient at the standard deviation of one number.
#
# Packages: autoclip 0.2.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: the threshold is a multiple of the standard deviation of the norms so far. The first step has
#   none and is not clipped. In the second step there is one, whose standard deviation with n - 1 is NaN,
#   and torch multiplies each gradient by the threshold over the norm. The same happens with
#   global_threshold=True. QuantileClip is right.
# Expected: no clipping until there are two norms, or a gradient that is left as it is.
# Why it matters here: adaptive thresholds for clipping are what private training looks for.
# Instead: QuantileClip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'autoclip==0.2.1' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
no clipping: weights after steps 1 to 3 finite, finite, finite
QuantileClip: weights after steps 1 to 3 finite, finite, finite
StandardClip: weights after steps 1 to 3 finite, NaN, NaN
StandardClip, global_threshold: weights after steps 1 to 3 finite, NaN, NaN
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from autoclip.torch import QuantileClip, StandardClip

for name, clip, options in (('no clipping', None, {}), ('QuantileClip', QuantileClip, {}),
                            ('StandardClip', StandardClip, {}),
                            ('StandardClip, global_threshold', StandardClip, {'global_threshold': True})):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if clip:
        optimizer = clip.as_optimizer(optimizer, **options)
    finite = []
    for step in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(8, 3)), torch.randn(8, 1)).backward()
        optimizer.step()
        finite.append(all(weights.isfinite().all() for weights in model.parameters()))
    print(f'{name}: weights after steps 1 to 3', ', '.join('finite' if fine else 'NaN' for fine in finite))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
