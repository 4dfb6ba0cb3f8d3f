#!/usr/bin/env bash
# A function with an assignment in place loses its derivative when torch makes it functional.
#
# Packages: torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: functionalize turns copy_ and x[...] = y into aten::copy, which has no derivative, so
#   backward through the traced graph raises an error where the same lines in eager mode have a
#   gradient. Whoever traces a model to find per-example gradients meets it with every buffer that
#   is filled in place.
# Expected: the derivative of copy_: zero for the target, the gradient for the source.
# Instead: trace without functionalize, or put a decomposition of aten.copy into the trace.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
eager: [2.0, 2.0, 2.0]
functional: RuntimeError derivative for aten::copy is not implemented
with a decomposition: [2.0, 2.0, 2.0]
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx


def double(x):
    filled = torch.empty_like(x)
    filled.copy_(x)
    return (filled * 2).sum()


x = torch.ones(3, requires_grad=True)
replace = {torch.ops.aten.copy.default: lambda target, source, _=False: source.expand_as(target).clone()}
for name, run in (
    ('eager', double),
    ('functional', make_fx(functionalize(double))(x)),
    ('with a decomposition', make_fx(functionalize(double), decomposition_table=replace)(x)),
):
    try:
        print(f'{name}:', torch.autograd.grad(run(x), x)[0].tolist())
    except RuntimeError as error:
        print(f'{name}:', type(error).__name__, error)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
