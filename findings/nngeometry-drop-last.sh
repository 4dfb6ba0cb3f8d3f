#!/usr/bin/env bash
# nngeometry divides the Fisher matrix by records that a loader leaves out, and does it twice for K-FAC.
#
# Packages: nngeometry 0.4, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: FIM(loader=...) sums over the batches of the loader and divides by len(loader.sampler).
#   With drop_last=True the records of the last batch are not in the sum, but in the divisor: for 100
#   records and batches of 60 the matrix is 0.6 of the Fisher matrix of the 60 records. PMatKFAC divides
#   both of its factors, so it is 0.36 of it.
# Expected: the mean over the records that were used, as it is for loaders without drop_last.
# Why it matters here: training loaders mostly have drop_last=True, and a preconditioner that is 0.36 of
#   the right one makes steps of almost three times the size.
# Instead: a loader of its own, with drop_last=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'nngeometry==0.4' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
{'batch_size': 100} records 100 trace of the Fisher matrix 1.817, of K-FAC 1.817
{'batch_size': 60} records 100 trace of the Fisher matrix 1.817, of K-FAC 1.817
{'batch_size': 60, 'drop_last': True} records 60 trace of the Fisher matrix 1.090, of K-FAC 0.654
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from nngeometry.metrics import FIM
from nngeometry.object import PMatDense, PMatKFAC
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
examples = torch.randn(1, 4).expand(100, 4)  # all alike: the mean does not depend on which are used
data = TensorDataset(examples, torch.zeros(100, dtype=torch.int64))
for options in ({'batch_size': 100}, {'batch_size': 60}, {'batch_size': 60, 'drop_last': True}):
    loader = DataLoader(data, **options)
    used = sum(len(batch) for batch, _ in loader)
    traces = (
        FIM(model=model, loader=loader, representation=kind, variant='classif_logits').trace().item()
        for kind in (PMatDense, PMatKFAC)
    )
    print(options, 'records', used, 'trace of the Fisher matrix {:.3f}, of K-FAC {:.3f}'.format(*traces))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
