#!/usr/bin/env bash
# The Laplace noise of torch ends at 5.5 times its scale in bfloat16, and at 7.6 times in float16.
#
# Packages: torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: torch.distributions.Laplace takes a uniform number in the type of its parameters, and
#   the logarithm of the smallest one ends the tail: of 1,000 values of true Laplace noise four are
#   larger in bfloat16. The standard deviation is 4 % too small as well. The Laplace mechanism is
#   (ε, 0)-private because its tails never end; with these an answer beyond the last value proves a
#   record. torch.randn and exponential_ draw in float32 first and have their tails in all types.
# Expected: the same distribution in all types, as torch.randn gives.
# Instead: sample in float32 or float64, and round the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
torch.float32: Laplace largest 14.6, beyond 5.55 over 10000 times, beyond 7.7 over 1000 times, std 1.42; normal largest 5.2
torch.float16: Laplace largest 7.6, beyond 5.55 over 10000 times, beyond 7.7 0 times, std 1.40; normal largest 5.2
torch.bfloat16: Laplace largest 5.5, beyond 5.55 0 times, beyond 7.7 0 times, std 1.36; normal largest 5.2
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch

DRAWS = 4_000_000
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    torch.manual_seed(0)
    zero, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    laplace = torch.distributions.Laplace(zero, one).sample((DRAWS,)).double()
    normal = torch.randn(DRAWS, dtype=dtype).double()
    beyond = [int((laplace.abs() > size).sum()) for size in (5.55, 7.7)]
    print(f'{dtype}: Laplace largest {laplace.abs().max():.1f},',
          f'beyond 5.55 {"over 10000" if beyond[0] > 10_000 else beyond[0]} times,',
          f'beyond 7.7 {"over 1000" if beyond[1] > 1000 else beyond[1]} times,',
          f'std {laplace.std():.2f}; normal largest {normal.abs().max():.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
