#!/usr/bin/env bash
# RWKV in transformers divides its own weights when it is evaluated, so a state saved after an
# evaluation is another model.
#
# Packages: transformers 5.24.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: from block `rescale_every` (6 by default) on, the first forward pass in evaluation mode
#   divides two weights of each block by a power of two in place, and the first pass in training mode
#   multiplies them back. state_dict() after an evaluation holds the divided weights; a new model
#   that loads them divides once more. Whatever compares or averages weights sees them change.
# Expected: weights that only training changes.
# Instead: run one pass in training mode before saving, or set rescale_every=0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'transformers==5.24.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
weights changed by an evaluation: 16 of 258
ratio of the first: 0.5
weights changed after a pass in training mode: 0
saved after an evaluation and loaded: the same logits: False
with rescale_every=0: the same logits: True
EXPECTED
env/bin/python -W ignore - > seen.txt 2> messages.txt <<'PYTHON'
import torch
from transformers import RwkvConfig, RwkvForCausalLM

ids = torch.arange(8)[None]


def build(rescale_every):
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=14, context_length=16,
        rescale_every=rescale_every,
    )
    return RwkvForCausalLM(config)


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(ids).logits


model = build(6)
before = {name: p.detach().clone() for name, p in model.named_parameters()}
compute_logits(model)
state = {name: value.clone() for name, value in model.state_dict().items()}
changed = [name for name, value in before.items() if not torch.equal(value, state[name])]
print('weights changed by an evaluation:', len(changed), 'of', len(before))
print('ratio of the first:', (state[changed[0]] / before[changed[0]]).mean().item())
model.train()(ids)
after = dict(model.named_parameters())
print('weights changed after a pass in training mode:',
      sum(not torch.equal(value, after[name]) for name, value in before.items()))
for rescale_every in (6, 0):
    model = build(rescale_every)
    logits = compute_logits(model)
    loaded = build(rescale_every)
    loaded.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    what = 'with rescale_every=0' if rescale_every == 0 else 'saved after an evaluation and loaded'
    print(f'{what}: the same logits: {torch.allclose(compute_logits(loaded), logits)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
