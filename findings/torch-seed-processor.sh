#!/usr/bin/env bash
# A torch seed gives other float32 normal numbers, and other initial weights, on another processor.
#
# Packages: torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: torch.randn in float32 and the initial weights of nn.Linear differ in their last bits
#   between the code for processors with AVX2 and the code for all others, which the environment
#   variable ATEN_CPU_CAPABILITY selects on one machine. rand in float32 and randn in float64 have
#   the same bits.
# Expected: that a CPU generator and a seed decide the numbers.
# Instead: compare results of two machines with a tolerance; draw in float64 where bits matter.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
float32 randn: other bits
weights of Linear: other bits
float64 randn: same bits
float32 rand: same bits
EXPECTED
cat > draw.py <<'PYTHON'
import torch


def show(make):
    torch.manual_seed(0)
    print(make().numpy().tobytes().hex())


show(lambda: torch.randn(64))
show(lambda: torch.nn.Linear(8, 8).weight.detach())
show(lambda: torch.randn(64, dtype=torch.float64))
show(lambda: torch.rand(64))
PYTHON
ATEN_CPU_CAPABILITY=default env/bin/python -W ignore draw.py > default.txt
ATEN_CPU_CAPABILITY=avx2 env/bin/python -W ignore draw.py > avx2.txt
printf '%s\n' 'float32 randn' 'weights of Linear' 'float64 randn' 'float32 rand' |
  paste -d '|' - default.txt avx2.txt |
  awk -F '|' '{print $1 ": " ($2 == $3 ? "same bits" : "other bits")}' > seen.txt
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
