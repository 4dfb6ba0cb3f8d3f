#!/usr/bin/env bash
# Shampoo of torch-optimizer is not Shampoo: it takes other roots, and builds each preconditioner
# from a gradient that the one before has changed.
#
# Packages: torch-optimizer 0.3.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: for a tensor of k dimensions Shampoo multiplies the gradient along each of them by the
#   inverse root of order 2k of that dimension's summed outer products: fourth roots for a matrix,
#   eighth roots for a convolution. torch-optimizer takes roots of order k, and computes the outer
#   products of all dimensions but the first from the gradient that the earlier ones have
#   multiplied already. Its steps are another method's: about half of the published size after 200
#   steps, in other directions, while its documentation cites the paper.
# Expected: the published update.
# Instead: Shampoo of pytorch-optimizer 4.1.0 (another package), whose steps for a matrix are those
#   of the formula.
# Source: Gupta and others (2018), "Shampoo", arXiv 1802.09568, algorithms 1 and 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch-optimizer==0.3.0' 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
matrix, step 1: size 1.697, published 1.426, cosine 0.967
matrix, step 20: size 0.232, published 0.442, cosine 0.980
matrix, step 200: size 0.034, published 0.082, cosine 0.979
convolution, step 1: size 1.571, published 1.717, cosine 0.990
convolution, step 20: size 0.228, published 0.380, cosine 0.994
convolution, step 200: size 0.068, published 0.120, cosine 0.995
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
import torch_optimizer

EPSILON, STEPS = 0.1, 200


def unfold(tensor, axis):
    return tensor.movedim(axis, 0).flatten(1)


def inverse_root(matrix, order):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values ** (-1 / order)) @ vectors.T


def run_published(gradients):
    shape = gradients[0].shape
    sums = [EPSILON * torch.eye(size, dtype=torch.double) for size in shape]
    for gradient in gradients:
        step = gradient
        for axis in range(len(shape)):
            flat = unfold(gradient, axis)
            sums[axis] = sums[axis] + flat @ flat.T
            root = inverse_root(sums[axis], 2 * len(shape))
            step = torch.tensordot(root, step.movedim(axis, 0), dims=1).movedim(0, axis)
        yield step


def run_package(gradients):
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = torch_optimizer.Shampoo([weight], lr=1.0, epsilon=EPSILON)
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
        yield before - weight.detach()


for name, shape in (('matrix', (4, 6)), ('convolution', (8, 4, 3, 3))):
    torch.manual_seed(0)
    scales = torch.logspace(0, -2, shape[-1], dtype=torch.double)
    gradients = [torch.randn(*shape, dtype=torch.double) * scales for _ in range(STEPS)]
    published, package = list(run_published(gradients)), list(run_package(gradients))
    for at in (1, 20, 200):
        step, other = package[at - 1], published[at - 1]
        cosine = torch.nn.functional.cosine_similarity(step.flatten(), other.flatten(), dim=0)
        print(f'{name}, step {at}: size {step.norm():.3f}, published {other.norm():.3f},',
              f'cosine {cosine:.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
