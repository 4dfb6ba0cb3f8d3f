#!/usr/bin/env bash
# Speech models of transformers draw their training masks from NumPy's global generator, so seeding
# torch does not repeat a training step.
#
# Packages: transformers 5.24.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: Wav2Vec2 in training mode masks time steps (SpecAugment). With all dropout off, two
#   passes on one input under the same torch seed differ; they are equal once NumPy is seeded too.
# Expected: torch.manual_seed decides all random numbers of a torch module.
# Instead: seed NumPy as well (transformers.set_seed does), or set mask_time_prob to 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'transformers==5.24.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
torch seeded: equal False
torch and NumPy seeded: equal True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
import torch
from transformers import Wav2Vec2Config, Wav2Vec2Model

config = Wav2Vec2Config(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
    mask_time_prob=0.5, mask_time_length=2,
)
torch.manual_seed(0)
model = Wav2Vec2Model(config).train()
sound = torch.randn(1, 800)


def train_pass(seed_numpy):
    torch.manual_seed(0)
    if seed_numpy:
        np.random.seed(0)
    return model(sound).last_hidden_state


print('torch seeded: equal', torch.equal(train_pass(False), train_pass(False)))
print('torch and NumPy seeded: equal', torch.equal(train_pass(True), train_pass(True)))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
