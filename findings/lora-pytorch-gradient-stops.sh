#!/usr/bin/env bash
# The adapters of lora-pytorch cut the gradient at each layer, so only the last one of a network
# is trained.
#
# Packages: lora-pytorch 0.2.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: The frozen layer is called without gradients, to save memory. What comes before it is
#   then reached through the adapter beside it alone, which begins with 0. In a network of three
#   layers the first two adapters have a gradient of 0, and later one without the part that goes
#   through the frozen layers: half of the right length in the first. The loss falls, by the last
#   layer, so nothing seems to be wrong.
# Expected: a frozen layer, whose weights have no gradient and whose input has one.
# Why it matters here: clipping per example counts gradients that are 0.
# Instead: requires_grad_(False) for the weights and an ordinary call, as in this script, or peft.
# Source: Hu and others, LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, section
#   4.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'lora-pytorch==0.2.0'
cat > expected.txt <<'EXPECTED'
at the beginning, adapter of layer 1: length of the gradient 0.0000, by hand 0.0773
at the beginning, adapter of layer 2: length of the gradient 0.0000, by hand 0.4625
at the beginning, adapter of layer 3: length of the gradient 1.3762, by hand 1.3762
after 20 steps, adapter of layer 1: length of the gradient 0.0808, by hand 0.1605
after 20 steps, adapter of layer 2: length of the gradient 0.0980, by hand 0.1289
after 20 steps, adapter of layer 3: length of the gradient 0.0546, by hand 0.0546
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import copy
import torch
from lora_pytorch import LoRA

torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
x, y = torch.randn(64, 6), torch.randn(64, 1)
model = LoRA.from_module(copy.deepcopy(base), rank=2)
adapters = [layer.lora_module for layer in model.module if isinstance(layer, LoRA)]

def right():
    value, pairs = x, []
    for layer, number in ((0, 0), (2, 1), (4, 2)):
        pair = [adapters[number].in_proj.detach().clone().requires_grad_(), adapters[number].out_proj.detach().clone().requires_grad_()]
        pairs.append(pair)
        value = torch.nn.functional.linear(value, base[layer].weight.detach(), base[layer].bias.detach()) + value @ pair[0] @ pair[1]
        value = torch.tanh(value) if layer < 4 else value
    torch.nn.functional.mse_loss(value, y).backward()
    return [pair[1].grad for pair in pairs]

def show(name):
    for adapter in adapters:
        adapter.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    for number, (adapter, gradient) in enumerate(zip(adapters, right())):
        seen = adapter.out_proj.grad if adapter.out_proj.grad is not None else torch.zeros_like(gradient)
        print(f'{name}, adapter of layer {number + 1}: length of the gradient {seen.norm():.4f}, by hand {gradient.norm():.4f}')

show('at the beginning')
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
show('after 20 steps')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
