#!/usr/bin/env bash
# The recall loss of perte has no gradient, so that nothing is trained beside another loss, and drops the
# class weights that it is given.
#
# Packages: perte 0.1.3, torch 2.13.0, numpy 2.4.6.
# Behaviour: RecallLoss counts the predictions of the class with the largest output, which does not
#   depend on the outputs in a way that can be differentiated. Added to a cross-entropy it changes the
#   printed loss and no weight. Its class weights are multiplied only where their type is not the type
#   of the outputs, so never for float32.
# Expected: a loss that a model can be trained with, as the paper describes it: a cross-entropy whose
#   classes are weighted by one minus their recall.
# Instead: torch.nn.functional.cross_entropy with such weights.
# Source: Tian and others, Striking the Right Balance: Recall Loss for Semantic Segmentation, ICRA 2022.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'perte==0.1.3' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
cross-entropy and 0 times the recall loss: loss 0.11, recall of class 1 33 %
cross-entropy and 1 times the recall loss: loss 0.44, recall of class 1 33 %
cross-entropy and 1000 times the recall loss: loss 333.44, recall of class 1 33 %
the trained weights are the same: True
the recall loss with class weights 0.5 and 0.5: 0.4140, 1 and 0: 0.4140; has a gradient: False
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from perte import RecallLoss

torch.manual_seed(0)
inputs = torch.randn(1, 2, 200)
targets = (inputs[:, 0] > 1.5).long()  # 7 % in class 1


def train(factor):
    torch.manual_seed(1)
    model = torch.nn.Conv1d(2, 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets) + factor * RecallLoss()(model(inputs), targets)
        loss.backward()
        optimizer.step()
    guesses = model(inputs).argmax(1)
    return loss.item(), 100 * (guesses[targets == 1] == 1).float().mean().item(), model.weight.data


losses, recalls, weights = zip(*(train(factor) for factor in (0, 1, 1000)))
for factor, loss, recall in zip((0, 1, 1000), losses, recalls):
    print(f'cross-entropy and {factor} times the recall loss: loss {loss:.2f}, recall of class 1 {recall:.0f} %')
print('the trained weights are the same:', all(torch.equal(weights[0], other) for other in weights))
outputs = torch.randn(1, 2, 200)
print(f'the recall loss with class weights 0.5 and 0.5: {RecallLoss([0.5, 0.5])(outputs, targets).item():.4f}, '
      f'1 and 0: {RecallLoss([1.0, 0.0])(outputs, targets).item():.4f}; has a gradient: '
      f'{RecallLoss()(outputs.requires_grad_(), targets).requires_grad}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
