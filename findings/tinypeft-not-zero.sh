#!/usr/bin/env bash
# The adapters of tinypeft begin with random products and not with 0, so a model is another one as
# soon as they are put in.
#
# Packages: tinypeft 1.0.0, torch 2.13.0, numpy 2.4.6, transformers 5.24.0.
# Behaviour: inject_lora fills both factors with normal numbers of 0.01. The paper has 0 in one of
#   them, so that training starts from the model that was trained before. The product is scaled by
#   alpha / r, so a larger alpha, which should only make the steps larger, makes the noise larger:
#   with r = 8 and alpha = 256 the outputs of a network of three layers are 51 % away from its own
#   before the first step, and 3 % with 16. Comparisons of methods start from other models.
# Expected: unchanged outputs after the injection.
# Instead: torch.nn.init.zeros_(layer.B) for each layer that inject_lora returns.
# Source: Hu and others, LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, section
#   4.1: B = 0 at the beginning of training.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'tinypeft==1.0.0'
cat > expected.txt <<'EXPECTED'
r = 8, alpha = 16: outputs changed by 3.2%, other class for 2.2%; with B = 0 by 0.0%
r = 8, alpha = 64: outputs changed by 12.8%, other class for 9.0%; with B = 0 by 0.0%
r = 8, alpha = 256: outputs changed by 51.0%, other class for 28.2%; with B = 0 by 0.0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import copy
import torch
from tinypeft.lora.lora import inject_lora

torch.manual_seed(0)
base = torch.nn.Sequential()
for number, (rows, columns) in enumerate(((64, 256), (256, 256), (256, 10))):
    base.add_module(f'linear{number}', torch.nn.Linear(rows, columns))
    if number < 2:
        base.add_module(f'relu{number}', torch.nn.ReLU())
x = torch.randn(500, 64)
with torch.no_grad():
    before = base(x)
    for rank, alpha in ((8, 16), (8, 64), (8, 256)):
        torch.manual_seed(1)
        model, layers = inject_lora(copy.deepcopy(base).eval(), r=rank, alpha=alpha, target_modules=['linear'])
        after = model(x)
        distance = ((after - before).norm() / (before - before.mean(0)).norm()).item()
        for layer in layers:
            torch.nn.init.zeros_(layer.B)
        zero = ((model(x) - before).norm() / before.norm()).item()
        print(f'r = {rank}, alpha = {alpha}: outputs changed by {distance:.1%}, other class for {(after.argmax(1) != before.argmax(1)).float().mean():.1%};',
              f'with B = 0 by {zero:.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
