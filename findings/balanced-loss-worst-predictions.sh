#!/usr/bin/env bash
# The focal loss of balanced-loss stops at the worst predictions: the loss halves there and its
# gradient is NaN.
#
# Packages: balanced-loss 0.1.1, torch 2.13.0, numpy 2.4.6.
# Behaviour: focal_loss computes the factor (1 - p)^gamma of a true class from log(1 + exp(-x)).
#   In half precision exp(-x) is infinite below x = -11.1, in single precision below -88.7. The
#   factor is then 0 in place of 1, so the loss of the example that is most wrong falls from 24 to
#   12, with a gradient of NaN: one such example turns all weights into NaN in the next step.
# Expected: a loss that grows with the error, as softplus computes it; 24 for a logit of -12 and
#   two classes.
# Instead: torch.exp(gamma * torch.nn.functional.logsigmoid(-x)) as the factor, which is stable at
#   both ends.
# Source: Lin and others, Focal Loss for Dense Object Detection, ICCV 2017, equation 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'balanced-loss==0.1.1'
cat > expected.txt <<'EXPECTED'
float16, true class -4: loss 7.7, by definition 7.7; gradient -1.1
float16, true class -11: loss 22.0, by definition 22.0; gradient -1.0
float16, true class -12: loss 12.0, by definition 24.0; gradient nan
float32, true class -12: loss 24.0, by definition 24.0; gradient -1.0
float32, true class -88: loss 176.0, by definition 176.0; gradient -1.0
float32, true class -89: loss 89.0, by definition 178.0; gradient nan
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from balanced_loss import Loss

loss = Loss('focal_loss', fl_gamma=2)
for dtype, values in ((torch.float16, (-4.0, -11.0, -12.0)), (torch.float32, (-12.0, -88.0, -89.0))):
    for value in values:
        logits = torch.tensor([[value, -value]], dtype=dtype, requires_grad=True)
        result = loss(logits, torch.tensor([0]))
        result.backward()
        x = torch.tensor([value, value], dtype=torch.float64)
        right = (torch.sigmoid(-x) ** 2 * torch.nn.functional.softplus(-x)).sum()
        print(f'{str(dtype)[6:]}, true class {value:.0f}: loss {result.item():.1f}, by definition {right.item():.1f};',
              f'gradient {logits.grad[0, 0].item():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
