#!/usr/bin/env bash
# Opacus trains the padding row of an embedding, and longer padding changes the norm that it clips.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: nn.Embedding(padding_idx=0) gives row 0 no gradient, so that it stays at 0. Opacus's
#   per-example gradient counts the padding like any token. A short text in a long batch then has a
#   norm made of its padding, its words are clipped away, and row 0 is trained, where the same model
#   without privacy leaves it alone. No warning, and ModuleValidator finds nothing.
# Expected: the gradients that torch gives for one example at a time.
# Instead: multiply the embedded tokens by a mask of the padding, so that its gradient is 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'opacus==1.6.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
2 words, 0 of padding: torch norm 2.00, row 0 0.00; Opacus norm 2.00, row 0 0.00, words after a clip at 1: 1.00
2 words, 6 of padding: torch norm 2.00, row 0 0.00; Opacus norm 8.72, row 0 8.49, words after a clip at 1: 0.23
2 words, 30 of padding: torch norm 2.00, row 0 0.00; Opacus norm 42.47, row 0 42.43, words after a clip at 1: 0.05
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.linear = nn.Linear(8, 1)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens).sum(1))


torch.manual_seed(0)
model = Classifier()
assert not ModuleValidator.validate(model)
with torch.no_grad():
    model.linear.weight.fill_(0.5)
words = [3, 7]
for padding in (0, 6, 30):
    tokens = torch.tensor([words + [0] * padding])
    model.zero_grad()
    model(tokens).sum().backward()
    alone = model.embedding.weight.grad.clone()
    model.zero_grad()
    private = GradSampleModule(model, loss_reduction='sum')
    private(tokens).sum().backward()
    sample = model.embedding.weight.grad_sample[0]
    private.to_standard_module()
    clipped = sample / sample.norm().clamp(min=1)
    print(f'{len(words)} words, {padding} of padding: torch norm {alone.norm():.2f}, row 0',
          f'{alone[0].norm():.2f}; Opacus norm {sample.norm():.2f}, row 0 {sample[0].norm():.2f},',
          f'words after a clip at 1: {clipped[words].norm():.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
