#!/usr/bin/env bash
# The private noise of optax has no tails, and a mean that is not 0, where gradients are bfloat16.
#
# Packages: optax 0.2.8, jax 0.10.2, numpy 2.4.6.
# Behaviour: differentially_private_aggregate draws its noise in the type of the gradients, and
#   jax.random.normal takes a bfloat16 normal number from a uniform one with few bits. It takes 128
#   values, its size never exceeds 2.9, and its mean is -0.012. A release that lies 3 standard
#   deviations or more from what the other records give thus proves the presence of a record, so no
#   ε is finite at δ = 1e-5; and the shift of the mean adds up over steps.
# Expected: noise of float32, added before the result is rounded, as torch draws it for bfloat16.
# Instead: cast per-example gradients to float32 before the transformation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
float32: largest 5.22, share beyond 3.5 4.7e-04, mean -0.0002, over 3000000 distinct values
float16: largest 3.49, share beyond 3.5 0.0e+00, mean -0.0016, 1024 distinct values
bfloat16: largest 2.89, share beyond 3.5 0.0e+00, mean -0.0125, 128 distinct values
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import jax.numpy as jnp
import numpy as np
from optax.contrib import differentially_private_aggregate

SIZE, CLIP = 4_000_000, 1.0


def release(gradient, dtype, noise_multiplier=1.0):
    """One private sum of a single example's gradient, in float64."""
    aggregate = differentially_private_aggregate(CLIP, noise_multiplier, key=0)
    gradients = {'weight': jnp.asarray(gradient, dtype)[None]}
    result, _ = aggregate.update(gradients, aggregate.init(gradients))
    return np.asarray(result['weight'].astype(jnp.float32)).astype(np.float64)


for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    noise = release(np.zeros(SIZE), dtype)
    largest, distinct = np.abs(noise).max(), len(np.unique(noise))
    beyond = (np.abs(noise) > 3.5).mean()
    print(f'{dtype.__name__}: largest {largest:.2f}, share beyond 3.5 {beyond:.1e},',
          f'mean {noise.mean():+.4f},',
          f'{"over 3000000" if distinct > 3e6 else distinct} distinct values')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
