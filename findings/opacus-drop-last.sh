#!/usr/bin/env bash
# Opacus takes the sampling rate from the number of batches: a batch size that does not divide the
# data becomes another one, and drop_last can make it all of the data.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: make_private sets the rate to 1 / len(data_loader). For 1,000 records and batch_size
#   600, two batches give the rate 0.5, so 500 records are expected; with drop_last=True one batch
#   gives the rate 1, so each step takes every record, and nothing is amplified by sampling. The ε is
#   right for what is done: 17.9 for ten steps, where the rate 0.6 would have 12.1. A warning says only that drop_last is ignored.
# Expected: batch_size / len(dataset), 0.6.
# Instead: print the rate of the returned loader, and choose a batch size that divides the data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
batch_size 250 drop_last False: rate 0.25 expected batch 250 epsilon of ten steps 6.0
batch_size 600 drop_last False: rate 0.5 expected batch 500 epsilon of ten steps 10.5
batch_size 600 drop_last True: rate 1.0 expected batch 1000 epsilon of ten steps 17.9
batch_size 400 drop_last True: rate 0.5 expected batch 500 epsilon of ten steps 10.5
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import logging
import warnings

import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.disable()
warnings.filterwarnings('ignore')
data = TensorDataset(torch.zeros(1000, 4), torch.zeros(1000))
for batch_size, drop_last in ((250, False), (600, False), (600, True), (400, True)):
    model = nn.Linear(4, 1)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size, drop_last=drop_last), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    accountant = PRVAccountant()
    accountant.history = [(1.0, loader.sample_rate, 10)]
    print(f'batch_size {batch_size} drop_last {drop_last}: rate {loader.sample_rate} expected batch '
          f'{optimizer.expected_batch_size} epsilon of ten steps {accountant.get_epsilon(1e-5):.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
