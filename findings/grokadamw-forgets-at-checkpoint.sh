#!/usr/bin/env bash
# GrokAdamW that is loaded from a checkpoint begins with empty moments at step 0, without an error.
#
# Packages: grokadamw 0.1.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: the moments and the step are kept in a dictionary in the parameter group, whose keys
#   are the tensors of the model. state_dict and load_state_dict carry it over, and nothing is
#   found in it under the tensors of the new model, so that all moments begin again. The state of
#   the optimizer itself is empty.
# Expected: the same weights as without a break, as with torch.optim.AdamW.
# Why it matters here: long training is resumed from checkpoints, and steps after each of them are
#   those of a new start.
# Instead: keep the optimizer object, or map the dictionary to the new tensors by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'grokadamw==0.1.2'
cat > expected.txt <<'EXPECTED'
GrokAdamW: 0.4945 0.3930 0.1900 -0.0049; tensors with a state in the optimizer 0
GrokAdamW, resumed after 5 steps: 0.4945 0.3940 0.1937 0.0045; tensors with a state in the optimizer 0
torch.optim.AdamW: 0.5041 0.4099 0.2315 0.0717; tensors with a state in the optimizer 1
torch.optim.AdamW, resumed after 5 steps: 0.5041 0.4099 0.2315 0.0717; tensors with a state in the optimizer 1
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import io
import logging

import torch
from grokadamw import GrokAdamW

logging.disable(logging.CRITICAL)
target = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)


def train(make, resumed):
    """Return the first weight after 5, 6, 8 and 10 steps, with a new process's objects after the fifth if resumed."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, seen = make([weight]), []
    for step in range(10):
        optimizer.zero_grad()
        ((weight - target) ** 2).sum().backward()
        optimizer.step()
        seen.append(weight[0].item())
        if resumed and step == 4:
            file = io.BytesIO()
            torch.save({'weight': weight.data, 'optimizer': optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            weight = torch.nn.Parameter(saved['weight'])
            optimizer = make([weight])
            optimizer.load_state_dict(saved['optimizer'])
    return ' '.join(f'{seen[place]:.4f}' for place in (4, 5, 7, 9)), len(optimizer.state)


for name, make in (('GrokAdamW', lambda weights: GrokAdamW(weights, lr=0.1)), ('torch.optim.AdamW', lambda weights: torch.optim.AdamW(weights, lr=0.1))):
    for resumed in (False, True):
        weights, states = train(make, resumed)
        print(f'{name}{", resumed after 5 steps" if resumed else ""}: {weights}; tensors with a state in the optimizer {states}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
