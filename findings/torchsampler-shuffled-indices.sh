#!/usr/bin/env bash
# The weights of torchsampler belong to other examples where the indices are not sorted.
#
# Packages: torchsampler 0.1.2, torch 2.13.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: ImbalancedDatasetSampler sorts the labels by the indices and leaves the indices in their
#   order. The weight of the example with the third lowest index goes to the third index of the list. With
#   the indices of a random split, in random order, the weights have nothing to do with the labels, and
#   the rare class stays rare.
# Expected: "weigh your samples inversely to your class appearing probability", in any order of the
#   indices: half of the examples of each of two classes.
# Instead: sorted(indices), and the labels in that order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6' \
  'pandas==2.3.3'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'torchsampler==0.1.2'
cat > expected.txt <<'EXPECTED'
indices sorted: ill in the subset 5.2%, drawn 50.3%
indices of a random split: ill in the subset 5.2%, drawn 4.7%
indices backwards: ill in the subset 5.2%, drawn 6.3%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import sys
import types

import torch

# torchsampler imports torchvision for the names of two classes, which it does not use here
vision = types.ModuleType('torchvision')
names = ('MNIST', 'ImageFolder', 'DatasetFolder')
vision.datasets = types.SimpleNamespace(**{name: type(name, (), {}) for name in names})
sys.modules['torchvision'] = vision
from torch.utils.data import TensorDataset
from torchsampler import ImbalancedDatasetSampler

torch.manual_seed(0)
labels = (torch.arange(2000) % 20 == 0).long()
people = TensorDataset(torch.zeros(2000, 1), labels)
part = torch.randperm(2000)[:1000]
ordered = part.sort().values
for name, indices in (('sorted', ordered), ('of a random split', part), ('backwards', ordered.flip(0))):
    sampler = ImbalancedDatasetSampler(people, labels=labels[indices].tolist(), indices=indices.tolist(), num_samples=20000)
    drawn = labels[torch.tensor(list(sampler))]
    print(f'indices {name}: ill in the subset {labels[indices].double().mean():.1%}, drawn {drawn.double().mean():.1%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
