#!/usr/bin/env bash
# dp-lora divides gradients by the batch size twice under the mean loss of its documentation: of 64
# examples none is clipped where 47 should be, and the step beside the same noise is a fourteenth.
#
# Packages: dp-lora 0.1.0, opacus 1.6.0, dp-accounting 0.6.0, torch 2.13.0, numpy 2.4.6, scipy 1.17.1.
# Behaviour: README and docstring train with model(**batch).loss, the mean over the batch. The hooks take
#   the gradients of that mean as the gradients of the examples, so they are 1/64 of them. They are
#   clipped to max_grad_norm, noise for that norm is added to their sum, and the sum is divided by the
#   batch size again. Privacy holds; less is learned, the less the larger the batch.
# Expected: gradients of single examples, as opacus makes them: its hooks multiply by the batch size
#   where the loss is a mean.
# Instead: loss * len(batch) before backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'opacus==1.6.0' 'dp-accounting==0.6.0' 'torch==2.13.0' \
  'numpy==2.4.6' 'scipy==1.17.1'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'dp-lora==0.1.0'
cat > expected.txt <<'EXPECTED'
the mean, as documented, batch of 8: largest gradient 0.839 (right 6.714), clipped 0 (right 5), step without noise 0.710 of the mean of the clipped gradients
the mean, as documented, batch of 64: largest gradient 0.140 (right 8.984), clipped 0 (right 47), step without noise 0.072 of the mean of the clipped gradients
the mean times the batch size, batch of 8: largest gradient 6.714 (right 6.714), clipped 5 (right 5), step without noise 1.000 of the mean of the clipped gradients
the mean times the batch size, batch of 64: largest gradient 8.984 (right 8.984), clipped 47 (right 47), step without noise 1.000 of the mean of the clipped gradients
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from dp_lora import DPLoRAEngine
from torch.utils.data import DataLoader, TensorDataset


class Layer(torch.nn.Module):
    """Adapt a frozen layer with lora_A and lora_B, which dp-lora looks for in the layers of peft."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(10, 2, bias=False).requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict({'default': torch.nn.Linear(10, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({'default': torch.nn.Linear(4, 2, bias=False)})
        torch.nn.init.zeros_(self.lora_B['default'].weight)

    def forward(self, rows):
        return self.base(rows) + self.lora_B['default'](self.lora_A['default'](rows))


def measure(batch, factor):
    """Return the largest gradient of an example, the number clipped, and the step over the mean gradient."""
    torch.manual_seed(0)
    rows, labels = 3 * torch.randn(batch, 10), torch.randint(2, (batch,))
    model = torch.nn.Sequential(Layer())
    weight = model[0].lora_B['default'].weight
    engine = DPLoRAEngine()
    model, optimizer, _ = engine.make_private(
        model=model, optimizer=torch.optim.SGD([weight], lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(rows, labels), batch_size=batch), poisson_sampling=False)
    singles = [torch.autograd.grad(torch.nn.functional.cross_entropy(model(row[None]), label[None]), weight)[0]
               for row, label in zip(rows, labels)]
    optimizer.zero_grad()
    (factor(batch) * torch.nn.functional.cross_entropy(model(rows), labels)).backward()
    gradients = engine.grad_sample_module.get_per_sample_grads()
    largest = gradients[0][1].flatten(1).norm(dim=1).max().item()
    clipped = optimizer.step(gradients)['num_clipped']
    right = sum(single / max(1, single.norm().item()) for single in singles) / batch
    return (largest, max(single.norm().item() for single in singles), clipped,
            sum(single.norm().item() > 1 for single in singles), (-weight.detach()).norm().item() / right.norm().item())


for name, factor in (('the mean, as documented', lambda batch: 1), ('the mean times the batch size', lambda batch: batch)):
    for batch in (8, 64):
        largest, right, clipped, should, step = measure(batch, factor)
        print(f'{name}, batch of {batch}: largest gradient {largest:.3f} (right {right:.3f}), clipped {clipped} (right '
              f'{should}), step without noise {step:.3f} of the mean of the clipped gradients')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
