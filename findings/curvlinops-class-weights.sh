#!/usr/bin/env bash
# curvlinops leaves the class weights of a loss, and targets that it ignores, out of K-FAC and of the
# Monte Carlo Fisher, and says nothing.
#
# Packages: curvlinops-for-pytorch 3.0.1, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: GGNLinearOperator and EFLinearOperator follow CrossEntropyLoss(weight=...) and its
#   ignore_index. KFACLinearOperator and FisherMCLinearOperator of the same model, loss and data compute
#   the curvature of the loss without them: with weights of 1, 5 and 10 and reduction='sum' they are a
#   fifth of it, and examples with the target -100 count like the others.
# Expected: an approximation of the curvature of the loss that was given, or an error. For a linear
#   model Fisher and GGN have the same trace.
# Why it matters here: class weights are usual where a disease is rare, and a damping or a step that is
#   chosen for the loss is then several times too small or too large.
# Instead: GGNLinearOperator, or weights in the data (a sampler), and no ignored targets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'curvlinops-for-pytorch==3.0.1' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
sum: trace of GGN 194, K-FAC 201, Fisher 194
sum, weights 1, 5, 10: trace of GGN 881, K-FAC 201, Fisher 194
sum, half of the targets ignored: trace of GGN 94, K-FAC 201, Fisher 194
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from curvlinops import FisherMCLinearOperator, GGNLinearOperator, KFACLinearOperator

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3)).double()
examples, targets = torch.randn(64, 4, dtype=torch.float64), torch.randint(3, (64,))
half = torch.where(torch.arange(64) < 32, -100, targets)
weight = torch.tensor([1.0, 5.0, 10.0], dtype=torch.float64)


def trace(kind, loss, labels, **options):
    operator = kind(model, loss, list(model.parameters()), [(examples, labels)],
                    check_deterministic=False, **options)
    return torch.trace(operator @ torch.eye(operator.shape[0], dtype=torch.float64)).item()


for name, loss, labels in (
    ('sum', torch.nn.CrossEntropyLoss(reduction='sum'), targets),
    ('sum, weights 1, 5, 10', torch.nn.CrossEntropyLoss(weight, reduction='sum'), targets),
    ('sum, half of the targets ignored', torch.nn.CrossEntropyLoss(reduction='sum'), half),
):
    print(f'{name}: trace of GGN {trace(GGNLinearOperator, loss, labels):.0f},',
          f'K-FAC {trace(KFACLinearOperator, loss, labels, fisher_type="type-2"):.0f},',
          f'Fisher {trace(FisherMCLinearOperator, loss, labels, mc_samples=1000):.0f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
