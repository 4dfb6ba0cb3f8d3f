#!/usr/bin/env bash
# The discrete Laplace reports of privateAB contain the answer: its fraction remains, whatever ε.
#
# Packages: privateAB 0.0.2, torch 2.13.0, numpy 2.4.6, scipy 1.17.1.
# Behaviour: the mechanism disclapu adds whole numbers to a vector that has the root of the number of
#   categories at the place of the answer and 0 elsewhere. Unless the number of categories is a
#   square, the only entry with a fraction is the answer.
# Expected: ε-local differential privacy, which the package states. The noise is then to be added to
#   whole numbers, or be continuous, as in the mechanism lapu.
# Why it matters here: all answers can be read from the reports.
# Instead: the mechanisms lapu, genrr or bitflip.
# Source: Ghosh, Roughgarden and Sundararajan (2012): the geometric mechanism is for whole numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'privateAB==0.0.2' 'torch==2.13.0' 'numpy==2.4.6' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
3 categories, epsilon 0.1: answers read from the fraction: disclapu 100%, lapu 34%
4 categories, epsilon 0.1: answers read from the fraction: disclapu 26%, lapu 26%
5 categories, epsilon 0.1: answers read from the fraction: disclapu 100%, lapu 18%
10 categories, epsilon 0.1: answers read from the fraction: disclapu 100%, lapu 10%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import torch
from privateAB.client import client

torch.manual_seed(0)
for categories in (3, 4, 5, 10):
    answers = torch.randint(categories, (2000,))
    read = {}
    for mechanism in ('disclapu', 'lapu'):
        reports = client().release_private(mechanism, answers, categories, 0.1, 'cpu')
        fraction = (reports - reports.round()).abs()
        read[mechanism] = (fraction.argmax(dim=1) == answers).float().mean()
    print(f'{categories} categories, epsilon 0.1: answers read from the fraction:',
          f'disclapu {read["disclapu"]:.0%}, lapu {read["lapu"]:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
