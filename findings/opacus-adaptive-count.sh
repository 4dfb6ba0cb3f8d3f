#!/usr/bin/env bash
# The adaptive clipping of Opacus counts unclipped examples with twice the sensitivity that its noise
# is made for.
#
# Packages: opacus 1.6.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: AdaClipDPOptimizer splits the noise multiplier σ by a theorem that needs a count of
#   b - 1/2 an example (b is 1 for an unclipped one), whose noise of standard deviation s has the
#   noise multiplier 2s. The code counts b, and divides by the number of examples that were drawn,
#   which is private under Poisson sampling. One more unclipped example in a batch of clipped ones
#   moves the noisy count by 1, so the noise multiplier of the step is (1/σ'^2 + 1/s^2)^-1/2 with
#   σ' = (1/σ^2 - 1/(2s)^2)^-1/2, below σ, while the accountant takes σ. With s of a twentieth of a
#   large batch the difference is small, with small batches it is not.
# Expected: (b - 1/2) in the sum, and the expected batch size as the divisor.
# Instead: clip at a fixed norm, or charge the accountant with the smaller multiplier above.
# Source: Andrew and others (2021), arXiv 1905.03871, theorem 1 and algorithm 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'opacus==1.6.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
count without the example 0, with it 1, divisor 8 and 9
s 0.6: sigma for the accountant 1.0, of the step 0.569
s 1.0: sigma for the accountant 1.0, of the step 0.756
s 10.0: sigma for the accountant 1.0, of the step 0.996
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WEIGHTS = 40_000
NORMS = torch.tensor([[10.0]] * 8 + [[0.1]])  # of the gradients: eight clipped, one not
EXAMPLES = NORMS / WEIGHTS**0.5


def count(examples, std):
    model = nn.Linear(1, WEIGHTS, bias=False)
    data = TensorDataset(examples)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=len(examples)), noise_multiplier=1.0,
        max_grad_norm=1.0, clipping='adaptive', target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2, max_clipbound=10.0, min_clipbound=0.1, unclipped_num_std=std,
        loss_reduction='sum',
    )
    private(examples).sum().backward()
    optimizer.clip_and_accumulate()
    return int(optimizer.unclipped_num), optimizer.sample_size, optimizer


without, drawn, _ = count(EXAMPLES[:8], 1.0)
counted, drawn_with, _ = count(EXAMPLES, 1.0)
print(f'count without the example {without}, with it {counted}, divisor {drawn} and {drawn_with}')
for std in (0.6, 1.0, 10.0):
    torch.manual_seed(0)
    optimizer = count(EXAMPLES, std)[2]
    parameter = optimizer.params[0]
    parameter.summed_grad.zero_()
    optimizer.add_noise()
    noise = (1 / optimizer.noise_multiplier**2 - 1 / (2 * std) ** 2) ** -0.5
    assert abs(parameter.grad.std() / noise - 1) < 0.02
    of_step = (1 / noise**2 + ((counted - without) / std) ** 2) ** -0.5
    print(f's {std}: sigma for the accountant {optimizer.noise_multiplier}, of the step {of_step:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
