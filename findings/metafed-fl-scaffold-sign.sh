#!/usr/bin/env bash
# The control variates of SCAFFOLD in metafed-fl have the wrong sign and a wrong number of steps.
#
# Packages: metafed-fl 1.0.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: SCAFFOLDClient.train sets the control of the client to (server control - client control) + (x
#   - y) / (epochs * rate). The first difference has the opposite sign, and the second divides by epochs
#   where the number of steps is meant, so that ten batches in an epoch make it ten times too large. With
#   one batch an epoch the first error remains: the new control is the gradient plus twice the correction,
#   and grows without end.
# Expected: client control - server control + (x - y) / (steps * rate), the mean gradient of the client on
#   its way, which for a loss that is nearly linear is its gradient.
# Instead: the formula of the paper.
# Source: Karimireddy and others, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020,
#   equation 4, option II.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'metafed-fl==1.0.0'
cat > expected.txt <<'EXPECTED'
1 batches an epoch, gradients of the clients -0.50 and 0.50
  round 1: controls -0.50 and 0.50
  round 2: controls 0.50 and -0.50
  round 3: controls -1.50 and 1.50
  round 4: controls 2.50 and -2.50
  round 5: controls -5.50 and 5.50
10 batches an epoch, gradients of the clients -0.50 and 0.50
  round 1: controls -5.00 and 5.00
  round 2: controls 49.98 and -49.98
  round 3: controls -554.64 and 554.64
  round 4: controls 6094.84 and -6094.84
  round 5: controls -67044.05 and 67044.05
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import os
import sys
import types

# the package imports models and data sets at once, which are not needed here
package = types.ModuleType('metafed')
package.__path__ = [next(f'{folder}/metafed' for folder in sys.path if os.path.isdir(f'{folder}/metafed'))]
sys.modules['metafed'] = package
import torch
from metafed.core.client import SCAFFOLDClient
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
for batches in (1, 10):
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    clients = []
    for label in (0, 1):
        people = TensorDataset(torch.ones(100, 1), torch.full((100,), label))
        clients.append(SCAFFOLDClient(label, DataLoader(people, batch_size=100 // batches), model, lr=1e-4, local_epochs=1))
    server = {'weight': torch.zeros(2, 1)}
    print(f'{batches} batches an epoch, gradients of the clients -0.50 and 0.50')
    for number in range(1, 6):
        deltas = []
        for client in clients:
            client.update_model({'weight': model.weight})
            client.update_controls(server)
            deltas.append(client.train()[1]['weight'])
        server = {'weight': server['weight'] + sum(deltas) / 2}
        controls = ' and '.join(f'{client.client_control["weight"][0].item():.2f}' for client in clients)
        print(f'  round {number}: controls {controls}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
