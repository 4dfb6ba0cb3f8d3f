#!/usr/bin/env bash
# The MultiplicativeBS of bs-scheduler rounds the batch size after each epoch, so a small one
# never grows.
#
# Packages: bs-scheduler 1.0.2, torch 2.13.0, numpy 2.4.6.
# Behaviour: The scheduler multiplies the current batch size, a whole number, by the factor and
#   rounds the result. With the factor of its documented example, 1.05, a batch of 8 becomes 8.4,
#   which is 8 again, in each epoch; 10 becomes 10.5, rounded to even 10. From 11 on it grows,
#   faster than asked for: 11 becomes 12. Without a message the noise of the gradients stays as
#   large as at the beginning. LambdaBS with 1.05 ** epoch has 92 after 50 epochs.
# Expected: the product of the factors times the first batch size, rounded once.
# Instead: LambdaBS with the product.
# Source: its documentation, which names torch.optim.lr_scheduler.MultiplicativeLR; Smith and
#   others, Don't Decay the Learning Rate, Increase the Batch Size, ICLR 2018.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'bs-scheduler==1.0.2'
cat > expected.txt <<'EXPECTED'
from 8: 8 after 1 (LambdaBS 8, by hand 8.4), 8 after 10 (LambdaBS 13, by hand 13.0), 8 after 50 (LambdaBS 92, by hand 91.7)
from 10: 10 after 1 (LambdaBS 10, by hand 10.5), 10 after 10 (LambdaBS 16, by hand 16.3), 10 after 50 (LambdaBS 115, by hand 114.7)
from 11: 12 after 1 (LambdaBS 12, by hand 11.6), 21 after 10 (LambdaBS 18, by hand 17.9), 139 after 50 (LambdaBS 126, by hand 126.1)
from 32: 34 after 1 (LambdaBS 34, by hand 33.6), 52 after 10 (LambdaBS 52, by hand 52.1), 368 after 50 (LambdaBS 367, by hand 367.0)
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from bs_scheduler import LambdaBS, MultiplicativeBS
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.zeros(10000, 1))
for size in (8, 10, 11, 32):
    multiplied = MultiplicativeBS(DataLoader(data, batch_size=size), lambda epoch: 1.05 if epoch else 1.0)
    power = LambdaBS(DataLoader(data, batch_size=size), lambda epoch: 1.05 ** epoch)
    seen = []
    for epoch in range(1, 51):
        multiplied.step()
        power.step()
        if epoch in (1, 10, 50):
            seen.append(f'{multiplied.batch_size} after {epoch} (LambdaBS {power.batch_size}, by hand {size * 1.05 ** epoch:.1f})')
    print(f'from {size}: ' + ', '.join(seen))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
