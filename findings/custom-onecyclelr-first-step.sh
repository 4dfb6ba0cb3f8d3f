#!/usr/bin/env bash
# The warm-up of custom-onecyclelr begins after the first step, which has the rate of the optimizer: 1
# in place of 0.0001.
#
# Packages: custom-onecyclelr 0.2.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: OneCycleLr documents warmup_start_lr as the rate at which the warm-up starts. At step 0 it
#   returns the rate that the optimizer was made with, whatever it is, and its own from step 1 on.
#   Optimizers that have a default rate have it in the first step: 0.001 for Adam.
# Expected: warmup_start_lr at step 0, as OneCycleLR of torch sets its own first rate.
# Why it matters here: the first step is the one that the warm-up is for.
# Instead: make the optimizer with lr=warmup_start_lr.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'custom-onecyclelr==0.2.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
linear warm-up from 0.0001, optimizer made with 1.0: rates of the first steps 1.0000 0.0021 0.0041 0.0060 0.0080 0.0100 and a change of 1.030 in all
linear warm-up from 0.0001, optimizer made with 0.0001: rates of the first steps 0.0001 0.0021 0.0041 0.0060 0.0080 0.0100 and a change of 0.030 in all
exp warm-up from 0.0001, optimizer made with 1.0: rates of the first steps 1.0000 0.0003 0.0006 0.0016 0.0040 0.0100 and a change of 1.016 in all
exp warm-up from 0.0001, optimizer made with 0.0001: rates of the first steps 0.0001 0.0003 0.0006 0.0016 0.0040 0.0100 and a change of 0.017 in all
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from custom_onecyclelr import scheduler


def rates(optimizer_rate, warmup):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=optimizer_rate)
    schedule = scheduler.OneCycleLr(optimizer, warmup_iters=5, lr_idling_iters=5, annealing_iters=5, decay_iters=5,
                                    max_lr=0.01, annealing_lr_min=0.001, decay_lr_min=0.0001,
                                    warmup_start_lr=0.0001, warmup_type=warmup)
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]['lr'])
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    return seen, weight.item()


for warmup in ('linear', 'exp'):
    for rate in (1.0, 0.0001):
        seen, weight = rates(rate, warmup)
        print(f'{warmup} warm-up from 0.0001, optimizer made with {rate}: rates of the first steps',
              ' '.join(f'{value:.4f}' for value in seen), f'and a change of {-weight:.3f} in all')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
