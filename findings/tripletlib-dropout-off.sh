#!/usr/bin/env bash
# tripletlib trains without dropout from its second epoch on where it is given data for validation.
#
# Packages: tripletlib 0.1.1, torch 2.13.0, numpy 2.4.6, scipy 1.17.1, scikit-learn 1.9.1, tqdm 4.67.1.
# Behaviour: fit of EmbeddingModel calls train() before the first epoch and eval() before each
#   validation, and never train() again. Dropout is off and BatchNorm keeps its first statistics for all
#   epochs but one. Without data for validation, training is as the model was written.
# Expected: the same training with and without validation.
# Instead: fit without validation, or one epoch a call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tripletlib==0.1.1' 'torch==2.13.0' 'numpy==2.4.6' \
  'scipy==1.17.1' 'scikit-learn==1.9.1' 'tqdm==4.67.1'
cat > expected.txt <<'EXPECTED'
without validation: share of the activations that dropout of 0.5 drops in each epoch of training 0.50 0.51 0.52 0.50
with validation: share of the activations that dropout of 0.5 drops in each epoch of training 0.49 0.00 0.00 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt 2> /dev/null <<'PYTHON'
import contextlib
import io

import torch
from tripletlib.triplet_utils import EmbeddingModel


class Model(EmbeddingModel):
    def __init__(self):
        super().__init__(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.dropped = []

    def forward(self, rows):
        hidden = self.layers[:2](rows)
        if torch.is_grad_enabled():
            self.dropped.append((hidden == 0).float().mean().item())
        return self.layers[2](hidden)


torch.manual_seed(0)
batches = [tuple(torch.randn(20, 3) for _ in range(3)) for _ in range(10)]
for name, validation in (('without validation', None), ('with validation', batches[:1])):
    model = Model()
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(batches, validation, epochs=4)
    shares = [sum(model.dropped[30 * epoch:30 * (epoch + 1)]) / 30 for epoch in range(4)]
    print(f'{name}: share of the activations that dropout of 0.5 drops in each epoch of training',
          ' '.join(f'{share:.2f}' for share in shares))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
